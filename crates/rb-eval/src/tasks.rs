//! Files of questions with choices, one JSON object a line, made into contexts and continuations.
//!
//! Prompts are those of lm-evaluation-harness for the tasks of the same names, without examples before the question.

use std::path::Path;
use std::str::FromStr;

use serde_json::Value;

use crate::{EvalError, Result};

/// What stands between a context and a choice.
const DELIMITER: &str = " ";

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`.
    Hellaswag,
    /// ARC's easy questions: `question`, `choices`, `answerKey`.
    ArcEasy,
    /// ARC's hard questions, of the same form.
    ArcChallenge,
    /// `goal`, `sol1`, `sol2` and `label`, or the labels in a file `<name>-labels.lst` beside.
    Piqa,
    /// `question_stem`, `choices`, `answerKey`; the facts of the book are not shown.
    Openbookqa,
    /// `sentence` with a gap `_`, `option1`, `option2`, `answer`.
    Winogrande,
    /// `context`, `choices` (a list of texts), `answer` (an index from 0).
    Choices,
}

impl TaskKind {
    /// All of them.
    pub const ALL: [TaskKind; 7] = [
        TaskKind::Hellaswag,
        TaskKind::ArcEasy,
        TaskKind::ArcChallenge,
        TaskKind::Piqa,
        TaskKind::Openbookqa,
        TaskKind::Winogrande,
        TaskKind::Choices,
    ];

    /// The harness's name of the task; `choices` is ours.
    pub fn name(self) -> &'static str {
        match self {
            TaskKind::Hellaswag => "hellaswag",
            TaskKind::ArcEasy => "arc_easy",
            TaskKind::ArcChallenge => "arc_challenge",
            TaskKind::Piqa => "piqa",
            TaskKind::Openbookqa => "openbookqa",
            TaskKind::Winogrande => "winogrande",
            TaskKind::Choices => "choices",
        }
    }

    /// Whether the lengths of choices can matter: in WinoGrande all continuations are the same text.
    pub fn has_lengths(self) -> bool {
        self != TaskKind::Winogrande
    }

    /// The questions of a file.
    ///
    /// # Errors
    /// A file that cannot be read or has no question; the first line that is not a question of this kind.
    pub fn read(self, path: &Path) -> Result<Vec<Question>> {
        let file = |reason: String| EvalError::File { path: path.into(), reason };
        let text = std::fs::read_to_string(path).map_err(|e| file(format!("cannot be read: {e}")))?;
        let labels = if self == TaskKind::Piqa { labels_beside(path)? } else { None };
        let mut questions = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let fail = |reason| EvalError::Question { path: path.into(), line: number + 1, reason };
            let json: Value = serde_json::from_str(line)
                .map_err(|e| fail(format!("is not JSON: {e}; each line holds one question")))?;
            let label = labels.as_ref().and_then(|labels| labels.get(questions.len()));
            questions.push(self.question(&json, label.copied()).map_err(fail)?);
        }
        if questions.is_empty() {
            return Err(file("has no question".into()));
        }
        match &labels {
            Some(labels) if labels.len() != questions.len() => Err(file(format!(
                "has {} questions, but the file of labels beside it has {}",
                questions.len(),
                labels.len()
            ))),
            _ => Ok(questions),
        }
    }

    fn question(self, json: &Value, label: Option<usize>) -> Result<Question, String> {
        match self {
            TaskKind::Hellaswag => hellaswag(json),
            TaskKind::ArcEasy | TaskKind::ArcChallenge => {
                let (stem, choices, answer) = keyed(json, "question")?;
                Question::new(&format!("Question: {stem}\nAnswer:"), choices, answer)
            }
            TaskKind::Piqa => {
                let answer = match label {
                    Some(label) => label,
                    None => index(json, "label")?,
                };
                let choices = vec![text(json, "sol1")?.to_string(), text(json, "sol2")?.to_string()];
                Question::new(&format!("Question: {}\nAnswer:", text(json, "goal")?), choices, answer)
            }
            TaskKind::Openbookqa => {
                let (stem, choices, answer) = keyed(json, "question_stem")?;
                Question::new(&stem, choices, answer)
            }
            TaskKind::Winogrande => winogrande(json),
            TaskKind::Choices => {
                Question::new(text(json, "context")?, texts(json, "choices")?, index(json, "answer")?)
            }
        }
    }
}

impl FromStr for TaskKind {
    type Err = String;

    fn from_str(name: &str) -> Result<TaskKind, String> {
        TaskKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<&str> = TaskKind::ALL.iter().map(|kind| kind.name()).collect();
            format!("`{name}` is no kind of task; known are {}", names.join(", "))
        })
    }
}

/// A question: the choice whose continuation is the likeliest after its context is the answer given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Context and continuation of each choice.
    pub pairs: Vec<(String, String)>,
    /// The choices, whose lengths scores may be divided by.
    pub choices: Vec<String>,
    /// The right choice.
    pub answer: usize,
}

impl Question {
    /// A question with one context.
    fn new(context: &str, choices: Vec<String>, answer: usize) -> Result<Question, String> {
        let pairs = choices.iter().map(|choice| (context.to_string(), format!("{DELIMITER}{choice}")));
        Question { pairs: pairs.collect(), choices, answer }.checked()
    }

    fn checked(self) -> Result<Question, String> {
        if self.choices.len() < 2 {
            return Err(format!("has {} choices, expected at least 2", self.choices.len()));
        }
        if self.answer >= self.choices.len() {
            return Err(format!(
                "the answer is {}, but there are {} choices",
                self.answer,
                self.choices.len()
            ));
        }
        match self.choices.iter().position(|choice| choice.is_empty()) {
            Some(empty) => Err(format!("choice {empty} is empty")),
            None => Ok(self),
        }
    }
}

fn field<'j>(json: &'j Value, key: &str) -> Result<&'j Value, String> {
    json.get(key).filter(|value| !value.is_null()).ok_or_else(|| format!("has no `{key}`"))
}

fn text<'j>(json: &'j Value, key: &str) -> Result<&'j str, String> {
    let value = field(json, key)?;
    value.as_str().ok_or_else(|| format!("`{key}` is {value}, expected a text"))
}

fn texts(json: &Value, key: &str) -> Result<Vec<String>, String> {
    let value = field(json, key)?;
    let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    let list = list.ok_or_else(|| format!("`{key}` is not a list of texts"))?;
    Ok(list.into_iter().map(str::to_string).collect())
}

/// A whole number, or a text that holds one.
fn index(json: &Value, key: &str) -> Result<usize, String> {
    let value = field(json, key)?;
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
    let number = number.and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| {
        format!("`{key}` is {value}, expected an index; questions without an answer cannot be judged")
    })
}

/// Stem, choices and answer of ARC and OpenBookQA: flat with `choices.text` and `choices.label`, or as first published,
/// with a list of choices inside `question`.
fn keyed(json: &Value, stem: &str) -> Result<(String, Vec<String>, usize), String> {
    let (stem, texts, labels) = match json.get("question").filter(|question| question.is_object()) {
        Some(question) => {
            let choices = field(question, "choices")?.as_array().ok_or("`choices` is not a list")?;
            let all = |key: &str| -> Result<Vec<String>, String> {
                choices.iter().map(|choice| text(choice, key).map(str::to_string)).collect()
            };
            (text(question, "stem")?, all("text")?, all("label")?)
        }
        None => {
            let choices = field(json, "choices")?;
            (text(json, stem)?, texts(choices, "text")?, texts(choices, "label")?)
        }
    };
    if texts.len() != labels.len() {
        return Err(format!("has {} choices and {} labels", texts.len(), labels.len()));
    }
    let key = text(json, "answerKey")?.trim();
    let answer = labels.iter().position(|label| label == key);
    let answer =
        answer.ok_or_else(|| format!("answerKey is `{key}`, which is none of {}", labels.join(", ")))?;
    Ok((stem.to_string(), texts, answer))
}

fn hellaswag(json: &Value) -> Result<Question, String> {
    let endings = texts(json, "endings")?.iter().map(|ending| hellaswag_text(ending)).collect();
    let (first, second) = (text(json, "ctx_a")?, capitalised(text(json, "ctx_b")?));
    let context = hellaswag_text(&format!("{}: {first} {second}", text(json, "activity_label")?));
    Question::new(&context, endings, index(json, "label")?)
}

/// Removes the marks of WikiHow: headings become sentences, other brackets go.
fn hellaswag_text(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(open) = rest.find('[') {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let close = rest.find(']');
        match close {
            Some(close) if !rest[..close].contains('\n') => rest = &rest[close + 1..],
            _ => {
                out.push('[');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out.replace("  ", " ")
}

/// As Python's `str.capitalize`: the first character in upper case, all others in lower case.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect(),
        None => String::new(),
    }
}

fn winogrande(json: &Value) -> Result<Question, String> {
    let sentence = text(json, "sentence")?;
    let (before, after) = sentence.split_once('_').ok_or("`sentence` has no gap `_`")?;
    let choices = vec![text(json, "option1")?.to_string(), text(json, "option2")?.to_string()];
    let answer = match text(json, "answer")? {
        "1" => 0,
        "2" => 1,
        other => return Err(format!("`answer` is `{other}`, expected 1 or 2")),
    };
    let after = format!("{DELIMITER}{}", after.trim());
    let pairs = choices.iter().map(|choice| (format!("{before}{choice}"), after.clone())).collect();
    Question { pairs, choices, answer }.checked()
}

/// The labels of `valid.jsonl` in `valid-labels.lst`, if that file is there.
fn labels_beside(path: &Path) -> Result<Option<Vec<usize>>> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let beside = path.with_file_name(format!("{stem}-labels.lst"));
    let text = match std::fs::read_to_string(&beside) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(EvalError::File { path: beside, reason: format!("cannot be read: {e}") }),
    };
    let mut labels = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        labels.push(line.trim().parse().map_err(|_| EvalError::Question {
            path: beside.clone(),
            line: number + 1,
            reason: format!("`{line}` is no label, expected 0 or 1"),
        })?);
    }
    Ok(Some(labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: TaskKind, lines: &str) -> Result<Vec<Question>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("questions.jsonl");
        std::fs::write(&path, lines).unwrap();
        kind.read(&path).map_err(|e| e.to_string())
    }

    fn one(kind: TaskKind, line: &str) -> Question {
        read(kind, line).unwrap().remove(0)
    }

    fn pairs(question: &Question) -> Vec<(&str, &str)> {
        question.pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect()
    }

    /// What the harness's own functions give for these lines (lm-eval 0.4).
    #[test]
    fn prompts_are_those_of_the_harness() {
        let hellaswag = one(
            TaskKind::Hellaswag,
            r#"{"activity_label": "Rowing", "ctx_a": "[header] How to row [title] Sit down.", "ctx_b": "the Man In THE boat", "endings": ["rows  away [step] now.", "[b] sleeps"], "label": "1"}"#,
        );
        let context = "Rowing: How to row. Sit down. The man in the boat";
        assert_eq!(pairs(&hellaswag), [(context, " rows away now."), (context, "  sleeps")]);
        assert_eq!((hellaswag.answer, &*hellaswag.choices[1]), (1, " sleeps"));

        let flat = r#"{"question": "Why?", "choices": {"text": ["a", "b c"], "label": ["A", "B"]}, "answerKey": "B"}"#;
        let nested = r#"{"question": {"stem": "Why?", "choices": [{"text": "a", "label": "A"}, {"text": "b c", "label": "B"}]}, "answerKey": "B"}"#;
        for line in [flat, nested] {
            let arc = one(TaskKind::ArcEasy, line);
            let context = "Question: Why?\nAnswer:";
            assert_eq!((pairs(&arc), arc.answer), (vec![(context, " a"), (context, " b c")], 1));
        }
        let piqa = one(TaskKind::Piqa, r#"{"goal": "Open it", "sol1": "push", "sol2": "pull", "label": 0}"#);
        assert_eq!(pairs(&piqa)[1], ("Question: Open it\nAnswer:", " pull"));
        let book = r#"{"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "A"}"#;
        assert_eq!(pairs(&one(TaskKind::Openbookqa, book))[0], ("The sun is", " hot"));
        let gap = r#"{"sentence": "The cup beat the _ because it was big.", "option1": "mug", "option2": "pot", "answer": "2"}"#;
        let gap = one(TaskKind::Winogrande, gap);
        let after = " because it was big.";
        assert_eq!(pairs(&gap), [("The cup beat the mug", after), ("The cup beat the pot", after)]);
        assert_eq!(gap.answer, 1);
        let plain = one(TaskKind::Choices, r#"{"context": "x", "choices": ["y", "z", "w"], "answer": 2}"#);
        assert_eq!((pairs(&plain)[2], plain.answer), (("x", " w"), 2));
    }

    #[test]
    fn labels_may_lie_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("valid.jsonl");
        std::fs::write(&path, "{\"goal\": \"g\", \"sol1\": \"a\", \"sol2\": \"b\"}\n").unwrap();
        let missing = TaskKind::Piqa.read(&path).unwrap_err().to_string();
        assert!(missing.ends_with("valid.jsonl:1: has no `label`"), "{missing}");
        let labels = dir.path().join("valid-labels.lst");
        std::fs::write(&labels, "1\n").unwrap();
        assert_eq!(TaskKind::Piqa.read(&path).unwrap()[0].answer, 1);
        std::fs::write(&labels, "1\n0\n").unwrap();
        assert!(TaskKind::Piqa.read(&path).unwrap_err().to_string().contains("1 questions, but"));
        std::fs::write(&labels, "x\n").unwrap();
        assert!(
            TaskKind::Piqa.read(&path).unwrap_err().to_string().contains("labels.lst:1: `x` is no label")
        );
    }

    #[test]
    fn bad_lines_are_named() {
        let refused = |kind, lines: &str| read(kind, lines).unwrap_err();
        let good = r#"{"context": "x", "choices": ["y", "z"], "answer": 1}"#;
        let second = |line: &str| refused(TaskKind::Choices, &format!("{good}\n\n{line}\n"));
        assert!(second("{").contains("questions.jsonl:3: is not JSON"));
        assert!(second(r#"{"context": "x"}"#).ends_with("has no `choices`"));
        assert!(second(&good.replace("1}", "2}")).ends_with("the answer is 2, but there are 2 choices"));
        assert!(second(&good.replace("\"z\"", "\"\"")).ends_with("choice 1 is empty"));
        assert!(second(&good.replace(", \"z\"", "")).ends_with("has 1 choices, expected at least 2"));
        assert!(second(&good.replace("1}", "-1}")).contains("`answer` is -1, expected an index"));
        assert!(refused(TaskKind::Choices, "\n").ends_with("has no question"));
        let key =
            r#"{"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "E"}"#;
        assert!(refused(TaskKind::ArcChallenge, key).ends_with("answerKey is `E`, which is none of A, B"));
        let gap = r#"{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}"#;
        assert!(refused(TaskKind::Winogrande, gap).contains("has no gap"));
        assert!(
            TaskKind::Piqa.read(Path::new("/nowhere")).unwrap_err().to_string().contains("cannot be read")
        );
        assert!("mmlu".parse::<TaskKind>().unwrap_err().contains("known are hellaswag"));
        assert_eq!("arc_easy".parse(), Ok(TaskKind::ArcEasy));
    }
}
