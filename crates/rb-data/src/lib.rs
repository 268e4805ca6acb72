//! Text in, batches of token ids out: corpora, tokenizers, token files, the split and the loader.
//!
//! | File | Holds |
//! | --- | --- |
//! | `corpus.rs` | streams documents from `.txt`, `.jsonl` and folders |
//! | `tokenizer.rs` | byte-level BPE: training, loading, encoding, decoding |
//! | `token_file.rs` | a tokenised data set on disk, memory-mapped |
//! | `split.rs` | train and validation sides of a corpus |
//! | `loader.rs` | sequences, shuffling, ranks, exact resume |
//! | `atomic.rs` | temporary name, fsync, rename |
//! | `error.rs` | [`DataError`] |
//!
//! Nothing here knows tensors or devices, and nothing here reads the environment.

mod atomic;
pub mod corpus;
mod error;
pub mod loader;
pub mod split;
pub mod token_file;
pub mod tokenizer;

pub use corpus::{Corpus, CorpusOptions, CorpusStats, Document};
pub use error::{DataError, Result};
pub use loader::{Batch, EvalConfig, EvalIter, IGNORE, Loader, LoaderConfig, LoaderState};
pub use split::{Side, SplitConfig, SplitPlan};
pub use token_file::{TokenData, TokenFileReport, TokenFileWriter};
pub use tokenizer::{DecodeStream, Splitter, Tokenizer, TokenizerConfig};
