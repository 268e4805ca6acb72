//! Token files of other programs, read as documents of ids.
//!
//! | Format | File |
//! | --- | --- |
//! | llm.c | 256 header numbers of 4 bytes (20240520, version 1: ids of 2 bytes; 20240801, version 7: of 4), then ids |
//! | nanoGPT | ids of 2 bytes, nothing else; has to be named, as nothing in the file tells it |
//! | Megatron | `.bin` with the ids, `.idx` beside it with element type, sequence lengths, places and documents |
//!
//! Documents of the first two are what stands between end-of-document ids. All numbers are little-endian.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use super::Item;
use crate::corpus::Document;
use crate::error::{DataError, Result};
use crate::tokenizer::Tokenizer;

const LLM_C_HEADER_BYTES: usize = 1024;
/// Magic number, version and bytes of an id.
const LLM_C: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];
const MEGATRON_MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const MEGATRON_HEADER_BYTES: usize = 34;

/// Programs whose token files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BinFormat {
    /// llm.c.
    LlmC,
    /// nanoGPT.
    NanoGpt,
    /// Megatron-LM.
    Megatron,
}

/// An open token file of another program.
#[derive(Debug)]
pub struct Import {
    map: Mmap,
    file: Arc<Path>,
    width: usize,
    /// First byte of the ids.
    start: usize,
    /// First byte and number of ids of each document; `None` where documents are found by their ends.
    documents: Option<Vec<(usize, usize)>>,
}

impl Import {
    /// Opens `path`, a `.bin` file, and checks header and size. `format` says what it is; left out, it is told from
    /// the file, which is not possible for nanoGPT's.
    ///
    /// # Errors
    /// A file of no known format, or one whose size and numbers do not fit each other.
    pub fn open(path: &Path, format: Option<BinFormat>) -> Result<Self> {
        let map = map(path)?;
        let index = path.with_extension("idx");
        let magic = map.get(..4).map_or(0, |b| number(b) as u32);
        let known = LLM_C.iter().any(|(known, ..)| *known == magic);
        let format = match format {
            Some(format) => format,
            None if index.is_file() => BinFormat::Megatron,
            None if known => BinFormat::LlmC,
            None => {
                return Err(refuse(
                    path,
                    "does not begin as a file of llm.c and has no .idx beside it as one of Megatron; if it holds \
                     nanoGPT's bare 16-bit ids, say so with --bin nanogpt"
                        .into(),
                ));
            }
        };
        match format {
            BinFormat::LlmC => llm_c(path, map),
            BinFormat::NanoGpt => bare(path, map, 0, 2),
            BinFormat::Megatron => megatron(path, map, &index),
        }
    }

    /// Documents, each with the text that its ids stand for; end-of-document ids are left out.
    ///
    /// The iterator gives [`DataError::TokenOutOfRange`] for an id that `tokenizer` does not have.
    pub fn items<'i>(
        &'i self,
        tokenizer: &'i Tokenizer,
    ) -> Box<dyn Iterator<Item = Result<Item>> + Send + 'i> {
        let eos = tokenizer.eos_id();
        let made = move |(number, ids): (u64, Vec<u32>)| self.item(number, ids, tokenizer);
        match &self.documents {
            Some(documents) => Box::new(
                documents
                    .iter()
                    .map(move |(start, count)| {
                        let ids = (0..*count).map(|i| self.id(start + i * self.width));
                        let mut ids: Vec<u32> = ids.collect();
                        while ids.last() == Some(&eos) {
                            ids.pop();
                        }
                        ids
                    })
                    .filter(|ids| !ids.is_empty())
                    .zip(1..)
                    .map(move |(ids, number)| made((number, ids))),
            ),
            None => {
                let mut at = self.start;
                let runs = std::iter::from_fn(move || {
                    while at < self.map.len() && self.id(at) == eos {
                        at += self.width;
                    }
                    let first = at;
                    while at < self.map.len() && self.id(at) != eos {
                        at += self.width;
                    }
                    let ids =
                        (first..at).step_by(self.width).map(|place| self.id(place)).collect::<Vec<u32>>();
                    (!ids.is_empty()).then_some(ids)
                });
                Box::new(runs.zip(1..).map(move |(ids, number)| made((number, ids))))
            }
        }
    }

    fn id(&self, at: usize) -> u32 {
        number(&self.map[at..at + self.width]) as u32
    }

    fn item(&self, number: u64, ids: Vec<u32>, tokenizer: &Tokenizer) -> Result<Item> {
        let bad = ids.iter().find(|id| tokenizer.token_bytes(**id).is_none());
        if let Some(id) = bad {
            let reason = format!(
                "document {number} has id {id}, but the tokenizer has no such token (vocab_size {}); give the \
                 tokenizer that the file was made with",
                tokenizer.vocab_size()
            );
            return Err(refuse(&self.file, reason));
        }
        let text = tokenizer.decode_with_special(&ids)?;
        let document = Document { text, file: self.file.clone(), line: number, fields: Vec::new() };
        Ok(Item { document, ids: Some(ids) })
    }
}

