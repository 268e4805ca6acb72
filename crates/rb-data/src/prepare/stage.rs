//! First pass: each document is read, hashed, put on a side and encoded; the ids go to one file, in reading order.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;

use memmap2::Mmap;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{Item, PrepareOptions, Progress};
use crate::error::{DataError, Result};
use crate::language::Languages;
use crate::split::{MIN_DOCUMENTS, Side, SplitMode, is_held_out, tail_start};
use crate::tokenizer::{Tokenizer, WordCache};

/// Text of one batch: what is encoded in parallel while the next one is read.
const BATCH_BYTES: usize = 8 << 20;
/// Documents of one batch.
const BATCH_DOCUMENTS: usize = 16 << 10;
/// Batches that wait.
const WAITING: usize = 2;

/// Place and counts of a document (or of the part of it that is on one side).
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// First byte in the file of ids.
    offset: u64,
    /// Tokens, without the one that ends a document.
    pub(super) tokens: u32,
    pub(super) bytes: u32,
    pub(super) chars: u32,
    /// Number of the declared language; that of the list's end for none.
    pub(super) language: u16,
    pub(super) side: Side,
    /// First bytes of the text's hash.
    pub(super) key: u64,
}

/// What the first pass found.
pub(super) struct Staged {
    pub(super) path: PathBuf,
    map: Option<Mmap>,
    width: usize,
    pub(super) entries: Vec<Entry>,
    pub(super) progress: Progress,
    pub(super) duplicates: u64,
    pub(super) duplicate_bytes: u64,
    pub(super) mode: SplitMode,
}

impl Staged {
    /// Ids of an entry.
    pub(super) fn ids(&self, entry: &Entry) -> impl Iterator<Item = u32> {
        let start = entry.offset as usize;
        let bytes =
            self.map.as_deref().map_or(&[][..], |m| &m[start..start + entry.tokens as usize * self.width]);
        bytes.chunks_exact(self.width).map(|id| id.iter().rev().fold(0, |n, b| n << 8 | u32::from(*b)))
    }
}

/// Reads on a thread of its own, encodes on the threads of the current pool.
pub(super) fn read(
    items: impl Iterator<Item = Result<Item>> + Send,
    tokenizer: &Tokenizer,
    languages: &Languages,
    options: &PrepareOptions,
    path: &Path,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<Staged> {
    let mut stage = Stage::create(path, tokenizer, languages, options)?;
    std::thread::scope(|scope| -> Result<()> {
        let (sender, receiver) = sync_channel::<Result<Vec<Item>>>(WAITING);
        scope.spawn(move || {
            let (mut batch, mut bytes) = (Vec::new(), 0);
            for item in items {
                match item {
                    Ok(item) => {
                        bytes += item.document.text.len();
                        batch.push(item);
                    }
                    Err(error) => {
                        // The other side has gone if this fails: it knows of an error already.
                        let _ = sender.send(Err(error));
                        return;
                    }
                }
                if bytes >= BATCH_BYTES || batch.len() >= BATCH_DOCUMENTS {
                    bytes = 0;
                    if sender.send(Ok(std::mem::take(&mut batch))).is_err() {
                        return;
                    }
                }
            }
            let _ = sender.send(Ok(batch));
        });
        for batch in receiver {
            stage.add(batch?)?;
            progress(stage.progress)?;
        }
        stage.decide(true)
    })?;
    stage.finish()
}

/// A document that is kept, with what was found out about it in parallel.
struct Kept {
    item: Item,
    hash: [u8; 32],
    language: u16,
}

struct Stage<'a> {
    tokenizer: &'a Tokenizer,
    languages: &'a Languages,
    options: &'a PrepareOptions,
    path: PathBuf,
    out: BufWriter<File>,
    written: u64,
    width: usize,
    entries: Vec<Entry>,
    seen: HashSet<u128>,
    progress: Progress,
    duplicates: u64,
    duplicate_bytes: u64,
    /// Decided once there are documents enough, or all of them.
    mode: Option<SplitMode>,
    /// Documents that wait for that.
    waiting: Vec<Kept>,
}

