//! Several token files as one stream.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::header::Header;
use super::{Store, TokenData, hex};
use crate::error::{DataError, Result};

/// Files one after the other.
#[derive(Debug)]
pub(super) struct Shards {
    parts: Vec<TokenData>,
    /// Token and document with which each begins.
    starts: Vec<(u64, u64)>,
}

pub(super) fn join(mut parts: Vec<TokenData>, path: PathBuf) -> Result<TokenData> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let Some(first) = parts.first() else { return Err(DataError::TooFewTokens { path, tokens: 0 }) };
    let mut header = Header { tokens: 0, documents: 0, text_bytes: 0, text_chars: 0, ..first.header.clone() };
    let mut hash = Sha256::new();
    let mut starts = Vec::with_capacity(parts.len());
    for part in &parts {
        let of = &part.header;
        if (of.tokenizer_sha256, of.vocab_size, of.eos_id)
            != (header.tokenizer_sha256, header.vocab_size, header.eos_id)
        {
            return Err(DataError::TokenizerMismatch {
                path: part.path.clone(),
                expected: hex(&header.tokenizer_sha256),
                found: hex(&of.tokenizer_sha256),
            });
        }
        starts.push((header.tokens, header.documents));
        header.tokens += of.tokens;
        header.documents += of.documents;
        header.text_bytes += of.text_bytes;
        header.text_chars += of.text_chars;
        hash.update(of.payload_sha256);
    }
    header.payload_sha256 = hash.finalize().into();
    Ok(TokenData { store: Store::Shards(Shards { parts, starts }), path, header })
}

impl Shards {
    /// The part that holds token `index`, and its first token.
    fn part_of(&self, index: u64) -> (usize, u64) {
        let part = self.starts.partition_point(|(token, _)| *token <= index).saturating_sub(1);
        (part, self.starts[part].0)
    }

    pub(super) fn get(&self, index: u64) -> Option<u32> {
        let (part, start) = self.part_of(index);
        self.parts[part].get(index - start)
    }

    pub(super) fn copy_to(&self, start: u64, out: &mut [i32]) -> usize {
        let mut copied = 0;
        let (mut part, first) = self.part_of(start);
        let mut at = start - first;
        while copied < out.len() && part < self.parts.len() {
            copied += self.parts[part].copy_to(at, &mut out[copied..]);
            (part, at) = (part + 1, 0);
        }
        copied
    }

    pub(super) fn document_start(&self, document: u64) -> Option<u64> {
        let part = self.starts.partition_point(|(_, first)| *first <= document).saturating_sub(1);
        let (tokens, documents) = self.starts[part];
        Some(tokens + self.parts[part].document_start(document - documents)?)
    }

    pub(super) fn verify_checksum(&self) -> Result<()> {
        self.parts.iter().try_for_each(TokenData::verify_checksum)
    }
}
