//! `index.json`, and opening a prepared folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::mixture::Mixture;
use super::stage::{Entry, Staged};
use super::{DataError, PrepareOptions, Result, Side};
use crate::language::{Language, Languages};
use crate::split::SplitMode;
use crate::token_file::{TokenData, TokenFileReport, hex};
use crate::tokenizer::Tokenizer;

/// Name of the index in a prepared folder.
pub const INDEX_FILE: &str = "index.json";
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";
const FORMAT: &str = "rustingbrain-prepared-data";
const VERSION: u32 = 1;

/// Documents and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Documents; a repeated one counts as often as it is in the stream.
    pub documents: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Characters of text.
    pub chars: u64,
    /// Tokens, those that end documents included.
    pub tokens: u64,
}

/// What a language has on each side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LanguageCounts {
    /// Its declaration; `None` for documents of no declared language.
    pub language: Option<Language>,
    /// How often its text is in the training stream.
    pub repeats: f64,
    /// Training side.
    pub train: Counts,
    /// Validation side.
    pub validation: Counts,
}

/// Name of a side in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SideName {
    /// Training.
    Train,
    /// Validation.
    Validation,
}

impl From<Side> for SideName {
    fn from(side: Side) -> Self {
        match side {
            Side::Train => SideName::Train,
            Side::Val => SideName::Validation,
        }
    }
}

/// One token file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its name in the folder.
    pub file: String,
    /// Its side.
    pub side: SideName,
    /// What it holds.
    pub counts: Counts,
    /// Checksum of its content, 64 hexadecimal digits.
    pub sha256: String,
}

impl ShardEntry {
    pub(super) fn new(side: Side, report: TokenFileReport) -> Self {
        let file = report.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let counts = Counts {
            documents: report.documents,
            bytes: report.text_bytes,
            chars: report.text_chars,
            tokens: report.tokens,
        };
        Self { file, side: side.into(), counts, sha256: report.sha256 }
    }
}

/// The content of `index.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedIndex {
    /// Says what kind of file this is.
    pub format: String,
    /// Its version.
    pub version: u32,
    /// Fingerprint of the tokenizer beside it.
    pub tokenizer_sha256: String,
    /// Documents read.
    pub documents_read: u64,
    /// Bytes of text read.
    pub bytes_read: u64,
    /// Documents left out because their text had come before.
    pub duplicates: u64,
    /// Bytes of text of these.
    pub duplicate_bytes: u64,
    /// Share asked for validation.
    pub validation_fraction: f64,
    /// What is held out: `documents`, `tails` of few documents, or `nothing`.
    pub held_out: String,
    /// Parts of the languages, if they were set.
    pub mixture: Option<Mixture>,
    /// Whether training documents are shuffled.
    pub shuffled: bool,
    /// Seed of that order.
    pub seed: u64,
    /// Counts by language; the last of documents of no declared language, where there are any.
    pub languages: Vec<LanguageCounts>,
    /// Token files of both sides, each side in its order.
    pub shards: Vec<ShardEntry>,
}

impl PreparedIndex {
    pub(super) fn new(
        tokenizer: &Tokenizer,
        staged: &Staged,
        options: &PrepareOptions,
        languages: Vec<LanguageCounts>,
        shards: Vec<ShardEntry>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            tokenizer_sha256: hex(&tokenizer.sha256()),
            documents_read: staged.progress.documents,
            bytes_read: staged.progress.bytes,
            duplicates: staged.duplicates,
            duplicate_bytes: staged.duplicate_bytes,
            validation_fraction: options.split.val_fraction,
            held_out: match staged.mode {
                SplitMode::Nothing => "nothing",
                SplitMode::Documents => "documents",
                SplitMode::Tails => "tails",
            }
            .into(),
            mixture: options.mixture,
            shuffled: options.shuffle,
            seed: options.seed,
            languages,
            shards,
        }
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(INDEX_FILE);
        let text = serde_json::to_string_pretty(self).map_err(|source| bad(&path, source.to_string()))?;
        Ok(crate::atomic::write(&path, format!("{text}\n").as_bytes())?)
    }

    /// Counts of a side.
    pub fn total(&self, side: SideName) -> Counts {
        let mut sum = Counts::default();
        for counts in self.shards.iter().filter(|s| s.side == side).map(|s| s.counts) {
            sum.documents += counts.documents;
            sum.bytes += counts.bytes;
            sum.chars += counts.chars;
            sum.tokens += counts.tokens;
        }
        sum
    }
}

/// Counts languages while documents are written.
pub(super) struct Counting(Vec<LanguageCounts>);

