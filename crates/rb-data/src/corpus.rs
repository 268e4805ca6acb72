//! Documents from files and folders, one at a time.
//!
//! | Path | Documents |
//! | --- | --- |
//! | `*.txt` | one: the whole file |
//! | `*.jsonl` | one a line: the string field `text` of a JSON object, blank lines skipped |
//! | `*.txt.gz`, `*.jsonl.gz`, `*.zst` of both | as the file inside |
//! | `*.parquet` | one a row: the string column `text` |
//! | folder | those of such files in it, sub-folders too, sorted by path; other files counted as skipped |
//! | pattern (`data/*.jsonl`, `data/**/*.txt`) | those of the files and folders that it fits, sorted by path |
//!
//! Text is taken as it is, Windows line ends included; only a byte-order mark at the start of a file is dropped.
//! Documents without any character are skipped and counted.

mod ahead;
mod compressed;
mod documents;
mod parquet_file;
mod part;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use ahead::ReadAhead;
use compressed::Compression;
pub use documents::Documents;
use walkdir::WalkDir;

use crate::error::{DataError, Result};

/// Default for [`CorpusOptions::max_line_bytes`]: 64 MiB.
pub const MAX_LINE_BYTES: u64 = 64 << 20;
/// Default for [`CorpusOptions::max_txt_bytes`]: 4 GiB.
pub const MAX_TXT_BYTES: u64 = 4 << 30;

/// Where the text is, and limits that keep one document in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusOptions {
    /// Longest line of a `.jsonl` file, its line end not counted, and longest text of a `.parquet` file.
    pub max_line_bytes: u64,
    /// Longest `.txt` file.
    pub max_txt_bytes: u64,
    /// Field or column with the text.
    pub text_field: String,
    /// Other string fields or columns that documents carry where they have them.
    pub fields: Vec<String>,
}

impl Default for CorpusOptions {
    fn default() -> Self {
        Self {
            max_line_bytes: MAX_LINE_BYTES,
            max_txt_bytes: MAX_TXT_BYTES,
            text_field: "text".to_owned(),
            fields: Vec::new(),
        }
    }
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its text, at least one character.
    pub text: String,
    /// The file it is from.
    pub file: Arc<Path>,
    /// Its line in a `.jsonl` file or row in a `.parquet` file, from 1; 1 for a `.txt` file.
    pub line: u64,
    /// Those of [`CorpusOptions::fields`] that it has, with their strings.
    pub fields: Vec<(Arc<str>, String)>,
}

impl AsRef<str> for Document {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

/// Counts of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStats {
    /// The file.
    pub file: Arc<Path>,
    /// Documents with text.
    pub documents: u64,
    /// Documents skipped because they have no character.
    pub zero_length: u64,
    /// Characters (Unicode scalar values) of text.
    pub chars: u64,
    /// Bytes of text in UTF-8.
    pub bytes: u64,
}

/// Counts of a corpus.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CorpusStats {
    /// Counts of each file, in reading order.
    pub sources: Vec<SourceStats>,
}

impl CorpusStats {
    fn sum(&self, field: impl Fn(&SourceStats) -> u64) -> u64 {
        self.sources.iter().map(field).sum()
    }

    /// Documents with text.
    pub fn documents(&self) -> u64 {
        self.sum(|s| s.documents)
    }

    /// Documents skipped because they have no character.
    pub fn zero_length(&self) -> u64 {
        self.sum(|s| s.zero_length)
    }

    /// Characters (Unicode scalar values).
    pub fn chars(&self) -> u64 {
        self.sum(|s| s.chars)
    }

