//! Reading files one document at a time, and the iterator that reads a corpus in order.

use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::compressed::{self, Compression};
use super::parquet_file::Rows;
use super::part::Part;
use super::{CorpusOptions, CorpusStats, Document, Format, Source, SourceStats};
use crate::error::{DataError, Result};

/// UTF-8 byte-order mark.
const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Fields that a document carries beside its text.
pub(super) type Fields = Vec<(Arc<str>, String)>;

/// Documents of a corpus in order, read as they are asked for.
pub struct Documents<'c> {
    sources: std::slice::Iter<'c, Source>,
    options: &'c CorpusOptions,
    told_of_empty: &'c AtomicBool,
    open: Option<Open>,
    stats: CorpusStats,
    done: bool,
}

/// A file, or a part of one, being read.
pub(super) enum Open {
    Text(Arc<Path>, Option<String>),
    Lines(Lines),
    Rows(Box<Rows>),
}

impl Open {
    pub(super) fn new(source: &Source, part: Part, options: &CorpusOptions) -> Result<Self> {
        let file = source.file.clone();
        let compression = source.kind.compression;
        Ok(match source.kind.format {
            Format::Jsonl => Open::Lines(Lines::open(file, compression, part.bytes(), options)?),
            Format::Parquet => Open::Rows(Box::new(Rows::open(file, part.groups(), options)?)),
            Format::Txt => {
                let text = read_txt(&file, compression, options.max_txt_bytes)?;
                Open::Text(file, Some(text))
            }
        })
    }

    /// The next document, which may have no text. Lines are counted from the beginning of the part.
    pub(super) fn next_document(&mut self) -> Result<Option<Document>> {
        let (found, file, line) = match self {
            Open::Text(file, text) => (text.take().map(|text| (text, Fields::new())), file.clone(), 1),
            Open::Lines(lines) => (lines.next_text()?, lines.file.clone(), lines.line),
            Open::Rows(rows) => (rows.next_text()?, rows.file.clone(), rows.row),
        };
        Ok(found.map(|(text, fields)| Document { text, file, line, fields }))
    }

    /// Lines read so far, by which those of the next part of the file are to be moved. Rows of a Parquet file have their
    /// final numbers.
    pub(super) fn lines(&self) -> u64 {
        if let Open::Lines(lines) = self { lines.line } else { 0 }
    }
}

impl SourceStats {
    pub(super) fn new(file: Arc<Path>) -> Self {
        Self { file, documents: 0, zero_length: 0, chars: 0, bytes: 0 }
    }

    /// Adds the counts of a part of the file.
    pub(super) fn add(&mut self, part: &SourceStats) {
        self.documents += part.documents;
        self.zero_length += part.zero_length;
        self.chars += part.chars;
        self.bytes += part.bytes;
    }

    /// Counts a document; `false` for one without text, which is passed over.
    pub(super) fn count(&mut self, text: &str) -> bool {
        if text.is_empty() {
            self.zero_length += 1;
            return false;
        }
        self.documents += 1;
        self.bytes += text.len() as u64;
        self.chars += text.chars().count() as u64;
        true
    }
}

impl<'c> Documents<'c> {
    pub(super) fn new(
        sources: &'c [Source],
        options: &'c CorpusOptions,
        told_of_empty: &'c AtomicBool,
    ) -> Self {
        let stats = CorpusStats::default();
        Self { sources: sources.iter(), options, told_of_empty, open: None, stats, done: false }
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
            let Some(open) = &mut self.open else {
                let Some(source) = self.sources.next() else {
                    return end(&self.stats, self.told_of_empty).map(|()| None);
                };
                self.stats.sources.push(SourceStats::new(source.file.clone()));
                self.open = Some(Open::new(source, Part::Whole, self.options)?);
                continue;
            };
            let Some(document) = open.next_document()? else {
                self.open = None;
                continue;
            };
            if self.stats.sources.last_mut().is_some_and(|stats| stats.count(&document.text)) {
                return Ok(Some(document));
            }
        }
    }
}

/// What is said after the last document.
pub(super) fn end(stats: &CorpusStats, told_of_empty: &AtomicBool) -> Result<()> {
    let zero_length = stats.zero_length();
    if stats.documents() == 0 {
        return Err(DataError::NoDocuments { files: stats.sources.len() as u64, zero_length });
    }
    if zero_length > 0 && !told_of_empty.swap(true, Ordering::Relaxed) {
        tracing::warn!(documents = zero_length, "documents without text were skipped");
    }
    Ok(())
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
fn read_txt(path: &Path, compression: Compression, limit_bytes: u64) -> Result<String> {
    let file = compressed::open(path, compression, 0)?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file at the limit from one beyond it, even if it grows meanwhile.
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| compressed::read_error(path, compression, e))?;
    if bytes.len() as u64 > limit_bytes {
        let size = std::fs::metadata(path).map_or(0, |m| m.len()).max(bytes.len() as u64);
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

/// The string of a row of a Parquet file, which has no offset that would help a reader.
pub(super) fn utf8_of_row(path: &Path, row: u64, column: &str, bytes: &[u8]) -> Result<String> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| DataError::Parquet {
        path: path.into(),
        reason: format!("row {row}: column {column:?} is not valid UTF-8; write it again from text"),
    })
}

