//! Rows of a `.parquet` file: string columns, a few rows at a time.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::CorpusOptions;
use super::documents::{Fields, utf8_of_row};
use crate::error::{DataError, Result};

/// Rows read at once: one long document does not keep many others in memory.
const ROWS: usize = 64;

type Strings = ColumnReaderImpl<ByteArrayType>;

/// A column that is read.
struct Column {
    index: usize,
    name: Arc<str>,
    optional: bool,
    reader: Option<Strings>,
    /// Values read and not given out.
    values: VecDeque<Option<ByteArray>>,
}

/// Documents of a `.parquet` file.
pub(super) struct Rows {
    reader: SerializedFileReader<File>,
    pub(super) file: Arc<Path>,
    /// The text, then the fields asked for that there are.
    columns: Vec<Column>,
    groups: Range<usize>,
    limit_bytes: u64,
    /// Rows given out, and those of the groups that are left out before them.
    pub(super) row: u64,
}

/// Row groups of a file.
pub(super) fn num_groups(file: &Path) -> Option<usize> {
    Some(SerializedFileReader::new(File::open(file).ok()?).ok()?.num_row_groups())
}

impl Rows {
    /// Opens a file to read some of its row groups.
    pub(super) fn open(file: Arc<Path>, groups: Range<usize>, options: &CorpusOptions) -> Result<Self> {
        let handle = File::open(&file).map_err(|e| DataError::io("open", &file, e))?;
        let reader = SerializedFileReader::new(handle).map_err(|e| refuse(&file, &e))?;
        let mut columns = Vec::new();
        for name in std::iter::once(&options.text_field).chain(&options.fields) {
            match find(&reader, name) {
                Ok(column) => columns.push(column),
                // A field that tells a language may be missing, as in JSON lines; the text may not.
                Err(reason) if columns.is_empty() => {
                    return Err(DataError::Parquet { path: file.to_path_buf(), reason });
                }
                Err(_) => {}
            }
        }
        let all = reader.metadata().row_groups();
        let groups = groups.start.min(all.len())..groups.end.min(all.len());
        let row = all[..groups.start].iter().map(|group| group.num_rows().max(0) as u64).sum();
        Ok(Self { reader, file, columns, groups, limit_bytes: options.max_line_bytes, row })
    }

    /// Text and fields of the next row.
    pub(super) fn next_text(&mut self) -> Result<Option<(String, Fields)>> {
        while self.columns[0].values.is_empty() {
            if !self.fill()? {
                return Ok(None);
            }
        }
        self.row += 1;
        let mut strings = Vec::with_capacity(self.columns.len());
        for column in &mut self.columns {
            let value = column.values.pop_front().flatten();
            let string = value.map(|bytes| utf8_of_row(&self.file, self.row, &column.name, bytes.data()));
            strings.push((column.name.clone(), string.transpose()?));
        }
        let (field, text) = strings.remove(0);
        let Some(text) = text else {
            return Err(DataError::WrongTextType {
                path: self.file.to_path_buf(),
                line: self.row,
                field: field.to_string(),
                got: "null",
            });
        };
        if text.len() as u64 > self.limit_bytes {
            let (path, line, limit_bytes) = (self.file.to_path_buf(), self.row, self.limit_bytes);
            return Err(DataError::LineTooLong { path, line, limit_bytes });
        }
        let fields = strings.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
        Ok(Some((text, fields)))
    }

    /// Reads some more rows of every column; `false` at the end of the file.
    fn fill(&mut self) -> Result<bool> {
        let file = self.file.clone();
        let fail = |e: ParquetError| refuse(&file, &e);
        if self.columns[0].reader.is_none() {
            let Some(next) = self.groups.next() else { return Ok(false) };
            let group = self.reader.get_row_group(next).map_err(fail)?;
            for column in &mut self.columns {
                column.reader = match group.get_column_reader(column.index).map_err(fail)? {
                    ColumnReader::ByteArrayColumnReader(strings) => Some(strings),
                    _ => None,
                };
            }
        }
        let mut read = None;
        for column in &mut self.columns {
            let rows = column.fill().map_err(fail)?;
            if *read.get_or_insert(rows) != rows {
                return Err(DataError::Parquet {
                    path: self.file.to_path_buf(),
                    reason: "its columns have different numbers of rows; the file is damaged".into(),
                });
            }
        }
        if read == Some(0) {
            self.columns.iter_mut().for_each(|column| column.reader = None);
        }
        Ok(true)
    }
}

impl Column {
    /// Reads up to [`ROWS`] values and says how many there were.
    fn fill(&mut self) -> std::result::Result<usize, ParquetError> {
        let Some(reader) = &mut self.reader else { return Ok(0) };
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (rows, ..) =
            reader.read_records(ROWS, self.optional.then_some(&mut levels), None, &mut values)?;
        let mut values = values.into_iter();
        if self.optional {
            self.values.extend(levels.iter().map(|level| if *level > 0 { values.next() } else { None }));
        } else {
            self.values.extend(values.map(Some));
        }
        Ok(rows)
    }
}

/// The top-level string column of this name, or why there is none.
fn find(reader: &SerializedFileReader<File>, name: &str) -> std::result::Result<Column, String> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let names = || schema.columns().iter().map(|c| c.path().string()).collect::<Vec<_>>().join(", ");
    let index = schema.columns().iter().position(|c| c.path().parts() == [name]);
    let Some(index) = index else {
        return Err(format!("no column {name:?} (there are: {}); name the column with the text", names()));
    };
    let column = schema.column(index);
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        return Err(format!("column {name:?} is {}, expected strings", column.physical_type()));
    }
    Ok(Column {
        index,
        name: name.into(),
        optional: column.max_def_level() > 0,
        reader: None,
        values: VecDeque::new(),
    })
}

fn refuse(path: &Path, error: &ParquetError) -> DataError {
    DataError::Parquet {
        path: path.into(),
        reason: format!("not a readable Parquet file: {error}; copy or download it again"),
    }
}