    /// Bytes of UTF-8.
    pub fn bytes(&self) -> u64 {
        self.sum(|s| s.bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Txt,
    Jsonl,
    Parquet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    format: Format,
    compression: Compression,
}

impl Kind {
    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let (stem, compression) = match name.rsplit_once('.')? {
            (stem, "gz") => (stem, Compression::Gzip),
            (stem, "zst") => (stem, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        let format = match stem.rsplit_once('.')?.1 {
            "txt" => Format::Txt,
            "jsonl" => Format::Jsonl,
            "parquet" if compression == Compression::None => Format::Parquet,
            _ => return None,
        };
        Some(Self { format, compression })
    }
}

#[derive(Debug, Clone)]
struct Source {
    file: Arc<Path>,
    kind: Kind,
}

/// Files found and ready to be read, as often as needed.
#[derive(Debug, Clone)]
pub struct Corpus {
    sources: Vec<Source>,
    skipped: Vec<PathBuf>,
    repeated: Vec<PathBuf>,
    options: CorpusOptions,
    /// Whether the log has the count of documents without text: the same text is read several times.
    told_of_empty: Arc<AtomicBool>,
}

/// Finds the files of `paths`, in the order given; nothing is read yet.
///
/// # Errors
/// A path that is missing, empty (0 bytes), of another kind, or a folder without text files.
pub fn open(paths: &[PathBuf]) -> Result<Corpus> {
    Corpus::open_with(paths, CorpusOptions::default())
}

impl Corpus {
    /// As [`open`], with other limits.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open_with(paths: &[PathBuf], options: CorpusOptions) -> Result<Self> {
        if paths.is_empty() {
            return Err(DataError::NoPaths);
        }
        let mut corpus = Self {
            sources: Vec::new(),
            skipped: Vec::new(),
            repeated: Vec::new(),
            options,
            told_of_empty: Arc::default(),
        };
        let mut known = HashSet::new();
        for path in &expanded(paths)? {
            let metadata = std::fs::metadata(path).map_err(|e| DataError::io("open", path, e))?;
            if metadata.is_dir() {
                corpus.add_folder(path, &mut known)?;
                continue;
            }
            let Some(kind) = Kind::of(path) else {
                return Err(DataError::UnsupportedFile { path: path.clone() });
            };
            if !metadata.is_file() {
                return Err(DataError::NotAFile { path: path.clone() });
            }
            if metadata.len() == 0 {
                return Err(DataError::EmptyFile { path: path.clone() });
            }
            corpus.add_file(path, kind, &mut known);
        }
        if !corpus.skipped.is_empty() {
            tracing::warn!(
                files = corpus.skipped.len(),
                "files that are neither .txt, .jsonl nor .parquet were skipped"
            );
        }
        if !corpus.repeated.is_empty() {
            tracing::warn!(files = corpus.repeated.len(), "files named more than once are read once");
        }
        Ok(corpus)
    }

    fn add_folder(&mut self, folder: &Path, known: &mut HashSet<PathBuf>) -> Result<()> {
        let (mut found, mut skipped) = (false, 0);
        for entry in WalkDir::new(folder).follow_links(true).sort_by_file_name() {
            let entry = entry.map_err(|source| DataError::Walk { path: folder.to_path_buf(), source })?;
            if entry.file_type().is_dir() {
                continue;
            }
            match Kind::of(entry.path()) {
                Some(kind) if entry.file_type().is_file() => {
                    found = true;
                    self.add_file(entry.path(), kind, known);
                }
                _ => {
                    skipped += 1;
                    self.skipped.push(entry.into_path());
                }
            }
        }
        if found { Ok(()) } else { Err(DataError::NoTextFiles { path: folder.to_path_buf(), skipped }) }
    }

    /// Adds a file unless it is there already under any name: a text that is read twice could be trained on and
    /// validated on.
    fn add_file(&mut self, path: &Path, kind: Kind, known: &mut HashSet<PathBuf>) {
        let identity = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        if known.insert(identity) {
            self.sources.push(Source { file: path.into(), kind });
        } else {
            self.repeated.push(path.to_path_buf());
        }
    }

    /// Files that will be read, in order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.sources.iter().map(|s| &*s.file)
    }

    /// Files in the folders that are of another kind.
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }

    /// Paths that name a file already in the corpus.
    pub fn repeated(&self) -> &[PathBuf] {
        &self.repeated
    }

    /// Reads all documents in order. After the last one comes [`DataError::NoDocuments`] if there was none; nothing
    /// comes after an error.
    pub fn documents(&self) -> Documents<'_> {
        Documents::new(&self.sources, &self.options, &self.told_of_empty)
    }

    /// As [`Corpus::documents`], read ahead on as many threads as the current pool of rayon has: files, and parts of
    /// large `.jsonl` and `.parquet` files, at the same time, but no more than some 64 MiB of text, or one document.
    /// Documents, their order, errors and counts are those of [`Corpus::documents`].
    ///
    /// `judge` says on the reading thread what else is wanted of a document: it is left out for `None`. Lines of a
    /// `.jsonl` file are not known yet then: `judge` sees them counted from some line before.
    pub fn read_ahead<A: Send + 'static>(
        &self,
        judge: impl Fn(&Document) -> Option<A> + Send + Sync + 'static,
    ) -> ReadAhead<A> {
        ReadAhead::new(self.clone(), Box::new(judge))
    }

    /// [`Corpus::read_ahead`] of every document.
    pub fn documents_ahead(&self) -> impl Iterator<Item = Result<Document>> + Send + use<> {
        self.read_ahead(|_| Some(())).map(|item| item.map(|(document, ())| document))
    }

    /// Reads everything once and counts.
    ///
    /// # Errors
    /// The first error of [`Corpus::documents`].
    pub fn stats(&self) -> Result<CorpusStats> {
        let mut documents = self.documents();
        for document in documents.by_ref() {
            document?;
        }
        Ok(documents.into_stats())
    }
}

/// The paths with each pattern replaced by what it fits. A path that exists is no pattern.
fn expanded(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for path in paths {
        let pattern = path.to_str().filter(|text| text.contains(['*', '?', '[']) && !path.exists());
        let Some(pattern) = pattern else {
            out.push(path.clone());
            continue;
        };
        let refuse = |reason: String| DataError::BadPattern { pattern: pattern.to_owned(), reason };
        let before = out.len();
        for entry in glob::glob(pattern).map_err(|e| refuse(format!("{e}; correct the pattern")))? {
            let entry =
                entry.map_err(|e| DataError::io("open", e.path(), std::io::Error::from(e.error().kind())))?;
            // Within a pattern, files of other kinds are passed over as in a folder.
            if entry.is_dir() || Kind::of(&entry).is_some() {
                out.push(entry);
            }
        }
        if out.len() == before {
            return Err(refuse(
                "fits no .txt, .jsonl or .parquet file and no folder; check the pattern".into(),
            ));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