fn llm_c(path: &Path, map: Mmap) -> Result<Import> {
    let header = |i: usize| map.get(4 * i..4 * i + 4).map_or(0, |b| number(b) as u32);
    let (magic, version, count) = (header(0), header(1), header(2) as usize);
    let known = LLM_C.iter().find(|(m, v, _)| (*m, *v) == (magic, version));
    let Some((.., width)) = known.filter(|_| map.len() >= LLM_C_HEADER_BYTES) else {
        let reason = format!("is no token file of llm.c (it begins with {magic}, {version}); make it again");
        return Err(refuse(path, reason));
    };
    let expected = LLM_C_HEADER_BYTES + width * count;
    if map.len() != expected {
        let kind = if map.len() < expected { "truncated" } else { "too long" };
        let (expected, found) = (expected as u64, map.len() as u64);
        return Err(DataError::WrongSize { path: path.into(), kind, expected, found });
    }
    bare(path, map, LLM_C_HEADER_BYTES, *width)
}

fn bare(path: &Path, map: Mmap, start: usize, width: usize) -> Result<Import> {
    if map.len() == start || !(map.len() - start).is_multiple_of(width) {
        let reason = format!(
            "has {} bytes of ids, expected a multiple of {width} above 0; copy it again",
            map.len() - start
        );
        return Err(refuse(path, reason));
    }
    Ok(Import { map, file: path.into(), width, start, documents: None })
}

fn megatron(path: &Path, bin: Mmap, index_path: &Path) -> Result<Import> {
    let index = map(index_path)?;
    let bad = |reason: String| refuse(index_path, format!("{reason}; copy it again"));
    if index.len() < MEGATRON_HEADER_BYTES || &index[..9] != MEGATRON_MAGIC || number(&index[9..17]) != 1 {
        return Err(bad("is no index of Megatron, version 1".into()));
    }
    let width = match index[17] {
        8 => 2,
        4 => 4,
        code => return Err(bad(format!("has ids of type {code}, expected 8 (uint16) or 4 (int32)"))),
    };
    let (sequences, marks) = (number(&index[18..26]), number(&index[26..34]));
    // Lengths of 4 bytes, places of 8, then the sequence with which each document begins and the number of all.
    let expected = sequences.checked_mul(12).and_then(|bytes| {
        bytes.checked_add(marks.checked_mul(8)?)?.checked_add(MEGATRON_HEADER_BYTES as u64)
    });
    if expected != Some(index.len() as u64) {
        return Err(bad(format!("does not have the size of {sequences} sequences and {marks} documents")));
    }
    let (sequences, marks) = (sequences as usize, marks as usize);
    let lengths = &index[MEGATRON_HEADER_BYTES..];
    let places = &lengths[4 * sequences..];
    let first = &places[8 * sequences..];
    let eight = |bytes: &[u8], i: usize| number(&bytes[8 * i..8 * i + 8]);
    let mut documents = Vec::new();
    for document in 0..marks.saturating_sub(1) {
        let (from, to) = (eight(first, document), eight(first, document + 1));
        if from > to || to > sequences as u64 {
            return Err(bad(format!("document {document} has sequences {from}..{to} of {sequences}")));
        }
        if from == to {
            continue;
        }
        let place = eight(places, from as usize) as usize;
        let mut end = place;
        for sequence in from as usize..to as usize {
            let length = number(&lengths[4 * sequence..4 * sequence + 4]) as usize;
            if eight(places, sequence) as usize != end || end + length * width > bin.len() {
                let reason = format!(
                    "sequence {sequence} is at byte {end} with {length} ids, which does not fit {} ({} bytes)",
                    path.display(),
                    bin.len()
                );
                return Err(bad(reason));
            }
            end += length * width;
        }
        documents.push((place, (end - place) / width));
    }
    Ok(Import { map: bin, file: path.into(), width, start: 0, documents: Some(documents) })
}

fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    if file.metadata().map_err(|e| DataError::io("read", path, e))?.len() == 0 {
        return Err(DataError::EmptyFile { path: path.into() });
    }
    // SAFETY: the map is read-only. Another process that shortened the file meanwhile could cause a fault, as with every
    // mapped file; the user is asked for finished files.
    unsafe { Mmap::map(&file) }.map_err(|e| DataError::io("map", path, e))
}

/// Up to eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

fn refuse(path: &Path, reason: String) -> DataError {
    DataError::BadImport { path: PathBuf::from(path), reason }
}
