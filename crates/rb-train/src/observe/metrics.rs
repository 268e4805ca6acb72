//! `metrics.jsonl`: append, resume, read.
//!
//! Each record is one line, written with one system call, so a crash can spoil the last line only. A resumed
//! run cuts the file back to the step of its checkpoint, so that a run killed and resumed any number of times
//! leaves one curve, each step once.

use super::file::AppendFile;
use super::{ObserveError, Record};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

/// Appends records to `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    file: AppendFile,
    dropped_records: u64,
}

impl MetricsWriter {
    /// Creates the file of a new run.
    ///
    /// # Errors
    /// [`ObserveError::AlreadyExists`] if there is one: the records of another run are never overwritten.
    pub fn create(path: &Path) -> Result<Self, ObserveError> {
        Ok(Self { file: AppendFile::create_new(path)?, dropped_records: 0 })
    }

    /// Continues the file of a run resumed from a checkpoint at `step`.
    ///
    /// Records of later steps are dropped, and so is a last line torn by a crash. The file is replaced
    /// atomically, its other lines are kept byte for byte. A file that is missing is created.
    ///
    /// # Errors
    /// [`ObserveError::BadRecord`] if a line before the last one is not a record.
    pub fn resume(path: &Path, step: u64) -> Result<Self, ObserveError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Self::create(path),
            Err(e) => return Err(ObserveError::io("open", path)(e)),
        };
        let mut dropped_records = 0;
        rb_data::atomic::replace(path, |out| {
            for_each_record(path, file, |record, line| {
                if record.step() > step {
                    dropped_records += 1;
                    return Ok(());
                }
                out.write_all(line)
                    .and_then(|()| out.write_all(b"\n"))
                    .map_err(ObserveError::io("rewrite", path))
            })
        })?;
        Ok(Self { file: AppendFile::open(path)?, dropped_records })
    }

    /// Returns how many records of later steps [`MetricsWriter::resume`] dropped.
    pub fn dropped_records(&self) -> u64 {
        self.dropped_records
    }

    /// Writes one record; when this returns, a crash of the process cannot lose it.
    ///
    /// # Errors
    /// [`ObserveError::Io`]; the file then ends with the record before.
    pub fn append(&mut self, record: impl Into<Record>) -> Result<(), ObserveError> {
        let mut line = serde_json::to_vec(&record.into())
            .map_err(|source| ObserveError::Encode { path: self.file.path().to_path_buf(), source })?;
        line.push(b'\n');
        self.file.append(&line)
    }

    /// Waits until all records are on the disk; call it before a checkpoint is declared complete.
    ///
    /// # Errors
    /// [`ObserveError::Io`].
    pub fn sync(&self) -> Result<(), ObserveError> {
        self.file.sync()
    }
}

/// Returns all records of a `metrics.jsonl`, without a last line torn by a crash.
///
/// # Errors
/// [`ObserveError::Io`], or [`ObserveError::BadRecord`] with the number of the line.
pub fn read(path: &Path) -> Result<Vec<Record>, ObserveError> {
    let file = File::open(path).map_err(ObserveError::io("open", path))?;
    let mut records = Vec::new();
    for_each_record(path, file, |record, _| {
        records.push(record);
        Ok(())
    })?;
    Ok(records)
}

