//! Languages that a corpus is declared to hold, and how a document is put down to one.

use std::str::FromStr;

use glob::{MatchOptions, Pattern};
use serde::{Deserialize, Serialize};
use unicode_script::{Script, UnicodeScript};

use crate::corpus::Document;
use crate::error::{DataError, Result};

/// Characters of a document that its script is told from.
const SCRIPT_CHARS: usize = 4096;

/// A declared language. Exactly one of `file`, `field` and `script` says which documents are in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Language {
    /// Its name in reports.
    pub name: String,
    /// A pattern such as `*.bn.jsonl` for the name, or the whole path, of a document's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// `FIELD=VALUE`: the string field of a JSON line, or column of a Parquet file, and what it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The Unicode script that most letters are in, by its long name (`Bengali`) or short one (`Beng`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// Its part in what a tokenizer is trained on, and in a mixture, relative to the other languages'.
    #[serde(default = "one")]
    pub weight: f64,
    /// Fewest characters a token that it may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl FromStr for Language {
    type Err = String;

    /// Parses `NAME,KEY=VALUE,..`, for example `bn,script=Bengali,floor=4.1,weight=2`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default().trim().to_owned();
        let mut language = Self { name, file: None, field: None, script: None, weight: 1.0, floor: None };
        for part in parts {
            let (key, value) =
                part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE in `{text}`"))?;
            let number =
                || value.trim().parse::<f64>().map_err(|_| format!("{key} is `{value}`, not a number"));
            match key.trim() {
                "file" => language.file = Some(value.to_owned()),
                "field" => language.field = Some(value.to_owned()),
                "script" => language.script = Some(value.to_owned()),
                "weight" => language.weight = number()?,
                "floor" => language.floor = Some(number()?),
                other => {
                    return Err(format!(
                        "unknown key `{other}`; known here: file, field, script, weight, floor"
                    ));
                }
            }
        }
        Languages::new(vec![language.clone()]).map_err(|e| e.to_string())?;
        Ok(language)
    }
}

#[derive(Debug, Clone)]
enum Rule {
    File(Pattern),
    Field(String, String),
    Script(Script),
}

/// Declared languages, checked and ready to be looked up.
#[derive(Debug, Clone, Default)]
pub struct Languages {
    list: Vec<Language>,
    rules: Vec<Rule>,
}

impl Languages {
    /// Checks declarations.
    ///
    /// # Errors
    /// [`DataError::BadLanguage`]: no name or one that occurs twice, not exactly one rule, an unknown script, a bad
    /// pattern, a weight or floor that is not a finite number above 0.
    pub fn new(list: Vec<Language>) -> Result<Self> {
        let mut rules = Vec::with_capacity(list.len());
        for (i, language) in list.iter().enumerate() {
            let refuse = |reason: String| DataError::BadLanguage { name: language.name.clone(), reason };
            if language.name.is_empty() {
                return Err(refuse("has no name; write for example bn,script=Bengali".into()));
            }
            if list[..i].iter().any(|other| other.name == language.name) {
                return Err(refuse("is declared twice; name each language once".into()));
            }
            for (key, value) in [("weight", Some(language.weight)), ("floor", language.floor)] {
                if value.is_some_and(|v| !(v.is_finite() && v > 0.0)) {
                    return Err(refuse(format!("{key} is {value:?}, expected a finite number above 0")));
                }
            }
            rules.push(match (&language.file, &language.field, &language.script) {
                (Some(file), None, None) => Rule::File(
                    Pattern::new(file)
                        .map_err(|e| refuse(format!("file is `{file}`: {e}; correct the pattern")))?,
                ),
                (None, Some(field), None) => match field.split_once('=') {
                    Some((field, value)) if !field.is_empty() => Rule::Field(field.into(), value.into()),
                    _ => return Err(refuse(format!("field is `{field}`, expected FIELD=VALUE"))),
                },
                (None, None, Some(script)) => Rule::Script(script_of_name(script).ok_or_else(|| {
                    refuse(format!(
                        "`{script}` is no Unicode script; write for example Bengali, Latin, Arabic"
                    ))
                })?),
                _ => {
                    return Err(refuse(
                        "needs exactly one of file, field and script to say which documents are in it".into(),
                    ));
                }
            });
        }
        Ok(Self { list, rules })
    }

    /// The declarations.
    pub fn list(&self) -> &[Language] {
        &self.list
    }