/// Reads the fields that are asked for from a JSON object and passes over the others.
struct Wanted<'o>(&'o CorpusOptions);

/// What a line has of the fields asked for.
struct Found {
    text: Option<Value>,
    fields: Vec<(usize, Value)>,
}

impl<'de> DeserializeSeed<'de> for Wanted<'_> {
    type Value = Found;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> std::result::Result<Found, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Found;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Found, A::Error> {
        let mut found = Found { text: None, fields: Vec::new() };
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0.text_field {
                // Which of two texts is meant is anybody's guess.
                if found.text.is_some() {
                    return Err(serde::de::Error::custom(format!("duplicate field `{key}`")));
                }
                found.text = Some(map.next_value()?);
            } else if let Some(index) = self.0.fields.iter().position(|field| *field == key) {
                found.fields.push((index, map.next_value()?));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Lines of a `.jsonl` file, or those that begin in a range of its bytes.
pub(super) struct Lines {
    reader: BufReader<Box<dyn Read + Send>>,
    compression: Compression,
    file: Arc<Path>,
    options: CorpusOptions,
    /// Names of the fields, shared by all documents.
    names: Vec<Arc<str>>,
    line: u64,
    offset: u64,
    end: u64,
}

impl Lines {
    /// A range that does not begin at 0 is one of a file that is not compressed.
    fn open(
        file: Arc<Path>,
        compression: Compression,
        range: Range<u64>,
        options: &CorpusOptions,
    ) -> Result<Self> {
        // A line that begins before the range ends there too, or after: its end is looked for from one byte before.
        let offset = range.start.saturating_sub(1);
        let reader = BufReader::with_capacity(1 << 16, compressed::open(&file, compression, offset)?);
        let names = options.fields.iter().map(|name| name.as_str().into()).collect();
        let options = options.clone();
        let mut lines = Self { reader, compression, file, options, names, line: 0, offset, end: range.end };
        if range.start > 0 {
            lines.skip_to_line()?;
        }
        Ok(lines)
    }

    /// Passes over the rest of a line, no further than the range.
    fn skip_to_line(&mut self) -> Result<()> {
        while self.offset < self.end {
            let buffer = self
                .reader
                .fill_buf()
                .map_err(|e| compressed::read_error(&self.file, self.compression, e))?;
            let line_end = buffer.iter().position(|byte| *byte == b'\n');
            let skipped = line_end.map_or(buffer.len(), |at| at + 1);
            if skipped == 0 {
                // The file has become shorter.
                self.end = self.offset;
            }
            self.reader.consume(skipped);
            self.offset += skipped as u64;
            if line_end.is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Text of the next line that is not blank.
    fn next_text(&mut self) -> Result<Option<(String, Fields)>> {
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
        if self.offset >= self.end {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        // Room for the line, a carriage return and a line feed.
        let limit_bytes = self.options.max_line_bytes;
        let most = limit_bytes.saturating_add(2);
        let read = (&mut self.reader)
            .take(most)
            .read_until(b'\n', &mut bytes)
            .map_err(|e| compressed::read_error(&self.file, self.compression, e))?;
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
        if bytes.len() as u64 > limit_bytes {
            let (path, line) = (self.file.to_path_buf(), self.line);
            return Err(DataError::LineTooLong { path, line, limit_bytes });
        }
        Ok(Some(bytes))
    }

    fn parse(&self, line: &str) -> Result<(String, Fields)> {
        let (path, field) = (|| self.file.to_path_buf(), || self.options.text_field.clone());
        let refuse = |source| DataError::Json { path: path(), line: self.line, source };
        if !line.trim_start().starts_with('{') {
            return Err(refuse(serde::de::Error::custom("the line does not begin with {")));
        }
        let mut json = serde_json::Deserializer::from_str(line);
        let found = Wanted(&self.options).deserialize(&mut json).map_err(refuse)?;
        json.end().map_err(refuse)?;
        let fields = found.fields.into_iter().filter_map(|(index, value)| match value {
            Value::String(text) => Some((self.names[index].clone(), text)),
            _ => None,
        });
        let got = match found.text {
            Some(Value::String(text)) => return Ok((text, fields.collect())),
            None => return Err(DataError::MissingText { path: path(), line: self.line, field: field() }),
            Some(Value::Null) => "null",
            Some(Value::Bool(_)) => "a boolean",
            Some(Value::Number(_)) => "a number",
            Some(Value::Array(_)) => "an array",
            Some(Value::Object(_)) => "an object",
        };
        Err(DataError::WrongTextType { path: path(), line: self.line, field: field(), got })
    }
}
