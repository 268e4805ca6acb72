//! Writing token files: documents stream in, ids stream out, nothing but the document starts is kept in memory.

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::header::{HEADER_BYTES, Header};
use super::hex;
use crate::atomic::AtomicFile;
use crate::error::{DataError, Result};
use crate::split::SplitPlan;
use crate::tokenizer::{Tokenizer, WordCache};

/// Text encoded in one parallel batch. More would only hold more memory.
const BATCH_BYTES: usize = 8 << 20;
/// Documents encoded in one parallel batch.
const BATCH_DOCUMENTS: usize = 16 << 10;

/// What a finished token file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenFileReport {
    /// The file.
    pub path: PathBuf,
    /// Documents.
    pub documents: u64,
    /// Tokens, end-of-document tokens included.
    pub tokens: u64,
    /// Bytes of text.
    pub text_bytes: u64,
    /// Characters of text.
    pub text_chars: u64,
    /// Checksum of the content, 64 hexadecimal digits.
    pub sha256: String,
}

/// Encodes `documents` and writes them to `path`, replacing a file there only when the new one is complete.
///
/// The bytes of the file depend only on the documents, their order and the tokenizer.
///
/// # Errors
/// The first error of `documents`; any error of writing. The old file stays in place then.
pub fn build<S: AsRef<str> + Send + Sync>(
    documents: impl Iterator<Item = Result<S>>,
    tokenizer: &Tokenizer,
    path: impl AsRef<Path>,
) -> Result<TokenFileReport> {
    let mut writer = TokenFileWriter::create(path, tokenizer)?;
    encode_ordered(documents, tokenizer, |text, ids| writer.push(text.as_ref(), &ids))?;
    writer.finish()
}

/// Encodes `documents` once and writes each side of `plan` to its own file; returns the reports of train and
/// validation, the latter `None` when that side has no text; an old file at `val_path` is removed then, as it belongs
/// to other data.
///
/// # Errors
/// As [`build`]; [`DataError::EmptyTrainSide`] if no text is left for training.
pub fn build_split<S: AsRef<str> + Send + Sync>(
    documents: impl Iterator<Item = Result<S>>,
    tokenizer: &Tokenizer,
    plan: &SplitPlan,
    train_path: impl AsRef<Path>,
    val_path: impl AsRef<Path>,
) -> Result<(TokenFileReport, Option<TokenFileReport>)> {
    let (train_path, val_path) = (train_path.as_ref(), val_path.as_ref());
    if train_path == val_path {
        return Err(DataError::BadSetting {
            what: "token files",
            name: "val_path",
            got: val_path.display().to_string(),
            expected: "another file than train_path",
        });
    }
    let mut train = TokenFileWriter::create(train_path, tokenizer)?;
    let mut val = TokenFileWriter::create(val_path, tokenizer)?;
    let parts = documents.flat_map(|document| match document {
        Err(e) => vec![Err(e)],
        Ok(document) => {
            let (train, val) = plan.split(document.as_ref());
            let part = |is_train, text: &str| (!text.is_empty()).then(|| Ok((is_train, text.to_owned())));
            part(true, train).into_iter().chain(part(false, val)).collect()
        }
    });
    let parts = parts.map(|part| part.map(|(is_train, text)| Part { is_train, text }));
    encode_ordered(parts, tokenizer, |part, ids| {
        let writer = if part.is_train { &mut train } else { &mut val };
        writer.push(&part.text, &ids)
    })?;
    if train.header.documents == 0 {
        return Err(DataError::EmptyTrainSide {
            documents: val.header.documents,
            val_fraction: plan.config().val_fraction,
        });
    }
    if val.header.documents == 0 {
        tracing::warn!("the validation side of the split is empty: no validation loss can be measured");
        let report = train.finish()?;
        return match std::fs::remove_file(val_path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(DataError::io("remove", val_path, e)),
            _ => Ok((report, None)),
        };
    }
    Ok((train.finish()?, Some(val.finish()?)))
}

struct Part {
    is_train: bool,
    text: String,
}