    /// Whether none is declared.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Their weights.
    pub fn weights(&self) -> Vec<f64> {
        self.list.iter().map(|l| l.weight).collect()
    }

    /// Names of the fields that documents must carry for [`Languages::of`].
    pub fn fields(&self) -> Vec<String> {
        let mut fields: Vec<String> = self
            .rules
            .iter()
            .filter_map(|r| if let Rule::Field(f, _) = r { Some(f.clone()) } else { None })
            .collect();
        fields.sort();
        fields.dedup();
        fields
    }

    /// Number of the first declared language whose rule `document` fits.
    pub fn of(&self, document: &Document) -> Option<usize> {
        // Told at most once, and only if a rule asks for it.
        let mut script = None;
        let options = MatchOptions { require_literal_separator: false, ..MatchOptions::new() };
        self.rules.iter().position(|rule| match rule {
            Rule::File(pattern) => {
                let name = document.file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                pattern.matches_with(name, options) || pattern.matches_path_with(&document.file, options)
            }
            Rule::Field(field, value) => document.fields.iter().any(|(f, v)| **f == **field && v == value),
            Rule::Script(wanted) => {
                *script.get_or_insert_with(|| main_script(&document.text)) == Some(*wanted)
            }
        })
    }
}

/// The script of most of the first [`SCRIPT_CHARS`] characters that belong to one; `None` for a text without letters.
fn main_script(text: &str) -> Option<Script> {
    let mut counts: Vec<(Script, usize)> = Vec::new();
    for c in text.chars().take(SCRIPT_CHARS) {
        let script = c.script();
        if matches!(script, Script::Common | Script::Inherited | Script::Unknown) {
            continue;
        }
        match counts.iter_mut().find(|(s, _)| *s == script) {
            Some((_, count)) => *count += 1,
            None => counts.push((script, 1)),
        }
    }
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(script, _)| script)
}

/// Long name of the script of most letters of `text`, or `none`.
pub fn script_name(text: &str) -> &'static str {
    main_script(text).map_or("none", |script| script.full_name())
}

fn script_of_name(name: &str) -> Option<Script> {
    Script::from_full_name(name).or_else(|| Script::from_short_name(name))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn document(file: &str, text: &str, fields: &[(&str, &str)]) -> Document {
        let fields = fields.iter().map(|(f, v)| ((*f).into(), (*v).to_owned())).collect();
        Document { text: text.into(), file: Path::new(file).into(), line: 1, fields }
    }

    #[test]
    fn documents_are_told_by_file_field_and_script() {
        let list = ["a,file=*.bn.jsonl", "b,field=lang=en", "c,script=Bengali", "d,script=Latn"];
        let languages = Languages::new(list.iter().map(|l| l.parse().unwrap()).collect()).unwrap();
        assert_eq!(languages.fields(), ["lang"]);
        let of = |file, text, fields: &[_]| languages.of(&document(file, text, fields));
        assert_eq!(of("data/x.bn.jsonl", "text", &[]), Some(0));
        assert_eq!(of("x.txt", "text", &[("lang", "en")]), Some(1));
        assert_eq!(of("x.txt", "text", &[("lang", "fr")]), Some(3));
        assert_eq!(of("x.txt", "1971: \u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE} ok", &[]), Some(2));
        assert_eq!(of("x.txt", "1971 ...", &[]), None);
        assert_eq!(script_name("\u{995}\u{9CD}\u{9B7} a"), "Bengali");
        assert_eq!(script_name("12"), "none");
    }

    #[test]
    fn declarations_that_cannot_be() {
        for (text, part) in [
            ("", "has no name"),
            ("bn", "needs exactly one of file, field and script"),
            ("bn,script=Bengali,file=*", "needs exactly one"),
            ("bn,script=Bangla", "`Bangla` is no Unicode script"),
            ("bn,field=lang", "expected FIELD=VALUE"),
            ("bn,file=***", "correct the pattern"),
            ("bn,script=Bengali,floor=x", "floor is `x`, not a number"),
            ("bn,script=Bengali,weight=0", "expected a finite number above 0"),
            ("bn,script=Bengali,wait=1", "unknown key `wait`"),
            ("bn,script", "is not KEY=VALUE"),
        ] {
            let e = text.parse::<Language>().unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        }
        let twice = vec!["bn,script=Bengali".parse().unwrap(); 2];
        assert!(Languages::new(twice).unwrap_err().to_string().contains("bn is declared twice"));
    }
}
