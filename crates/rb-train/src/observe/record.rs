//! The records of a run, one JSON object a line in `metrics.jsonl`.
//!
//! Training libraries report speeds for steps whose loss is NaN, and such a step is often the fastest of all.
//! Here it cannot happen, because of types and not of care: a loss, a norm or a rate is a [`Finite`], which
//! exists only for a finite number, and a speed is written only as a field of a [`TrainRecord`], beside the
//! loss. A step whose loss or gradient norm is not finite is an [`EventRecord`] and nothing else. A speed or a
//! held-out loss is a [`Figure`], which only a run whose loss is finite and falls can have.

use super::ObserveError;
use rb_verify::{Figure, Pass};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A number that is neither NaN nor infinite. [`Finite::new`] is the only way to make one, from JSON too.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Finite(f64);

impl Finite {
    /// Wraps `value`; `name` says in the error what was measured.
    ///
    /// # Errors
    /// [`ObserveError::NotFinite`] for NaN and infinities.
    pub fn new(name: &'static str, value: f64) -> Result<Self, ObserveError> {
        if value.is_finite() { Ok(Self(value)) } else { Err(ObserveError::NotFinite { name, value }) }
    }

    /// Returns the number.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Finite {
    type Error = ObserveError;

    fn try_from(value: f64) -> Result<Self, ObserveError> {
        Self::new("number", value)
    }
}

impl From<Finite> for f64 {
    fn from(value: Finite) -> Self {
        value.0
    }
}

/// Formats as the number does, precision and width included.
impl fmt::Display for Finite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// One line of `metrics.jsonl`; its `kind` key is `train`, `eval` or `event`.
///
/// Keys that this version does not know are ignored on reading and kept on resume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
    Train(TrainRecord),
    Eval(EvalRecord),
    Event(EventRecord),
}

impl Record {
    /// Returns the step that the record belongs to.
    pub fn step(&self) -> u64 {
        match self {
            Self::Train(record) => record.step,
            Self::Eval(record) => record.step,
            Self::Event(record) => record.step,
        }
    }
}

impl From<TrainRecord> for Record {
    fn from(record: TrainRecord) -> Self {
        Self::Train(record)
    }
}

impl From<EvalRecord> for Record {
    fn from(record: EvalRecord) -> Self {
        Self::Eval(record)
    }
}

impl From<EventRecord> for Record {
    fn from(record: EventRecord) -> Self {
        Self::Event(record)
    }
}

/// A training step that gave a finite loss and a finite gradient norm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRecord {
    /// Optimizer steps done, this one included.
    pub step: u64,
    /// Tokens seen since the beginning of the run, resumed parts included.
    pub tokens: u64,
    /// Whole passes over the data done before this step.
    pub epoch: u64,
    /// Mean cross entropy of the step in nats a token.
    pub loss: Finite,
    /// Learning rate used by the step.
    pub lr: Finite,
    /// Global 2-norm of the gradient, before clipping.
    pub grad_norm: Finite,
    /// Tokens trained on in a second; none while the losses of the run do not pass its gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<Figure>,
    /// Wall-clock time of one step, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<Figure>,
    /// Tokens of the step that count in its loss; padding and masked tokens do not.
    pub valid_tokens: u64,
    /// Model FLOP in a second: those that the formula needs, without recomputation; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops_per_s: Option<Figure>,
    /// Resident memory of the process, where the system tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_rss_bytes: Option<u64>,
    /// When the record was made, in milliseconds since 1970 (UTC).
    pub time_unix_ms: u64,
}

/// A pass over held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Optimizer steps done before the pass.
    pub step: u64,
    /// Mean cross entropy in nats a token.
    pub loss: Figure,
    /// `exp(loss)`.
    pub perplexity: Figure,
    /// Tokens that the mean is over.
    pub tokens: u64,
    /// Loss in bits for each byte of the text: comparable between tokenizers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<Figure>,
}

impl EvalRecord {
    /// Builds the record of a mean loss in nats over `tokens` tokens that stand for `text_bytes` bytes of UTF-8, of a run
    /// that passed its gate.
    ///
    /// # Errors
    /// [`ObserveError::Refused`] if the loss is not finite or its perplexity overflows, or if `text_bytes` is 0.
    pub fn new(
        pass: &Pass,
        step: u64,
        loss: f64,
        tokens: u64,
        text_bytes: Option<u64>,
    ) -> Result<Self, ObserveError> {
        let bits_per_byte = match text_bytes {
            Some(bytes) => {
                let bits = loss * tokens as f64 / std::f64::consts::LN_2;
                Some(Figure::new(pass, "eval bits per byte", bits / bytes as f64)?)
            }
            None => None,
        };
        Ok(Self {
            step,
            loss: Figure::new(pass, "eval loss", loss)?,
            perplexity: Figure::new(pass, "eval perplexity", loss.exp())?,
            tokens,
            bits_per_byte,
        })
    }
}

