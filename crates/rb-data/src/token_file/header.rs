//! The fixed 128 bytes at the start of a token file.

use std::path::Path;

use super::{u32_at, u64_at};
use crate::error::{DataError, Result};

/// First bytes of a token file.
pub(super) const MAGIC: &[u8; 8] = b"RBTOKENS";
/// Version written and read.
pub(super) const VERSION: u32 = 1;
/// Size of the header.
pub(super) const HEADER_BYTES: usize = 128;
/// Offset of the number of documents.
pub(super) const DOCUMENTS_OFFSET: u64 = 24;
/// Offset of the end-of-document id.
pub(super) const EOS_OFFSET: u64 = 36;
/// Largest vocabulary whose ids fit two bytes.
const U16_VOCAB: u32 = 1 << 16;

/// Header fields, named as in the table of `token_file.rs`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) width: u32,
    pub(super) tokens: u64,
    pub(super) documents: u64,
    pub(super) vocab_size: u32,
    pub(super) eos_id: u32,
    pub(super) payload_sha256: [u8; 32],
    pub(super) tokenizer_sha256: [u8; 32],
    pub(super) text_bytes: u64,
    pub(super) text_chars: u64,
}

impl Header {
    /// Bytes a token takes for a vocabulary of `vocab_size`.
    pub(super) fn width_for(vocab_size: u32) -> u32 {
        if vocab_size <= U16_VOCAB { 2 } else { 4 }
    }

    /// Zero bytes between the tokens and the document starts.
    pub(super) fn padding(&self) -> u64 {
        self.tokens.wrapping_mul(self.width.into()).wrapping_neg() % 8
    }

    /// Offset in the file of the document starts. Only for a header whose size was checked.
    pub(super) fn index_offset(&self) -> u64 {
        HEADER_BYTES as u64 + self.tokens * u64::from(self.width) + self.padding()
    }

    /// Size of the whole file, or `None` if it does not fit 64 bits.
    fn file_bytes(&self) -> Option<u64> {
        let tokens = self.tokens.checked_mul(self.width.into())?.checked_add(self.padding())?;
        tokens.checked_add(self.documents.checked_mul(8)?)?.checked_add(HEADER_BYTES as u64)
    }

    /// The header as bytes.
    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.width.to_le_bytes());
        out[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        out[24..32].copy_from_slice(&self.documents.to_le_bytes());
        out[32..36].copy_from_slice(&self.vocab_size.to_le_bytes());
        out[36..40].copy_from_slice(&self.eos_id.to_le_bytes());
        out[40..72].copy_from_slice(&self.payload_sha256);
        out[72..104].copy_from_slice(&self.tokenizer_sha256);
        out[104..112].copy_from_slice(&self.text_bytes.to_le_bytes());
        out[112..120].copy_from_slice(&self.text_chars.to_le_bytes());
        out
    }

    /// Reads the header of `file` and compares the size it asks for with the size there is.
    pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Self> {
        let found = file.len() as u64;
        let first = &file[..file.len().min(MAGIC.len())];
        if first != &MAGIC[..first.len()] {
            let found = String::from_utf8_lossy(first).into_owned();
            return Err(DataError::BadMagic { path: path.into(), found });
        }
        if file.len() < HEADER_BYTES {
            let expected = HEADER_BYTES as u64;
            return Err(DataError::WrongSize { path: path.into(), kind: "truncated", expected, found });
        }
        let version = u32_at(&file[8..12]);
        if version != VERSION {
            return Err(DataError::BadVersion { path: path.into(), found: version, expected: VERSION });
        }
        let mut header = Self {
            width: u32_at(&file[12..16]),
            tokens: u64_at(&file[16..24]),
            documents: u64_at(&file[24..32]),
            vocab_size: u32_at(&file[32..36]),
            eos_id: u32_at(&file[36..40]),
            text_bytes: u64_at(&file[104..112]),
            text_chars: u64_at(&file[112..120]),
            ..Self::default()
        };
        header.payload_sha256.copy_from_slice(&file[40..72]);
        header.tokenizer_sha256.copy_from_slice(&file[72..104]);

        let refuse = |offset, field, got, expected: String| {
            Err(DataError::BadField { path: path.into(), offset, field, got, expected })
        };
        let width = Self::width_for(header.vocab_size);
        if header.width != width {
            let expected = format!("{width} for a vocabulary of {}", header.vocab_size);
            return refuse(12, "bytes per token", header.width.into(), expected);
        }
        let Some(expected) = header.file_bytes() else {
            return refuse(16, "number of tokens", header.tokens, "a size that fits 64 bits".into());
        };
        match found.cmp(&expected) {
            std::cmp::Ordering::Equal => Ok(header),
            order => {
                let kind = if order.is_lt() { "truncated" } else { "too long" };
                Err(DataError::WrongSize { path: path.into(), kind, expected, found })
            }
        }
    }
}
