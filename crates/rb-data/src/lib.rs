//! Text in, batches of token ids out: corpora, tokenizers, token files, the split and the loader.
//!
//! | File | Holds |
//! | --- | --- |
//! | `corpus.rs` | streams documents from `.txt`, `.jsonl`, `.parquet`, folders and patterns |
//! | `language.rs` | declared languages: which document is in which |
//! | `tokenizer.rs` | byte-level BPE and Unigram: training, loading, encoding, decoding |
//! | [`fertility`] | characters a token of each language, and the gate on them |
//! | `token_file.rs` | a tokenised data set on disk, memory-mapped |
//! | [`prepare`] | a folder of token files: de-duplicated, split, mixed, shuffled |
//! | `split.rs` | train and validation sides of a corpus |
//! | [`examine`] | a stream's coverage and order, with flags |
//! | `loader.rs` | sequences, shuffling, ranks, exact resume |
//! | [`atomic`] | files replaced whole: temporary name, fsync, rename |
//! | `error.rs` | [`DataError`] |
//!
//! From text to batches:
//!
//! ```
//! # fn main() -> rb_data::Result<()> {
//! use std::sync::Arc;
//! use rb_data::{Loader, LoaderConfig, TokenData, Tokenizer, TokenizerConfig, corpus, token_file};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! # std::fs::write(folder.join("book.txt"), "It was a dark and stormy night. ".repeat(20)).unwrap();
//! let corpus = corpus::open(&[folder.join("book.txt")])?;
//! let config = TokenizerConfig { vocab_size: 280, ..Default::default() };
//! let (tokenizer, _report) = Tokenizer::train(corpus.documents(), &config)?;
//! token_file::build(corpus.documents(), &tokenizer, folder.join("train.rbt"))?;
//!
//! let data = Arc::new(TokenData::open(folder.join("train.rbt"))?);
//! let config = LoaderConfig { seq_len: 8, batch_size: 2, ..Default::default() };
//! let mut loader = Loader::new(data, config)?;
//! let batch = loader.next_batch();
//! assert_eq!(batch.input_ids.len(), 2 * 8);
//! assert_eq!(batch.labels[0], batch.input_ids[1]);
//! # Ok(())
//! # }
//! ```
//!
//! Nothing here knows tensors or devices, and nothing here reads the environment.

pub mod atomic;
pub mod corpus;
mod error;
pub mod examine;
pub mod fertility;
mod language;
pub mod loader;
pub mod prepare;
pub mod split;
pub mod token_file;
pub mod tokenizer;

pub use corpus::{Corpus, CorpusOptions, CorpusStats, Document, SourceStats};
pub use error::{DataError, Result};
pub use language::{Language, Languages};
pub use loader::{
    Batch, Coverage, EvalConfig, EvalIter, IGNORE, Loader, LoaderConfig, LoaderFingerprint, LoaderState,
};
pub use split::{Side, SplitConfig, SplitMode, SplitPlan};
pub use token_file::{TokenData, TokenFileReport, TokenFileWriter};
pub use tokenizer::{
    DecodeStream, ModelKind, Normalization, Splitter, Tokenizer, TokenizerConfig, TrainReport,
};
