//! What a run tells its user: records, TensorBoard events, a report page, progress lines, memory in use.
//!
//! One rule shapes this module: **a number that is not finite is never shown as a result**.
//! A [`TrainRecord`] can be built only from [`Finite`] values, every speed that is written or printed is a
//! field of a `TrainRecord`, and so no speed can be shown for a step whose loss is NaN or infinite.
//! Such a step is written as an [`EventRecord`], which has no speed.
//!
//! | File | Holds |
//! | --- | --- |
//! | `record.rs` | the records, one JSON object a line in `metrics.jsonl` |
//! | `metrics.rs` | the writer of `metrics.jsonl`, its truncation on resume, its reader |
//! | `tensorboard.rs` | the writer of `tensorboard/events.out.tfevents.*` |
//! | `report.rs`, `chart.rs`, `axis.rs`, `series.rs` | `report.html`: page, one chart, its axes, its points |
//! | `tokenizer_page.rs`, `bars.rs` | the page about a tokenizer, a chart of bars |
//! | `progress.rs`, `human.rs` | the bar or the plain lines; numbers as people read them |
//! | `memory.rs` | resident memory of this process, kept between steps |
//! | `file.rs` | files that hold whole records only |
//! | `error.rs` | [`ObserveError`] |

mod axis;
mod bars;
mod chart;
mod error;
mod file;
mod human;
mod memory;
mod metrics;
mod progress;
mod record;
mod report;
mod series;
mod tensorboard;
#[cfg(test)]
mod testing;
mod tokenizer_page;

pub use error::{ObserveError, may_continue, remedy};
pub use human::grouped;
pub(crate) use human::loss as human_loss;
pub use memory::{keep_freed_memory, resident_bytes};
pub use metrics::{MetricsWriter, read};
pub use progress::{Progress, eval_line, train_line};
pub use record::{EvalRecord, EventKind, EventRecord, Finite, Record, TrainRecord, now_unix_ms};
pub use report::{Report, write_report};
pub use tensorboard::TensorBoardWriter;
pub use tokenizer_page::TokenizerPage;
