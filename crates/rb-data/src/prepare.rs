//! From documents to a folder of token files: once each, split, mixed, shuffled, counted.
//!
//! | File | Holds |
//! | --- | --- |
//! | `prepare/stage.rs` | first pass: documents are read, known ones dropped, the others encoded into one file |
//! | `prepare/mixture.rs` | how often each document goes into the training stream |
//! | `prepare/import.rs` | token files of llm.c, nanoGPT and Megatron |
//! | `prepare/index.rs` | `index.json`, and opening a folder |
//!
//! The first pass keeps 16 bytes of a hash and some 40 of place and counts for each document, and a few batches of
//! text; the encoded documents are on disk. The second pass copies them in their final order. What comes out depends
//! only on the documents, their order and the settings, not on the number of threads.

pub mod import;
mod index;
mod mixture;
mod stage;

use std::path::{Path, PathBuf};

pub use import::BinFormat;
pub use import::Import;
pub use index::{
    Counts, INDEX_FILE, LanguageCounts, Prepared, PreparedIndex, ShardEntry, SideName, is_prepared,
};
pub use mixture::{Mixture, MixtureUnit, Short};
use stage::{Entry, Staged};

use crate::corpus::Document;
use crate::error::{DataError, Result};
use crate::language::Languages;
use crate::loader::permutation;
use crate::split::{Side, SplitConfig};
use crate::token_file::TokenFileWriter;
use crate::tokenizer::Tokenizer;

/// How a folder is made.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOptions {
    /// Share of the documents for validation, in `0.0 ..= 0.5`.
    pub split: SplitConfig,
    /// Whether a document whose text has come before is left out.
    pub deduplicate: bool,
    /// Parts of the declared languages in the training stream; as they come if `None`.
    pub mixture: Option<Mixture>,
    /// Whether training documents are shuffled; otherwise they stay in the order they were read in.
    pub shuffle: bool,
    /// Seed of that order.
    pub seed: u64,
    /// Tokens after which a new file is begun.
    pub shard_tokens: u64,
}

impl Default for PrepareOptions {
    /// 5 % for validation, each text once, languages as they come, shuffled with seed 0, 100 million tokens a file.
    fn default() -> Self {
        Self {
            split: SplitConfig::default(),
            deduplicate: true,
            mixture: None,
            shuffle: true,
            seed: 0,
            shard_tokens: 100_000_000,
        }
    }
}

/// How far a preparation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub bytes: u64,
    /// Tokens made so far, or, in the second pass, written so far.
    pub tokens: u64,
    /// Whether the second pass has begun.
    pub writing: bool,
}

/// What is read: text, or the ids of an imported file with the text that they stand for.
#[derive(Debug)]
pub struct Item {
    /// The document.
    pub document: Document,
    /// Its ids, if it is encoded already.
    pub ids: Option<Vec<u32>>,
}

/// Tokens after which the second pass tells of its progress.
const TOLD_TOKENS: u64 = 1 << 20;