impl Counting {
    pub(super) fn new(languages: &Languages, repeats: &[f64]) -> Self {
        let declared = languages.list().iter().cloned().map(Some).zip(repeats.iter().copied());
        let all = declared.chain([(None, 1.0)]).map(|(language, repeats)| LanguageCounts {
            language,
            repeats,
            train: Counts::default(),
            validation: Counts::default(),
        });
        Self(all.collect())
    }

    pub(super) fn add(&mut self, side: Side, entry: &Entry) {
        let language = &mut self.0[usize::from(entry.language)];
        let counts = if side == Side::Train { &mut language.train } else { &mut language.validation };
        counts.documents += 1;
        counts.bytes += u64::from(entry.bytes);
        counts.chars += u64::from(entry.chars);
        counts.tokens += u64::from(entry.tokens) + 1;
    }

    pub(super) fn finish(mut self) -> Vec<LanguageCounts> {
        let empty = |l: &LanguageCounts| l.train.documents + l.validation.documents == 0;
        if self.0.len() > 1 && self.0.last().is_some_and(empty) {
            self.0.pop();
        }
        self.0
    }
}

/// A prepared folder, open.
#[derive(Debug)]
pub struct Prepared {
    /// The index.
    pub index: PreparedIndex,
    /// The tokenizer that made the ids.
    pub tokenizer: Tokenizer,
    /// Training side.
    pub train: TokenData,
    /// Validation side, if there is any.
    pub validation: Option<TokenData>,
    /// The folder.
    pub path: PathBuf,
}

/// Whether `path` is a folder that [`prepare`](super::prepare()) made.
pub fn is_prepared(path: &Path) -> bool {
    use std::io::Read;
    let Ok(file) = std::fs::File::open(path.join(INDEX_FILE)) else { return false };
    let mut start = Vec::new();
    let _ = file.take(4096).read_to_end(&mut start);
    // A folder of text may hold another index.json; ours, were it damaged, stands beside token files.
    String::from_utf8_lossy(&start).contains(FORMAT) || path.join("train-00000.rbt").is_file()
}

impl Prepared {
    /// Opens a folder: index, tokenizer and every token file with its header, size and ids. Checksums of the content
    /// are left to [`Prepared::verify_checksums`].
    ///
    /// # Errors
    /// A missing or damaged index, tokenizer or token file, or files that do not belong together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let at = path.join(INDEX_FILE);
        let bytes = std::fs::read(&at).map_err(|e| DataError::io("read", &at, e))?;
        let index: PreparedIndex = serde_json::from_slice(&bytes)
            .map_err(|e| bad(&at, format!("not an index of prepared data: {e}; prepare the folder again")))?;
        if (index.format.as_str(), index.version) != (FORMAT, VERSION) {
            let found = format!("{} {}", index.format, index.version);
            return Err(bad(
                &at,
                format!("is {found:?}, expected \"{FORMAT} {VERSION}\"; prepare the folder again"),
            ));
        }
        let tokenizer = Tokenizer::load(path.join(TOKENIZER_FILE))?;
        if hex(&tokenizer.sha256()) != index.tokenizer_sha256 {
            let found = hex(&tokenizer.sha256());
            let expected = index.tokenizer_sha256.clone();
            return Err(DataError::TokenizerMismatch { path: path.join(TOKENIZER_FILE), expected, found });
        }
        let open = |side: SideName| -> Result<Option<TokenData>> {
            let mut parts = Vec::new();
            for shard in index.shards.iter().filter(|s| s.side == side) {
                // A name with a folder in it would read elsewhere.
                let name = Path::new(&shard.file).file_name().unwrap_or_default();
                let data = TokenData::open(path.join(name))?;
                data.check_tokenizer(&tokenizer)?;
                if data.sha256() != shard.sha256 {
                    let (expected, found) = (shard.sha256.clone(), data.sha256());
                    return Err(DataError::Checksum { path: path.join(name), expected, found });
                }
                parts.push(data);
            }
            if parts.is_empty() { Ok(None) } else { TokenData::join(parts, path).map(Some) }
        };
        let train = open(SideName::Train)?;
        let train =
            train.ok_or_else(|| bad(&at, "lists no training file; prepare the folder again".into()))?;
        let validation = open(SideName::Validation)?;
        Ok(Self { index, tokenizer, train, validation, path: path.to_path_buf() })
    }

    /// Reads all token files and compares their checksums.
    ///
    /// # Errors
    /// [`DataError::Checksum`].
    pub fn verify_checksums(&self) -> Result<()> {
        self.train.verify_checksum()?;
        self.validation.as_ref().map_or(Ok(()), TokenData::verify_checksum)
    }
}

fn bad(path: &Path, reason: String) -> DataError {
    DataError::BadIndex { path: path.to_path_buf(), reason }
}