impl AsRef<str> for Part {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

/// Encodes documents in parallel batches and hands each, with its ids (no end-of-document token), to `sink` in the
/// order of the iterator.
///
/// # Errors
/// The first error of the iterator, of encoding or of `sink`.
pub fn encode_ordered<S: AsRef<str> + Send + Sync>(
    documents: impl Iterator<Item = Result<S>>,
    tokenizer: &Tokenizer,
    mut sink: impl FnMut(&S, Vec<u32>) -> Result<()>,
) -> Result<()> {
    let mut batch: Vec<S> = Vec::new();
    let mut batch_bytes = 0;
    let mut flush = |batch: &mut Vec<S>| -> Result<()> {
        let encoded: Vec<Result<Vec<u32>>> = batch
            .par_iter()
            .map_init(WordCache::default, |cache, document| tokenizer.encode_cached(document.as_ref(), cache))
            .collect();
        batch.iter().zip(encoded).try_for_each(|(document, ids)| sink(document, ids?))?;
        batch.clear();
        Ok(())
    };
    for document in documents {
        let document = document?;
        batch_bytes += document.as_ref().len();
        batch.push(document);
        if batch_bytes >= BATCH_BYTES || batch.len() >= BATCH_DOCUMENTS {
            flush(&mut batch)?;
            batch_bytes = 0;
        }
    }
    flush(&mut batch)
}

/// Writes one token file, a document at a time.
pub struct TokenFileWriter {
    file: AtomicFile,
    path: PathBuf,
    buffer: Vec<u8>,
    hash: Sha256,
    header: Header,
    doc_starts: Vec<u64>,
}

impl TokenFileWriter {
    /// Starts a file that will appear at `path` when finished.
    ///
    /// # Errors
    /// [`DataError::Io`] if no file can be made in that folder.
    pub fn create(path: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let path = path.as_ref();
        let vocab_size = tokenizer.vocab_size() as u32;
        let header = Header {
            width: Header::width_for(vocab_size),
            vocab_size,
            eos_id: tokenizer.eos_id(),
            tokenizer_sha256: tokenizer.sha256(),
            ..Header::default()
        };
        let mut file = AtomicFile::create(path)?;
        file.file().write_all(&[0; HEADER_BYTES]).map_err(|e| DataError::io("write", path, e))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
            buffer: Vec::with_capacity(1 << 20),
            hash: Sha256::new(),
            header,
            doc_starts: Vec::new(),
        })
    }

    /// Appends a document: its text (for the counts) and its ids; the end-of-document token is added here.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id outside the vocabulary; [`DataError::Io`].
    pub fn push(&mut self, text: &str, ids: &[u32]) -> Result<()> {
        self.push_counted(text.len() as u64, text.chars().count() as u64, ids.iter().copied())
    }

    /// As [`TokenFileWriter::push`], with the bytes and characters of the text already counted.
    pub(crate) fn push_counted(
        &mut self,
        text_bytes: u64,
        text_chars: u64,
        ids: impl Iterator<Item = u32>,
    ) -> Result<()> {
        self.doc_starts.push(self.header.tokens);
        self.header.documents += 1;
        self.header.text_bytes += text_bytes;
        self.header.text_chars += text_chars;
        let eos_id = self.header.eos_id;
        for id in ids.chain([eos_id]) {
            if id >= self.header.vocab_size {
                return Err(DataError::TokenOutOfRange {
                    path: self.path.clone(),
                    offset: HEADER_BYTES as u64 + self.header.tokens * u64::from(self.header.width),
                    index: self.header.tokens,
                    id,
                    vocab_size: self.header.vocab_size,
                });
            }
            // A width of 2 is chosen only for vocabularies whose ids all fit it.
            self.buffer.extend_from_slice(&id.to_le_bytes()[..self.header.width as usize]);
            self.header.tokens += 1;
            if self.buffer.len() >= 1 << 20 {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Tokens written so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Writes the document starts and the header, and puts the file in its place.
    ///
    /// # Errors
    /// [`DataError::Io`]; the old file, if any, stays in place then.
    pub fn finish(mut self) -> Result<TokenFileReport> {
        let padding = self.header.padding() as usize;
        self.buffer.resize(self.buffer.len() + padding, 0);
        for start in std::mem::take(&mut self.doc_starts) {
            self.buffer.extend_from_slice(&start.to_le_bytes());
            if self.buffer.len() >= 1 << 20 {
                self.flush()?;
            }
        }
        self.flush()?;
        self.header.payload_sha256 = self.hash.clone().finalize().into();
        let header = self.header.to_bytes();
        let file = self.file.file();
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&header))
            .map_err(|e| DataError::io("write", &self.path, e))?;
        self.file.commit()?;
        Ok(TokenFileReport {
            path: self.path,
            documents: self.header.documents,
            tokens: self.header.tokens,
            text_bytes: self.header.text_bytes,
            text_chars: self.header.text_chars,
            sha256: hex(&self.header.payload_sha256),
        })
    }

    fn flush(&mut self) -> Result<()> {
        self.hash.update(&self.buffer);
        self.file.file().write_all(&self.buffer).map_err(|e| DataError::io("write", &self.path, e))?;
        self.buffer.clear();
        Ok(())
    }
}
