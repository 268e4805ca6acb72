//! Errors of models and their configs.

use std::path::PathBuf;

use rb_autograd::AutogradError;
use rb_tensor::Tensor;

/// `Result` of this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

/// Everything that can go wrong with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NnError {
    /// A config value breaks a rule.
    #[error("model config: {key} is {value}, expected {expected}")]
    Config {
        /// Hugging Face key.
        key: &'static str,
        /// Value given.
        value: String,
        /// Rule and remedy.
        expected: String,
    },
    /// A file of a model folder cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// Weights that are not those of the model. Nothing was loaded.
    #[error("{}: the weights do not fit the config: {}", path.display(), problems(missing, unexpected, shapes))]
    Weights {
        /// File or folder.
        path: PathBuf,
        /// Names the model needs and the file lacks.
        missing: Vec<String>,
        /// Names in the file that the model does not know.
        unexpected: Vec<String>,
        /// Tensors whose shape differs, each with both shapes.
        shapes: Vec<String>,
    },
    /// A token id or label that is not in the vocabulary.
    #[error(
        "{what}[{row}, {column}] is {id}, but vocab_size is {vocab_size}: the data was made with another \
         tokenizer than this model's"
    )]
    NotInVocabulary {
        /// `input_ids` or `labels`.
        what: &'static str,
        /// Sequence of the batch.
        row: usize,
        /// Position in the sequence.
        column: usize,
        /// The id.
        id: i64,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// A sequence is longer than the model's positions.
    #[error(
        "the input has {len} positions, above max_position_embeddings {limit}; shorten it or raise the limit"
    )]
    TooLong {
        /// Positions given.
        len: usize,
        /// Positions the model has.
        limit: usize,
    },
    /// Keys and values were to be kept on a tape that records.
    #[error(
        "keys and values cannot be cached on a tape that records: no gradient would reach the tokens read earlier; use \
         an inference tape, or no cache"
    )]
    CacheWhileRecording,
    /// Operations and parameters.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// Tensors and files.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
}

impl NnError {
    /// As an error of the tape, for parts of a model that the tape runs.
    pub(crate) fn on_tape(self) -> AutogradError {
        match self {
            NnError::Autograd(error) => error,
            NnError::Tensor(error) => error.into(),
            other => AutogradError::Recompute { reason: other.to_string() },
        }
    }

    /// Turns an operation's error about a flat index into `ids [B, T]` into one with row and column.
    pub(crate) fn in_batch(what: &'static str, ids: &Tensor, error: AutogradError) -> NnError {
        match error {
            AutogradError::IndexOutOfRange { position, index, bound, .. } => {
                let columns = ids.shape().last().max(1);
                let (row, column) = (position / columns, position % columns);
                NnError::NotInVocabulary { what, row, column, id: index, vocab_size: bound }
            }
            other => other.into(),
        }
    }
}

fn problems(missing: &[String], unexpected: &[String], shapes: &[String]) -> String {
    let lists = [("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)];
    let lists = lists.iter().filter(|(_, names)| !names.is_empty());
    lists.map(|(what, names)| format!("{what}: {}", names.join(", "))).collect::<Vec<_>>().join("; ")
}