/// Reads `items` once and makes the folder `out`, which must not exist; it appears whole or not at all. An error of
/// `progress` ends it.
///
/// # Errors
/// The first error of `items` and of `progress`; settings outside their range; [`DataError::EmptyTrainSide`]; [`DataError::FolderExists`];
/// errors of writing. Nothing is left behind then.
pub fn prepare(
    items: impl Iterator<Item = Result<Item>> + Send,
    tokenizer: &Tokenizer,
    languages: &Languages,
    options: &PrepareOptions,
    out: &Path,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<PreparedIndex> {
    check(options, languages)?;
    if out.exists() {
        return Err(DataError::FolderExists { path: out.to_path_buf() });
    }
    let folder = Building::create(out)?;
    let staged = stage::read(items, tokenizer, languages, options, &folder.path.join(".stage"), progress)?;
    if !staged.entries.iter().any(|e| e.side == Side::Train) {
        let documents = staged.entries.len() as u64;
        return Err(DataError::EmptyTrainSide { documents, val_fraction: options.split.val_fraction });
    }
    let index = write(&staged, tokenizer, languages, options, &folder.path, progress)?;
    let stage = staged.path.clone();
    drop(staged);
    std::fs::remove_file(&stage).map_err(|e| DataError::io("remove", &stage, e))?;
    folder.commit()?;
    Ok(index)
}

fn check(options: &PrepareOptions, languages: &Languages) -> Result<()> {
    let refuse =
        |name, got: String, expected| Err(DataError::BadSetting { what: "prepare", name, got, expected });
    if !(0.0..=0.5).contains(&options.split.val_fraction) {
        return refuse("val_fraction", options.split.val_fraction.to_string(), "a number from 0.0 to 0.5");
    }
    if options.shard_tokens == 0 {
        return refuse("shard_tokens", "0".into(), "at least 1");
    }
    if options.mixture.is_some() && languages.is_empty() {
        return refuse("mixture", "set without languages".into(), "declared languages with weights");
    }
    Ok(())
}

/// Second pass: the documents of each side in their order.
fn write(
    staged: &Staged,
    tokenizer: &Tokenizer,
    languages: &Languages,
    options: &PrepareOptions,
    folder: &Path,
    progress: &mut dyn FnMut(Progress) -> Result<()>,
) -> Result<PreparedIndex> {
    let entries = &staged.entries;
    let (copies, repeats) = mixture::copies(entries, languages, options.mixture.as_ref())?;
    let mut train: Vec<u32> = Vec::with_capacity(entries.len());
    for (number, entry) in entries.iter().enumerate().filter(|(_, e)| e.side == Side::Train) {
        debug_assert_eq!(entry.side, Side::Train);
        train.extend(std::iter::repeat_n(number as u32, copies[number] as usize));
    }
    if options.shuffle && !train.is_empty() {
        let order = permutation(train.len() as u64, options.seed, u64::MAX);
        train = order.iter().map(|place| train[*place as usize]).collect();
    }
    let validation: Vec<u32> =
        (0..entries.len()).filter(|n| entries[*n].side == Side::Val).map(|n| n as u32).collect();

    let mut counts = index::Counting::new(languages, &repeats);
    let mut shards = Vec::new();
    let mut so_far = Progress { writing: true, ..staged.progress };
    so_far.tokens = 0;
    for (side, name, order) in [(Side::Train, "train", &train), (Side::Val, "validation", &validation)] {
        let mut writer: Option<TokenFileWriter> = None;
        for number in order {
            let entry: &Entry = &entries[*number as usize];
            let open = match &mut writer {
                Some(open) => open,
                none => {
                    let count = shards.iter().filter(|s: &&ShardEntry| s.side == side.into()).count();
                    let path = folder.join(format!("{name}-{count:05}.rbt"));
                    none.insert(TokenFileWriter::create(path, tokenizer)?)
                }
            };
            open.push_counted(entry.bytes.into(), entry.chars.into(), staged.ids(entry))?;
            counts.add(side, entry);
            if so_far.tokens / TOLD_TOKENS != (so_far.tokens + u64::from(entry.tokens) + 1) / TOLD_TOKENS {
                progress(so_far)?;
            }
            so_far.tokens += u64::from(entry.tokens) + 1;
            if open.tokens() >= options.shard_tokens
                && let Some(full) = writer.take()
            {
                shards.push(ShardEntry::new(side, full.finish()?));
                progress(so_far)?;
            }
        }
        if let Some(last) = writer.take() {
            shards.push(ShardEntry::new(side, last.finish()?));
        }
        progress(so_far)?;
    }
    tokenizer.save(folder.join(index::TOKENIZER_FILE))?;
    let index = PreparedIndex::new(tokenizer, staged, options, counts.finish(), shards);
    index.save(folder)?;
    Ok(index)
}

/// A folder under a temporary name, removed unless committed.
struct Building {
    path: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl Building {
    fn create(target: &Path) -> Result<Self> {
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!(".tmp-{}", std::process::id()));
        let path = target.with_file_name(name);
        // What a process of the same number left when it was killed.
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(|e| DataError::io("remove", &path, e))?;
        }
        std::fs::create_dir_all(&path).map_err(|e| DataError::io("create", target, e))?;
        Ok(Self { path, target: target.to_path_buf(), committed: false })
    }

    fn commit(mut self) -> Result<()> {
        std::fs::rename(&self.path, &self.target).map_err(|e| DataError::io("replace", &self.target, e))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if !self.committed {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
