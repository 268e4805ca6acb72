//! The iterator that reads a corpus.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;
use serde_json::Value;

use super::{CorpusOptions, CorpusStats, Document, Kind, Source, SourceStats};
use crate::error::{DataError, Result};

/// UTF-8 byte-order mark.
const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Documents of a corpus in order, read as they are asked for.
#[derive(Debug)]
pub struct Documents<'c> {
    sources: std::slice::Iter<'c, Source>,
    options: CorpusOptions,
    told_of_empty: &'c AtomicBool,
    lines: Option<Lines>,
    stats: CorpusStats,
    done: bool,
}

impl<'c> Documents<'c> {
    pub(super) fn new(sources: &'c [Source], options: CorpusOptions, told_of_empty: &'c AtomicBool) -> Self {
        let stats = CorpusStats::default();
        Self { sources: sources.iter(), options, told_of_empty, lines: None, stats, done: false }
    }

    /// Counts of what was read so far.
    pub fn stats(&self) -> &CorpusStats {
        &self.stats
    }

    /// Counts of what was read.
    pub fn into_stats(self) -> CorpusStats {
        self.stats
    }

    fn step(&mut self) -> Result<Option<Document>> {
        loop {
            if let Some(lines) = &mut self.lines {
                match lines.next_text()? {
                    Some(text) => {
                        let (file, line) = (lines.file.clone(), lines.line);
                        if let Some(document) = self.accept(text, file, line) {
                            return Ok(Some(document));
                        }
                    }
                    None => self.lines = None,
                }
                continue;
            }
            let Some(source) = self.sources.next() else { return self.end() };
            let file = source.file.clone();
            let stats = SourceStats { file: file.clone(), documents: 0, zero_length: 0, chars: 0, bytes: 0 };
            self.stats.sources.push(stats);
            match source.kind {
                Kind::Jsonl => self.lines = Some(Lines::open(file, self.options.max_line_bytes)?),
                Kind::Txt => {
                    let text = read_txt(&file, self.options.max_txt_bytes)?;
                    if let Some(document) = self.accept(text, file, 1) {
                        return Ok(Some(document));
                    }
                }
            }
        }
    }

    fn accept(&mut self, text: String, file: Arc<Path>, line: u64) -> Option<Document> {
        if let Some(stats) = self.stats.sources.last_mut() {
            if text.is_empty() {
                stats.zero_length += 1;
            } else {
                stats.documents += 1;
                stats.bytes += text.len() as u64;
                stats.chars += text.chars().count() as u64;
            }
        }
        (!text.is_empty()).then_some(Document { text, file, line })
    }

    fn end(&self) -> Result<Option<Document>> {
        let zero_length = self.stats.zero_length();
        if self.stats.documents() == 0 {
            return Err(DataError::NoDocuments { files: self.stats.sources.len() as u64, zero_length });
        }
        if zero_length > 0 && !self.told_of_empty.swap(true, Ordering::Relaxed) {
            tracing::warn!(documents = zero_length, "documents without text were skipped");
        }
        Ok(None)
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.step().transpose();
        self.done = !matches!(item, Some(Ok(_)));
        item
    }
}

/// Reads a whole `.txt` file.
fn read_txt(path: &Path, limit_bytes: u64) -> Result<String> {
    let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file at the limit from one beyond it, even if it grows meanwhile.
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| DataError::io("read", path, e))?;
    if bytes.len() as u64 > limit_bytes {
        let size = std::fs::metadata(path).map_or(bytes.len() as u64, |m| m.len());
        return Err(DataError::FileTooLong { path: path.into(), bytes: size, limit_bytes });
    }
    let skip = if bytes.starts_with(BOM) { BOM.len() } else { 0 };
    let text = utf8(path, bytes, 0)?;
    Ok(if skip > 0 { text[skip..].to_owned() } else { text })
}

/// Checks that `bytes`, which begin at byte `start` of the file, are UTF-8.
fn utf8(path: &Path, bytes: Vec<u8>, start: u64) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let byte = e.as_bytes().get(at).copied().unwrap_or_default();
        DataError::NotUtf8 { path: path.into(), offset: start + at as u64, byte }
    })
}

/// The one field read from a line.
#[derive(Deserialize)]
struct Row {
    #[serde(default, deserialize_with = "present")]
    text: Option<Value>,
}

/// Tells `"text": null` (present, of the wrong type) from no field at all.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Option<Value>, D::Error> {
    Value::deserialize(d).map(Some)
}

/// Lines of a `.jsonl` file.
#[derive(Debug)]
struct Lines {
    reader: BufReader<File>,
    file: Arc<Path>,
    limit_bytes: u64,
    line: u64,
    offset: u64,
}

impl Lines {
    fn open(file: Arc<Path>, limit_bytes: u64) -> Result<Self> {
        let handle = File::open(&file).map_err(|e| DataError::io("open", &file, e))?;
        Ok(Self { reader: BufReader::with_capacity(1 << 18, handle), file, limit_bytes, line: 0, offset: 0 })
    }

    /// Text of the next line that is not blank.
    fn next_text(&mut self) -> Result<Option<String>> {
        loop {
            let start = self.offset;
            let Some(mut bytes) = self.next_line()? else { return Ok(None) };
            let mut skipped = 0;
            if start == 0 && bytes.starts_with(BOM) {
                bytes.drain(..BOM.len());
                skipped = BOM.len() as u64;
            }
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let line = utf8(&self.file, bytes, start + skipped)?;
            return self.parse(&line).map(Some);
        }
    }

    /// The next line without its end.
    fn next_line(&mut self) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        // Room for the line, a carriage return and a line feed.
        let most = self.limit_bytes.saturating_add(2);
        let read = (&mut self.reader)
            .take(most)
            .read_until(b'\n', &mut bytes)
            .map_err(|e| DataError::io("read", &self.file, e))?;
        if read == 0 {
            return Ok(None);
        }
        self.line += 1;
        self.offset += read as u64;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        if bytes.len() as u64 > self.limit_bytes {
            let (path, line, limit_bytes) = (self.file.to_path_buf(), self.line, self.limit_bytes);
            return Err(DataError::LineTooLong { path, line, limit_bytes });
        }
        Ok(Some(bytes))
    }

    fn parse(&self, line: &str) -> Result<String> {
        let path = || self.file.to_path_buf();
        // A struct would also be read from a JSON array, whose first element would pass for the text.
        if !line.trim_start().starts_with('{') {
            let source = serde::de::Error::custom("the line does not begin with {");
            return Err(DataError::Json { path: path(), line: self.line, source });
        }
        let row: Row = serde_json::from_str(line).map_err(|source| DataError::Json {
            path: path(),
            line: self.line,
            source,
        })?;
        let got = match row.text {
            Some(Value::String(text)) => return Ok(text),
            None => return Err(DataError::MissingText { path: path(), line: self.line }),
            Some(Value::Null) => "null",
            Some(Value::Bool(_)) => "a boolean",
            Some(Value::Number(_)) => "a number",
            Some(Value::Array(_)) => "an array",
            Some(Value::Object(_)) => "an object",
        };
        Err(DataError::WrongTextType { path: path(), line: self.line, got })
    }
}
