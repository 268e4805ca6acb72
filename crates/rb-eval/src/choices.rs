//! Questions answered: accuracies by three rules, their errors, and chance.

use rb_data::Tokenizer;
use rb_verify::{Figure, Pass, RunGate};

use crate::{EvalError, Judge, Question, Request, Result};

/// The level of [`Verdict`]: so often a model that guesses is said to differ from chance.
const LEVEL: f64 = 0.05;

/// One rule of answering.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// Part of the questions answered rightly.
    pub value: Figure,
    /// Its standard error; none for a single question.
    pub stderr: Option<Figure>,
    /// Whether it differs from guessing.
    pub verdict: Verdict,
}

/// An accuracy beside that of guessing each question by a fair die.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Better, with this probability of guessing so far from chance.
    Above(f64),
    /// Worse, likewise.
    Below(f64),
    /// Guessing is this often as far from chance.
    NotDifferent(f64),
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verdict::Above(p) => write!(f, "above chance (p {p:.2e})"),
            Verdict::Below(p) => write!(f, "below chance (p {p:.2e})"),
            Verdict::NotDifferent(p) => write!(f, "not different from chance (p {p:.2})"),
        }
    }
}

/// A question with what its choices cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// `-ln p` of each choice, in nats.
    pub costs: Vec<f64>,
    /// The right choice.
    pub answer: usize,
    /// The choice of each rule: by sums, by sums over characters, by sums over bytes.
    pub picks: [usize; 3],
}

/// A task's results.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceReport {
    /// Every question, in order.
    pub questions: Vec<Answered>,
    /// The likeliest choice.
    pub acc: Accuracy,
    /// The likeliest by its logarithm divided by its characters; none where choices have no lengths.
    pub acc_norm: Option<Accuracy>,
    /// The likeliest by its logarithm divided by its bytes.
    pub acc_bytes: Option<Accuracy>,
    /// The mean accuracy of guessing.
    pub chance: Figure,
}

