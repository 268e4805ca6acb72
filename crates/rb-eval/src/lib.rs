//! How good a model is: the loss of held-out text, and questions with choices.
//!
//! Numbers are defined as in lm-evaluation-harness (`lm-eval`), so that both programs give the same ones for the same
//! model, tokenizer and file; each stands beside what it must be compared with.
//!
//! | file | holds |
//! | --- | --- |
//! | `score.rs` | [`Judge`]: what a continuation costs after a context |
//! | `text.rs` | held-out text by language, beside uniform, unigram and the random twin |
//! | `tasks.rs` | files of questions: HellaSwag, ARC, PIQA, OpenBookQA, WinoGrande, plain |
//! | `choices.rs` | accuracies, their standard errors, and whether they differ from chance |
//! | `results.rs` | the JSON of `lm-eval` |

mod choices;
mod error;
pub mod results;
mod score;
mod tasks;
mod text;

pub use choices::{Accuracy, Answered, ChoiceReport, Verdict, answer};
pub use error::{EvalError, Result};
pub use score::{Judge, Request};
pub use tasks::{Question, TaskKind};
pub use text::{Baseline, Cost, LanguageReport, Text, Unigram, judge_texts};