/// Calls `visit` with each record and its line; a last line that is no JSON is what a crash left.
fn for_each_record(
    path: &Path,
    file: File,
    mut visit: impl FnMut(Record, &[u8]) -> Result<(), ObserveError>,
) -> Result<(), ObserveError> {
    let mut reader = BufReader::new(file);
    let mut bytes = Vec::new();
    let mut line = 0;
    loop {
        bytes.clear();
        if reader.read_until(b'\n', &mut bytes).map_err(ObserveError::io("read", path))? == 0 {
            return Ok(());
        }
        line += 1;
        let text = bytes.trim_ascii();
        if text.is_empty() {
            continue;
        }
        match serde_json::from_slice(text) {
            Ok(record) => visit(record, text)?,
            Err(source) => {
                let last = reader.fill_buf().map_err(ObserveError::io("read", path))?.is_empty();
                if last && serde_json::from_slice::<serde::de::IgnoredAny>(text).is_err() {
                    return Ok(());
                }
                return Err(ObserveError::BadRecord { path: path.to_path_buf(), line, source });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TempDir, pass, train};
    use super::super::{EvalRecord, EventKind, EventRecord};
    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        read(path).unwrap().iter().map(Record::step).collect()
    }

    #[test]
    fn append_is_seen_at_once_and_a_new_run_does_not_overwrite() {
        let dir = TempDir::new();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        for step in 1..=3 {
            writer.append(train(step, 4.0)).unwrap();
            assert_eq!(steps(&path).len() as u64, step);
        }
        writer.append(EvalRecord::new(&pass(), 3, 3.5, 100, None).unwrap()).unwrap();
        writer.append(EventRecord::new(3, EventKind::Checkpoint, "step-3")).unwrap();
        writer.sync().unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 3, 3]);
        let text = MetricsWriter::create(&path).unwrap_err().to_string();
        assert!(text.contains("metrics.jsonl already exists") && text.contains("--resume"), "{text}");
    }

    #[test]
    fn killed_and_resumed_run_leaves_one_curve() {
        let dir = TempDir::new();
        let path = dir.path().join("metrics.jsonl");
        let mut whole = Vec::new();
        let mut writer = MetricsWriter::create(&path).unwrap();
        for step in 1..=20 {
            writer.append(train(step, 5.0 - step as f64 / 10.0)).unwrap();
            if step == 10 {
                writer.append(EventRecord::new(10, EventKind::Checkpoint, "step-10")).unwrap();
            }
        }
        whole.extend(read(&path).unwrap());
        drop(writer);
        // Killed inside the line of step 17: its checkpoint is at step 10.
        let bytes = std::fs::read(&path).unwrap();
        let cut = bytes.len() - bytes.len() / 20 * 3 - 5;
        std::fs::write(&path, &bytes[..cut]).unwrap();
        let seen = steps(&path);
        assert!(seen.len() > 12 && seen.len() < 20, "{seen:?}");

        let mut writer = MetricsWriter::resume(&path, 10).unwrap();
        assert_eq!(writer.dropped_records(), seen.len() as u64 - 11);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]);
        for step in 11..=20 {
            writer.append(train(step, 5.0 - step as f64 / 10.0)).unwrap();
        }
        assert_eq!(read(&path).unwrap(), whole);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn torn_last_line_is_dropped_wherever_it_was_cut() {
        let dir = TempDir::new();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.append(train(1, 4.0)).unwrap();
        let keep = std::fs::read(&path).unwrap();
        writer.append(EventRecord::new(1, EventKind::Warning, "\u{995}\u{9be}\u{99f}")).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for cut in keep.len()..bytes.len() - 1 {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            MetricsWriter::resume(&path, 5).unwrap();
            let left = std::fs::read(&path).unwrap();
            assert!(left == keep || (cut == bytes.len() - 1 && left == bytes), "cut at {cut}");
        }
        // Only the end of the line is missing: the record is whole and is kept.
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        MetricsWriter::resume(&path, 5).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        // A power cut can leave zeros.
        std::fs::write(&path, [&keep[..], &[0; 100]].concat()).unwrap();
        MetricsWriter::resume(&path, 5).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), keep);
    }

    #[test]
    fn bad_line_in_the_middle_is_an_error_and_nothing_changes() {
        let dir = TempDir::new();
        let path = dir.path().join("metrics.jsonl");
        let good = serde_json::to_string(&Record::from(train(1, 4.0))).unwrap();
        for bad in ["{\"kind\":\"tra", "{\"kind\":\"unknown\",\"step\":1}"] {
            let text = format!("{good}\n{bad}\n{good}\n");
            std::fs::write(&path, &text).unwrap();
            let error = MetricsWriter::resume(&path, 1).unwrap_err().to_string();
            assert!(error.contains("metrics.jsonl line 2 is not a record"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        // A last line that is JSON was not torn: it is not dropped silently.
        std::fs::write(&path, format!("{good}\n{{\"kind\":\"unknown\",\"step\":1}}\n")).unwrap();
        assert!(matches!(read(&path), Err(ObserveError::BadRecord { line: 2, .. })));
    }

    #[test]
    fn resume_creates_a_missing_file_and_keeps_unknown_keys() {
        let dir = TempDir::new();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::resume(&path, 7).unwrap();
        assert!(read(&path).unwrap().is_empty());
        let line =
            "{\"kind\":\"eval\",\"step\":1,\"loss\":3.0,\"perplexity\":20.0,\"tokens\":9,\"later\":true}\n";
        std::fs::write(&path, line).unwrap();
        MetricsWriter::resume(&path, 7).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), line);
        let missing = dir.path().join("no/such/metrics.jsonl");
        let error = MetricsWriter::create(&missing).unwrap_err().to_string();
        assert!(error.contains("no/such/metrics.jsonl") && error.contains("does not exist"), "{error}");
    }
}
