//! A tokenised data set: one file, memory-mapped when read.
//!
//! Layout, all little-endian:
//!
//! | Bytes | Field |
//! | --- | --- |
//! | 0..8 | magic `RBTOKENS` |
//! | 8..12 | format version, `u32` |
//! | 12..16 | bytes per token, `u32`: 2 if the vocabulary has at most 65,536 entries, else 4 |
//! | 16..24 | number of tokens `N`, `u64` |
//! | 24..32 | number of documents `D`, `u64` |
//! | 32..36 | vocabulary size, `u32` |
//! | 36..40 | id of the end-of-document token, `u32` |
//! | 40..72 | sha256 of everything after the header |
//! | 72..104 | sha256 of the tokenizer's `tokenizer.json` |
//! | 104..112 | bytes of text, `u64` |
//! | 112..120 | characters of text, `u64` |
//! | 120..128 | zero |
//! | 128.. | `N` tokens; zeros up to a multiple of 8; `D` document starts, `u64`, counted in tokens |
//!
//! A document is its tokens followed by one end-of-document token.

mod build;
mod header;
mod shards;

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

pub use build::{TokenFileReport, TokenFileWriter, build, build_split, encode_ordered};
use header::{HEADER_BYTES, Header};

use crate::error::{DataError, Result};

/// A read-only stream of `N` tokens cut into documents, from a file or from memory.
///
/// The file must not be changed while it is open; [`TokenFileWriter`] replaces files by renaming, which is safe.
#[derive(Debug)]
pub struct TokenData {
    store: Store,
    path: PathBuf,
    header: Header,
}

#[derive(Debug)]
enum Store {
    Mapped(Mmap),
    Memory { tokens: Vec<u32>, doc_starts: Vec<u64> },
    Shards(shards::Shards),
}