/// Answers `questions`; `lengths` tells whether lengths of choices matter.
///
/// # Errors
/// No question; a choice longer than the model's positions; costs that are not finite.
pub fn answer(
    judge: &Judge<'_>,
    tokenizer: &Tokenizer,
    questions: &[Question],
    lengths: bool,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ChoiceReport> {
    if questions.is_empty() {
        return Err(EvalError::Empty { what: "the task".into() });
    }
    let pairs = questions.iter().flat_map(|question| &question.pairs);
    let requests: Vec<Request> =
        pairs.map(|(context, text)| Request::encode(tokenizer, context, text)).collect::<Result<_>>()?;
    let costs = judge.costs(&requests, &mut |done| progress(done, requests.len()))?;
    report(questions, &costs, lengths)
}

fn report(questions: &[Question], costs: &[f64], lengths: bool) -> Result<ChoiceReport> {
    let pass = RunGate::evaluated(costs)?;
    let mut rest = costs;
    let mut answered = Vec::with_capacity(questions.len());
    for question in questions {
        let (costs, later) = rest.split_at(question.choices.len());
        rest = later;
        let by = |length: fn(&str) -> usize| {
            let each = costs.iter().zip(&question.choices);
            cheapest(each.map(|(cost, choice)| cost / length(choice) as f64))
        };
        let picks = [by(|_| 1), by(|choice| choice.chars().count()), by(str::len)];
        answered.push(Answered { costs: costs.to_vec(), answer: question.answer, picks });
    }
    let guesses: Vec<f64> = questions.iter().map(|q| 1.0 / q.choices.len() as f64).collect();
    let counts = guessed_counts(&guesses);
    let accuracy = |rule: usize| {
        let right = answered.iter().filter(|a| a.picks[rule] == a.answer).count();
        judge_count(&pass, right, &counts)
    };
    let chance = Figure::new(&pass, "chance", guesses.iter().sum::<f64>() / guesses.len() as f64)?;
    let acc = accuracy(0)?;
    let with_lengths = |rule| if lengths { accuracy(rule).map(Some) } else { Ok(None) };
    let (acc_norm, acc_bytes) = (with_lengths(1)?, with_lengths(2)?);
    Ok(ChoiceReport { questions: answered, acc, acc_norm, acc_bytes, chance })
}

/// The first of the smallest.
fn cheapest(costs: impl Iterator<Item = f64>) -> usize {
    let better = |best: (usize, f64), new: (usize, f64)| if new.1 < best.1 { new } else { best };
    costs.enumerate().reduce(better).map_or(0, |(index, _)| index)
}

/// The probability of each count of right guesses, question `i` being guessed with probability `guesses[i]`.
fn guessed_counts(guesses: &[f64]) -> Vec<f64> {
    let mut counts = vec![0.0; guesses.len() + 1];
    counts[0] = 1.0;
    for (known, p) in guesses.iter().enumerate() {
        for right in (0..=known + 1).rev() {
            let before = if right == 0 { 0.0 } else { counts[right - 1] };
            counts[right] = counts[right] * (1.0 - p) + before * p;
        }
    }
    counts
}

/// The accuracy of `right` answers, beside the counts that guessing gives.
fn judge_count(pass: &Pass, right: usize, counts: &[f64]) -> Result<Accuracy> {
    let n = counts.len() - 1;
    let value = right as f64 / n as f64;
    // The deviation of a sample of zeros and ones, as the harness takes it.
    let stderr = (n > 1).then(|| (value * (1.0 - value) / (n - 1) as f64).sqrt());
    let (below, above) = (counts[..=right].iter().sum::<f64>(), counts[right..].iter().sum::<f64>());
    let p = (2.0 * below.min(above)).min(1.0);
    let verdict = match p < LEVEL {
        true if above < below => Verdict::Above(p),
        true => Verdict::Below(p),
        false => Verdict::NotDifferent(p),
    };
    Ok(Accuracy {
        value: Figure::new(pass, "an accuracy", value)?,
        stderr: stderr.map(|stderr| Figure::new(pass, "a standard error", stderr)).transpose()?,
        verdict,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskKind;
    use crate::score::tests::{model, tokenizer};

    fn question(choices: &[&str], answer: usize) -> Question {
        let choices: Vec<String> = choices.iter().map(|c| c.to_string()).collect();
        let pairs = choices.iter().map(|c| ("the".to_string(), format!(" {c}"))).collect();
        Question { pairs, choices, answer }
    }

    #[test]
    fn rules_divide_by_characters_and_bytes() {
        // Costs a character: 1, 0.8, 0.9; a byte: 1, 0.8, 0.3.
        let one = question(&["a", "boats", "\u{9a8}\u{9a6}\u{9c0}\u{9b0}"], 2);
        let report = report(&[one.clone(), one], &[1.0, 4.0, 3.6, 1.0, 4.0, 3.6], true).unwrap();
        assert_eq!(report.questions[0].picks, [0, 1, 2]);
        assert_eq!(report.acc.value.get(), 0.0);
        assert_eq!(report.acc_norm.unwrap().value.get(), 0.0);
        assert_eq!(report.acc_bytes.unwrap().value.get(), 1.0);
        assert!((report.chance.get() - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn ties_go_to_the_first() {
        let report = report(&[question(&["ab", "cd"], 0)], &[2.0, 2.0], false).unwrap();
        assert_eq!((report.questions[0].picks, report.acc.stderr), ([0; 3], None));
        assert_eq!(report.acc_norm, None);
    }

    #[test]
    fn chance_is_exact() {
        let counts = guessed_counts(&[0.5, 0.25]);
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got}, expected {want}");
        counts.iter().zip([0.375, 0.5, 0.125]).for_each(|(got, want)| close(*got, want));
        let pass = RunGate::evaluated(&[1.0]).unwrap();
        let counts = guessed_counts(&[0.25; 100]);
        close(counts.iter().sum(), 1.0);
        // scipy.stats.binom(100, 0.25): cdf(16) 0.02111, sf(33) 0.02759.
        let judged = |right| judge_count(&pass, right, &counts).unwrap();
        let Verdict::Below(p) = judged(16).verdict else { panic!("{:?}", judged(16)) };
        assert!((p - 2.0 * 0.021_11).abs() < 1e-4, "{p}");
        assert!(matches!(judged(33).verdict, Verdict::NotDifferent(_)), "{:?}", judged(33));
        assert!(matches!(judged(40).verdict, Verdict::Above(p) if p < 0.002));
        close(judged(40).stderr.unwrap().get(), (0.4f64 * 0.6 / 99.0).sqrt());
        assert!(judged(90).verdict.to_string().starts_with("above chance (p "));
    }

    #[test]
    fn a_model_answers() {
        let tokenizer = tokenizer();
        let (model, params) = model(tokenizer.vocab_size(), 24, 1);
        let judge = Judge::new(&model, &params, 100);
        let questions = [question(&["boat", "river on the"], 1), question(&["house", "boat", "river"], 0)];
        let mut last = (0, 0);
        let lengths = TaskKind::Choices.has_lengths();
        let report = answer(&judge, &tokenizer, &questions, lengths, &mut |a, b| last = (a, b)).unwrap();
        assert_eq!(last, (5, 5));
        let alone = Request::encode(&tokenizer, "the", " river").unwrap();
        let cost = judge.costs(&[alone], &mut |_| ()).unwrap()[0];
        assert!((report.questions[1].costs[2] - cost).abs() < 1e-4);
        assert!(answer(&judge, &tokenizer, &[], true, &mut |_, _| ()).is_err());
    }
}