/// What an [`EventRecord`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// The run began.
    Start,
    /// The run goes on from a checkpoint.
    Resume,
    /// The weights were left as they were, for instance because the loss was not finite.
    SkippedStep,
    /// A checkpoint was written.
    Checkpoint,
    /// Something that the user should look at.
    Warning,
    /// The run ended, and why.
    Stop,
}

impl EventKind {
    /// Returns the word used in `metrics.jsonl`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Resume => "resume",
            Self::SkippedStep => "skipped_step",
            Self::Checkpoint => "checkpoint",
            Self::Warning => "warning",
            Self::Stop => "stop",
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Something that happened at a step. It holds no number that could be taken for a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    pub step: u64,
    pub event: EventKind,
    pub message: String,
}

impl EventRecord {
    /// Builds the record of an event.
    pub fn new(step: u64, event: EventKind, message: impl Into<String>) -> Self {
        Self { step, event, message: message.into() }
    }
}

/// Returns the time now in milliseconds since 1970 (UTC), for [`TrainRecord::time_unix_ms`].
pub fn now_unix_ms() -> u64 {
    // A clock set before 1970 gives 0: a wrong time of day must not stop a run.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{finite, pass, train};
    use super::*;

    #[test]
    fn finite_refuses_what_is_not() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let text = Finite::new("loss", value).unwrap_err().to_string();
            assert!(text.starts_with("loss is "), "{text}");
        }
        assert_eq!(Finite::new("loss", f64::MAX).unwrap().get(), f64::MAX);
        assert_eq!(format!("{:8.2}", finite(1.234)), "    1.23");
    }

    #[test]
    fn speed_of_no_time_is_refused() {
        let (tokens, seconds) = (4096.0, 0.0);
        assert!(Finite::new("tokens_per_s", tokens / seconds).is_err());
    }

    #[test]
    fn json_has_the_documented_keys() {
        let text = serde_json::to_string(&Record::from(train(7, 3.25))).unwrap();
        assert_eq!(
            text,
            r#"{"kind":"train","step":7,"tokens":28672,"epoch":0,"loss":3.25,"lr":0.0003,"grad_norm":0.81,"#
                .to_owned()
                + r#""tokens_per_s":12345.0,"step_ms":1000.0,"valid_tokens":4096,"flops_per_s":1500000000000.0,"#
                + r#""mem_rss_bytes":1073741824,"time_unix_ms":1700000007000}"#
        );
        let event = EventRecord::new(8, EventKind::SkippedStep, "loss is NaN");
        assert_eq!(
            serde_json::to_string(&Record::from(event)).unwrap(),
            r#"{"kind":"event","step":8,"event":"skipped_step","message":"loss is NaN"}"#
        );
    }

    #[test]
    fn every_kind_survives_a_round_trip() {
        let records = [
            Record::from(train(1, 10.5)),
            Record::from(EvalRecord::new(&pass(), 1, 2.0, 1000, Some(4000)).unwrap()),
            Record::from(EvalRecord::new(&pass(), 1, 2.0, 1000, None).unwrap()),
            Record::from(EventRecord::new(1, EventKind::Stop, "done \u{9b6}\u{9c7}\u{9b7}\n\"quoted\"")),
        ];
        for record in records {
            let text = serde_json::to_string(&record).unwrap();
            assert!(!text.contains('\n'), "{text}");
            assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
        }
        for kind in [EventKind::Start, EventKind::Resume, EventKind::Checkpoint, EventKind::Warning] {
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
    }

    #[test]
    fn json_cannot_smuggle_in_what_is_not_finite() {
        for loss in ["null", "1e999", "\"NaN\"", "NaN"] {
            let text = format!(r#"{{"kind":"eval","step":1,"loss":{loss},"perplexity":1.0,"tokens":1}}"#);
            assert!(serde_json::from_str::<Record>(&text).is_err(), "{loss}");
        }
        let whole = r#"{"kind":"eval","step":1,"loss":3,"perplexity":20,"tokens":1,"new_key":[1]}"#;
        assert!(serde_json::from_str::<Record>(whole).is_ok());
    }

    #[test]
    fn eval_record_converts_units() {
        let record = EvalRecord::new(&pass(), 5, std::f64::consts::LN_2 * 8.0, 100, Some(400)).unwrap();
        assert!((record.perplexity.get() - 256.0).abs() < 1e-9);
        assert!((record.bits_per_byte.unwrap().get() - 2.0).abs() < 1e-12);
        assert!(EvalRecord::new(&pass(), 5, f64::NAN, 1, None).is_err());
        assert!(EvalRecord::new(&pass(), 5, 800.0, 1, None).is_err());
        assert!(EvalRecord::new(&pass(), 5, 1.0, 1, Some(0)).is_err());
    }
}