impl TokenData {
    /// Maps a token file and checks its header, size, document index and every token id; the checksum is left to
    /// [`TokenData::verify_checksum`].
    ///
    /// # Errors
    /// Missing file, wrong magic or version, truncated or too long, damaged index, token id outside the vocabulary.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        let size = file.metadata().map_err(|e| DataError::io("read", path, e))?.len();
        if size == 0 {
            return Err(DataError::WrongSize {
                path: path.into(),
                kind: "truncated",
                expected: HEADER_BYTES as u64,
                found: 0,
            });
        }
        // SAFETY: the map is read-only. Another process that shortened the file in place could still cause a fault;
        // this crate's writer never does so, it renames over the old file, which keeps the mapped one intact.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| DataError::io("map", path, e))?;
        let header = Header::parse(path, &map)?;
        let data = Self { store: Store::Mapped(map), path: path.to_path_buf(), header };
        data.check_tokens()?;
        data.check_documents()?;
        Ok(data)
    }

    /// One stream from several files, in their order.
    ///
    /// # Errors
    /// No file at all, or files of different tokenizers.
    pub fn join(parts: Vec<TokenData>, path: impl Into<PathBuf>) -> Result<Self> {
        shards::join(parts, path.into())
    }

    /// Builds a data set in memory; each of `documents` gets `eos_id` appended.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id (or `eos_id`) that is not below `vocab_size`.
    pub fn from_documents(documents: &[Vec<u32>], vocab_size: u32, eos_id: u32) -> Result<Self> {
        let mut tokens = Vec::new();
        let mut doc_starts = Vec::new();
        for document in documents {
            doc_starts.push(tokens.len() as u64);
            tokens.extend_from_slice(document);
            tokens.push(eos_id);
        }
        let mut hash = Sha256::new();
        for t in &tokens {
            hash.update(t.to_le_bytes());
        }
        for d in &doc_starts {
            hash.update(d.to_le_bytes());
        }
        let header = Header {
            width: 4,
            tokens: tokens.len() as u64,
            documents: doc_starts.len() as u64,
            vocab_size,
            eos_id,
            payload_sha256: hash.finalize().into(),
            ..Header::default()
        };
        let data = Self { store: Store::Memory { tokens, doc_starts }, path: "<memory>".into(), header };
        data.check_tokens()?;
        Ok(data)
    }

    /// Number of tokens, end-of-document tokens included.
    pub fn len(&self) -> u64 {
        self.header.tokens
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.header.tokens == 0
    }

    /// Number of documents.
    pub fn num_documents(&self) -> u64 {
        self.header.documents
    }

    /// Vocabulary size: every id is below it.
    pub fn vocab_size(&self) -> u32 {
        self.header.vocab_size
    }

    /// Id of the end-of-document token.
    pub fn eos_id(&self) -> u32 {
        self.header.eos_id
    }

    /// Bytes of UTF-8 text that were tokenised, end-of-document tokens not counted; 0 for data made in memory.
    ///
    /// Bits per byte is the summed loss in nats divided by `ln 2` times this.
    pub fn text_bytes(&self) -> u64 {
        self.header.text_bytes
    }

    /// Characters (Unicode scalar values) of text that were tokenised; 0 for data made in memory.
    pub fn text_chars(&self) -> u64 {
        self.header.text_chars
    }

    /// Where the data came from; `<memory>` for data made in memory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checksum that names the content: 64 hexadecimal digits.
    pub fn sha256(&self) -> String {
        hex(&self.header.payload_sha256)
    }

    /// Refuses data that was tokenised by another tokenizer.
    ///
    /// # Errors
    /// [`DataError::TokenizerMismatch`]. Data made in memory is always accepted.
    pub fn check_tokenizer(&self, tokenizer: &crate::Tokenizer) -> Result<()> {
        if matches!(self.store, Store::Memory { .. }) || self.header.tokenizer_sha256 == tokenizer.sha256() {
            return Ok(());
        }
        Err(DataError::TokenizerMismatch {
            path: self.path.clone(),
            expected: hex(&tokenizer.sha256()),
            found: hex(&self.header.tokenizer_sha256),
        })
    }

    /// Token `index`, or `None` past the end.
    pub fn get(&self, index: u64) -> Option<u32> {
        if index >= self.header.tokens {
            return None;
        }
        let i = index as usize;
        match &self.store {
            Store::Memory { tokens, .. } => tokens.get(i).copied(),
            Store::Shards(shards) => shards.get(index),
            Store::Mapped(map) => match self.header.width {
                2 => map.get(HEADER_BYTES + 2 * i..HEADER_BYTES + 2 * i + 2).map(|b| u16_at(b).into()),
                _ => map.get(HEADER_BYTES + 4 * i..HEADER_BYTES + 4 * i + 4).map(u32_at),
            },
        }
    }

    /// Copies tokens `start..start + out.len()` into `out` and returns how many there were; the rest of `out` is
    /// left as it was.
    pub fn copy_to(&self, start: u64, out: &mut [i32]) -> usize {
        let end = start.saturating_add(out.len() as u64).min(self.header.tokens);
        if start >= end {
            return 0;
        }
        if let Store::Shards(shards) = &self.store {
            return shards.copy_to(start, out);
        }
        let (start, end) = (start as usize, end as usize);
        match &self.store {
            // Handled above, over the ends of files.
            Store::Shards(_) => return 0,
            Store::Memory { tokens, .. } => {
                for (o, &t) in out.iter_mut().zip(&tokens[start..end]) {
                    *o = t as i32;
                }
            }
            Store::Mapped(map) if self.header.width == 2 => {
                let bytes = &map[HEADER_BYTES + 2 * start..HEADER_BYTES + 2 * end];
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = u16_at(b).into();
                }
            }
            Store::Mapped(map) => {
                let bytes = &map[HEADER_BYTES + 4 * start..HEADER_BYTES + 4 * end];
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = u32_at(b) as i32;
                }
            }
        }
        end - start
    }

    /// Index of the first token of document `document`, or `None` past the end.
    pub fn document_start(&self, document: u64) -> Option<u64> {
        if document >= self.header.documents {
            return None;
        }
        match &self.store {
            Store::Memory { doc_starts, .. } => doc_starts.get(document as usize).copied(),
            Store::Shards(shards) => shards.document_start(document),
            Store::Mapped(map) => {
                let at = self.header.index_offset() as usize + 8 * document as usize;
                map.get(at..at + 8).map(u64_at)
            }
        }
    }

    /// Number of the document that token `index` belongs to; the number of the last document past the end.
    pub fn document_of(&self, index: u64) -> u64 {
        let (mut low, mut high) = (0, self.header.documents);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            // The start exists, as middle < high <= number of documents.
            if self.document_start(middle).unwrap_or(u64::MAX) <= index {
                low = middle
            } else {
                high = middle
            }
        }
        low
    }

    /// Reads the whole file and compares its sha256 with the header's.
    ///
    /// # Errors
    /// [`DataError::Checksum`] with both sums.
    pub fn verify_checksum(&self) -> Result<()> {
        let map = match &self.store {
            Store::Mapped(map) => map,
            Store::Memory { .. } => return Ok(()),
            Store::Shards(shards) => return shards.verify_checksum(),
        };
        let found: [u8; 32] = Sha256::digest(&map[HEADER_BYTES..]).into();
        if found == self.header.payload_sha256 {
            return Ok(());
        }
        Err(DataError::Checksum { path: self.path.clone(), expected: self.sha256(), found: hex(&found) })
    }

    fn check_tokens(&self) -> Result<()> {
        const CHUNK: u64 = 1 << 20; // tokens a task
        let vocab_size = self.header.vocab_size;
        let refuse = |index: u64, id: u32| DataError::TokenOutOfRange {
            path: self.path.clone(),
            offset: HEADER_BYTES as u64 + index * u64::from(self.header.width),
            index,
            id,
            vocab_size,
        };
        if self.header.eos_id >= vocab_size {
            return Err(DataError::BadField {
                path: self.path.clone(),
                offset: header::EOS_OFFSET,
                field: "eos_id",
                got: self.header.eos_id.into(),
                expected: format!("an id below the vocabulary size {vocab_size}"),
            });
        }
        let bad = (0..self.header.tokens.div_ceil(CHUNK)).into_par_iter().find_map_first(|c| {
            (c * CHUNK..((c + 1) * CHUNK).min(self.header.tokens))
                .find_map(|i| self.get(i).filter(|&id| id >= vocab_size).map(|id| (i, id)))
        });
        bad.map_or(Ok(()), |(index, id)| Err(refuse(index, id)))
    }

    fn check_documents(&self) -> Result<()> {
        let refuse = |document: u64, got: u64, expected: String| {
            let offset = self.header.index_offset() + 8 * document;
            Err(DataError::BadField {
                path: self.path.clone(),
                offset,
                field: "document start",
                got,
                expected,
            })
        };
        let (mut previous, documents) = (None, self.header.documents);
        for d in 0..documents {
            let start = self.document_start(d).unwrap_or(u64::MAX);
            match previous {
                None if start != 0 => return refuse(d, start, "0 (the first document)".into()),
                Some(p) if start <= p => return refuse(d, start, format!("more than {p} (the one before)")),
                _ if start >= self.header.tokens => {
                    return refuse(d, start, format!("less than the {} tokens", self.header.tokens));
                }
                _ => {}
            }
            if start > 0 && self.get(start - 1) != Some(self.header.eos_id) {
                return refuse(
                    d,
                    start,
                    format!("a position after an end-of-document token ({})", self.eos_id()),
                );
            }
            previous = Some(start);
        }
        if documents == 0 && self.header.tokens > 0 {
            return Err(DataError::BadField {
                path: self.path.clone(),
                offset: header::DOCUMENTS_OFFSET,
                field: "number of documents",
                got: 0,
                expected: format!("at least 1 for {} tokens", self.header.tokens),
            });
        }
        Ok(())
    }
}

/// Lower-case hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn u16_at(b: &[u8]) -> u16 {
    let mut raw = [0; 2];
    raw.copy_from_slice(&b[..2]);
    u16::from_le_bytes(raw)
}

fn u32_at(b: &[u8]) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&b[..4]);
    u32::from_le_bytes(raw)
}

fn u64_at(b: &[u8]) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&b[..8]);
    u64::from_le_bytes(raw)
}

#[cfg(test)]
mod tests;