impl<'a> Stage<'a> {
    fn create(
        path: &Path,
        tokenizer: &'a Tokenizer,
        languages: &'a Languages,
        options: &'a PrepareOptions,
    ) -> Result<Self> {
        let file = File::create(path).map_err(|e| DataError::io("create", path, e))?;
        Ok(Self {
            tokenizer,
            languages,
            options,
            path: path.to_path_buf(),
            out: BufWriter::with_capacity(1 << 20, file),
            written: 0,
            width: if tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 },
            entries: Vec::new(),
            seen: HashSet::new(),
            progress: Progress::default(),
            duplicates: 0,
            duplicate_bytes: 0,
            mode: (options.split.val_fraction == 0.0).then_some(SplitMode::Nothing),
            waiting: Vec::new(),
        })
    }

    fn add(&mut self, batch: Vec<Item>) -> Result<()> {
        let none = self.languages.list().len() as u16;
        let found: Vec<Kept> = batch
            .into_par_iter()
            .map(|item| {
                let hash = Sha256::digest(item.document.text.as_bytes()).into();
                let language = self.languages.of(&item.document).map_or(none, |l| l as u16);
                Kept { item, hash, language }
            })
            .collect();
        for kept in found {
            let bytes = kept.item.document.text.len() as u64;
            self.progress.documents += 1;
            self.progress.bytes += bytes;
            let mut first = [0; 16];
            first.copy_from_slice(&kept.hash[..16]);
            if self.options.deduplicate && !self.seen.insert(u128::from_le_bytes(first)) {
                self.duplicates += 1;
                self.duplicate_bytes += bytes;
            } else {
                self.waiting.push(kept);
            }
        }
        self.decide(false)
    }

    /// Encodes what waits, if it is known by now what is held out.
    fn decide(&mut self, all_read: bool) -> Result<()> {
        if self.mode.is_none() {
            let enough = self.waiting.len() as u64 >= MIN_DOCUMENTS;
            if !enough && !all_read {
                return Ok(());
            }
            self.mode = Some(if enough { SplitMode::Documents } else { SplitMode::Tails });
        }
        let kept = std::mem::take(&mut self.waiting);
        self.encode(kept)
    }

    fn encode(&mut self, kept: Vec<Kept>) -> Result<()> {
        let mode = self.mode.unwrap_or(SplitMode::Nothing);
        let fraction = self.options.split.val_fraction;
        let encoded: Vec<Vec<(Entry, Vec<u32>)>> = kept
            .par_iter()
            .map_init(WordCache::default, |cache, kept| {
                let text = kept.item.document.text.as_str();
                let whole = |side| vec![(side, text)];
                let parts = match mode {
                    SplitMode::Nothing => whole(Side::Train),
                    SplitMode::Documents if is_held_out(&kept.hash, fraction) => whole(Side::Val),
                    SplitMode::Documents => whole(Side::Train),
                    // Ids that were made elsewhere cannot be cut by text.
                    SplitMode::Tails if kept.item.ids.is_some() => return self.tails_of_ids(kept, fraction),
                    SplitMode::Tails => {
                        let (train, val) = text.split_at(tail_start(text, fraction));
                        vec![(Side::Train, train), (Side::Val, val)]
                    }
                };
                let parts = parts.into_iter().filter(|(_, part)| !part.is_empty());
                parts
                    .map(|(side, part)| {
                        let ids = match &kept.item.ids {
                            Some(ids) => ids.clone(),
                            None => self.tokenizer.encode_cached(part, cache)?,
                        };
                        self.entry(kept, side, part.len(), part.chars().count(), ids)
                    })
                    .collect()
            })
            .collect::<Result<_>>()?;
        let mut buffer = Vec::new();
        for (mut entry, ids) in encoded.into_iter().flatten() {
            buffer.clear();
            // A width of 2 is chosen only for vocabularies whose ids all fit it.
            ids.iter().for_each(|id| buffer.extend_from_slice(&id.to_le_bytes()[..self.width]));
            self.out.write_all(&buffer).map_err(|e| DataError::io("write", &self.path, e))?;
            entry.offset = self.written;
            self.written += buffer.len() as u64;
            self.progress.tokens += ids.len() as u64 + 1;
            self.entries.push(entry);
        }
        Ok(())
    }

    /// The last part of the ids for validation.
    fn tails_of_ids(&self, kept: &Kept, fraction: f64) -> Result<Vec<(Entry, Vec<u32>)>> {
        let ids = kept.item.ids.as_deref().unwrap_or_default();
        let cut = ids.len() - (ids.len() as f64 * fraction) as usize;
        let (train, val) = ids.split_at(cut.clamp(ids.len().min(1), ids.len()));
        let parts = [(Side::Train, train), (Side::Val, val)].into_iter().filter(|(_, ids)| !ids.is_empty());
        parts
            .map(|(side, ids)| {
                let bytes: usize =
                    ids.iter().filter_map(|id| self.tokenizer.token_bytes(*id)).map(<[u8]>::len).sum();
                let chars = self.tokenizer.decode(ids)?.chars().count();
                self.entry(kept, side, bytes, chars, ids.to_vec())
            })
            .collect()
    }

    fn entry(
        &self,
        kept: &Kept,
        side: Side,
        bytes: usize,
        chars: usize,
        ids: Vec<u32>,
    ) -> Result<(Entry, Vec<u32>)> {
        let too_long = |_| DataError::LineTooLong {
            path: kept.item.document.file.to_path_buf(),
            line: kept.item.document.line,
            limit_bytes: u32::MAX.into(),
        };
        let mut key = [0; 8];
        key.copy_from_slice(&kept.hash[16..24]);
        let entry = Entry {
            offset: 0,
            tokens: u32::try_from(ids.len()).map_err(too_long)?,
            bytes: u32::try_from(bytes).map_err(too_long)?,
            chars: u32::try_from(chars).map_err(too_long)?,
            language: kept.language,
            side,
            key: u64::from_le_bytes(key),
        };
        Ok((entry, ids))
    }

    fn finish(mut self) -> Result<Staged> {
        let fail = |path: &Path| {
            let path = path.to_path_buf();
            move |e| DataError::io("write", &path, e)
        };
        self.out.flush().map_err(fail(&self.path))?;
        drop(self.out);
        if self.entries.is_empty() {
            return Err(DataError::NoDocuments { files: 0, zero_length: 0 });
        }
        if self.entries.len() > u32::MAX as usize {
            let got = self.entries.len().to_string();
            let expected = "at most 4294967295 documents; prepare the text in several folders";
            return Err(DataError::BadSetting { what: "prepare", name: "documents", got, expected });
        }
        let file = File::open(&self.path).map_err(|e| DataError::io("open", &self.path, e))?;
        let map = match self.written {
            0 => None,
            // SAFETY: the map is read-only, and the file is this process's own, under a temporary name in a folder that
            // it has just made: nobody else shortens it.
            _ => Some(unsafe { Mmap::map(&file) }.map_err(|e| DataError::io("map", &self.path, e))?),
        };
        Ok(Staged {
            path: self.path,
            map,
            width: self.width,
            entries: self.entries,
            progress: self.progress,
            duplicates: self.duplicates,
            duplicate_bytes: self.duplicate_bytes,
            mode: self.mode.unwrap_or(SplitMode::Nothing),
        })
    }
}
