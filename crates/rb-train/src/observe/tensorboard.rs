//! TensorBoard event files.
//!
//! - **File** `<run>/tensorboard/events.out.tfevents.<unix seconds>.<host>.<pid>`, a sequence of framed events.
//! - **Frame** length `u64`, masked CRC-32C of the length, payload, masked CRC-32C of the payload; little endian.
//! - **Payload** one protocol buffer `tensorflow.Event`, encoded here by hand: five fields do not need a library.
//! - **Resume** starts another file, whose `SessionLog` event `START` tells TensorBoard to forget the steps at or
//!   after the first one that is done again.
//! - **Source** `tensorflow/core/util/event.proto`, `tensorflow/core/lib/io/record_writer.h`.

use super::file::AppendFile;
use super::{EvalRecord, Finite, ObserveError, TrainRecord, now_unix_ms};
use std::path::{Path, PathBuf};

/// Appends scalars to an event file.
#[derive(Debug)]
pub struct TensorBoardWriter {
    file: AppendFile,
}

impl TensorBoardWriter {
    /// Creates an event file for a new run, in `<run_dir>/tensorboard/`.
    ///
    /// # Errors
    /// [`ObserveError::Io`].
    pub fn create(run_dir: &Path) -> Result<Self, ObserveError> {
        let folder = run_dir.join("tensorboard");
        std::fs::create_dir_all(&folder).map_err(ObserveError::io("create the folder", &folder))?;
        let mut writer = Self { file: create_event_file(&folder)? };
        let mut event = Event::new(now_unix_ms(), 0);
        event.file_version();
        writer.append(&event)?;
        Ok(writer)
    }

    /// Creates an event file for a run resumed from a checkpoint at `step`; later steps of older files vanish.
    ///
    /// # Errors
    /// [`ObserveError::Io`].
    pub fn resume(run_dir: &Path, step: u64) -> Result<Self, ObserveError> {
        let mut writer = Self::create(run_dir)?;
        let mut event = Event::new(now_unix_ms(), step.saturating_add(1));
        event.session_start();
        writer.append(&event)?;
        Ok(writer)
    }

    /// Returns the path of the event file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the scalars `train/*` of a step.
    ///
    /// # Errors
    /// [`ObserveError::Io`]; the file then ends with the event before.
    pub fn train(&mut self, record: &TrainRecord) -> Result<(), ObserveError> {
        let mut scalars = vec![
            ("train/loss", record.loss.get()),
            ("train/lr", record.lr.get()),
            ("train/grad_norm", record.grad_norm.get()),
        ];
        let speeds = [
            ("train/tokens_per_s", record.tokens_per_s),
            ("train/step_ms", record.step_ms),
            ("train/flops_per_s", record.flops_per_s),
        ];
        scalars.extend(speeds.into_iter().filter_map(|(name, figure)| Some((name, figure?.get()))));
        scalars.push(("train/tokens", record.tokens as f64));
        scalars.push(("train/epoch", record.epoch as f64));
        if let Some(bytes) = record.mem_rss_bytes {
            scalars.push(("train/mem_rss_bytes", bytes as f64));
        }
        self.scalars(record.time_unix_ms, record.step, &scalars)
    }

    /// Writes the scalars `eval/*` of an evaluation.
    ///
    /// # Errors
    /// [`ObserveError::Io`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<(), ObserveError> {
        let mut scalars =
            vec![("eval/loss", record.loss.get()), ("eval/perplexity", record.perplexity.get())];
        if let Some(bits) = record.bits_per_byte {
            scalars.push(("eval/bits_per_byte", bits.get()));
        }
        self.scalars(now_unix_ms(), record.step, &scalars)
    }

    /// Writes one scalar under a tag of the caller's choice.
    ///
    /// # Errors
    /// [`ObserveError::Io`].
    pub fn scalar(&mut self, step: u64, tag: &str, value: Finite) -> Result<(), ObserveError> {
        self.scalars(now_unix_ms(), step, &[(tag, value.get())])
    }

    fn scalars(&mut self, time_unix_ms: u64, step: u64, scalars: &[(&str, f64)]) -> Result<(), ObserveError> {
        let mut event = Event::new(time_unix_ms, step);
        event.summary(scalars);
        self.append(&event)
    }

    fn append(&mut self, event: &Event) -> Result<(), ObserveError> {
        self.file.append(&frame(&event.0))
    }
}

/// Creates the file that TensorBoard reads after all others in `folder`: it goes through them by name.
///
/// Its seconds are those of the clock, or later ones if a file with these is there already: a run resumed
/// within the second, or after the clock was set back.
fn create_event_file(folder: &Path) -> Result<AppendFile, ObserveError> {
    let mut seconds = now_unix_ms() / 1000;
    let entries = std::fs::read_dir(folder).map_err(ObserveError::io("list", folder))?;
    for entry in entries {
        let entry = entry.map_err(ObserveError::io("list", folder))?;
        if let Some(taken) = event_file_seconds(&entry.file_name().to_string_lossy()) {
            seconds = seconds.max(taken.saturating_add(1));
        }
    }
    let name = format!("events.out.tfevents.{seconds}.{}.{}", host_name(), std::process::id());
    AppendFile::create_new(&folder.join(name))
}

fn event_file_seconds(name: &str) -> Option<u64> {
    name.strip_prefix("events.out.tfevents.")?.split('.').next()?.parse().ok()
}

/// The name of this machine, in characters that suit a file name.
fn host_name() -> String {
    let path = PathBuf::from("/proc/sys/kernel/hostname");
    let name = std::fs::read_to_string(path).unwrap_or_default();
    let name: String = name
        .trim()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .take(64)
        .collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(payload.len() + 16);
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(&masked_crc(payload).to_le_bytes());
    out
}

/// The CRC of bytes that hold CRCs themselves is a poor check, so TFRecord rotates it and adds a constant.
fn masked_crc(bytes: &[u8]) -> u32 {
    const MASK_DELTA: u32 = 0xa282_ead8; // tensorflow/core/lib/hash/crc32c.h
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// The bytes of a `tensorflow.Event`.
struct Event(Vec<u8>);

/// Protocol buffer wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

impl Event {
    fn new(time_unix_ms: u64, step: u64) -> Self {
        let mut out = Vec::with_capacity(256);
        key(&mut out, 1, FIXED64); // Event.wall_time: double, seconds
        out.extend_from_slice(&(time_unix_ms as f64 / 1000.0).to_le_bytes());
        key(&mut out, 2, VARINT); // Event.step: int64
        varint(&mut out, step.min(i64::MAX as u64));
        Self(out)
    }

    fn file_version(&mut self) {
        bytes(&mut self.0, 3, b"brain.Event:2"); // Event.file_version
    }

    fn session_start(&mut self) {
        let mut log = Vec::new();
        key(&mut log, 1, VARINT); // SessionLog.status
        varint(&mut log, 1); // SessionLog.START
        bytes(&mut self.0, 7, &log); // Event.session_log
    }

    fn summary(&mut self, scalars: &[(&str, f64)]) {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut entry = Vec::new();
            bytes(&mut entry, 1, tag.as_bytes()); // Summary.Value.tag
            key(&mut entry, 2, FIXED32); // Summary.Value.simple_value: float
            // A finite number beyond f32 must not become an infinity.
            let value = value.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
            entry.extend_from_slice(&value.to_le_bytes());
            bytes(&mut summary, 1, &entry); // Summary.value
        }
        bytes(&mut self.0, 5, &summary); // Event.summary
    }
}

fn key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    varint(out, field << 3 | wire_type);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(out, field, BYTES);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TempDir, finite, pass, train};
    use super::*;

    /// CRC-32C bit by bit: shares nothing with the `crc32c` crate.
    fn slow_crc(bytes: &[u8]) -> u32 {
        let mut crc = !0_u32;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            }
        }
        !crc
    }

    fn slow_mask(bytes: &[u8]) -> u32 {
        let crc = slow_crc(bytes);
        crc.rotate_right(15).wrapping_add(0xa282_ead8)
    }

    /// Splits a file into payloads, checking both sums of each frame.
    fn payloads(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !file.is_empty() {
            let (length, rest) = file.split_at(8);
            let (length_crc, rest) = rest.split_at(4);
            assert_eq!(u32::from_le_bytes(length_crc.try_into().unwrap()), slow_mask(length));
            let (payload, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (payload_crc, rest) = rest.split_at(4);
            assert_eq!(u32::from_le_bytes(payload_crc.try_into().unwrap()), slow_mask(payload));
            out.push(payload.to_vec());
            file = rest;
        }
        out
    }

    #[derive(Debug, PartialEq)]
    enum Value {
        Number(u64),
        Eight([u8; 8]),
        Bytes(Vec<u8>),
        Four([u8; 4]),
    }

    /// Decodes one message into its fields.
    fn fields(mut message: &[u8]) -> Vec<(u64, Value)> {
        fn number(message: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..64).step_by(7) {
                let byte = message[0];
                *message = &message[1..];
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    return value;
                }
            }
            panic!("varint is too long")
        }
        let mut out = Vec::new();
        while !message.is_empty() {
            let key = number(&mut message);
            let value = match key & 7 {
                0 => Value::Number(number(&mut message)),
                kind => {
                    let length = match kind {
                        1 => 8,
                        2 => number(&mut message) as usize,
                        5 => 4,
                        other => panic!("wire type {other}"),
                    };
                    let (head, rest) = message.split_at(length);
                    message = rest;
                    match kind {
                        1 => Value::Eight(head.try_into().unwrap()),
                        2 => Value::Bytes(head.to_vec()),
                        _ => Value::Four(head.try_into().unwrap()),
                    }
                }
            };
            out.push((key >> 3, value));
        }
        out
    }

    fn scalars(payload: &[u8]) -> Vec<(String, f32)> {
        let event = fields(payload);
        let (5, Value::Bytes(summary)) = &event[2] else { panic!("{event:?}") };
        fields(summary)
            .iter()
            .map(|(field, value)| {
                let (1, Value::Bytes(entry)) = (field, value) else { panic!("{value:?}") };
                let entry = fields(entry);
                let [(1, Value::Bytes(tag)), (2, Value::Four(number))] = &entry[..] else {
                    panic!("{entry:?}")
                };
                (String::from_utf8(tag.clone()).unwrap(), f32::from_le_bytes(*number))
            })
            .collect()
    }

    #[test]
    fn crc_of_known_bytes() {
        // RFC 3720, appendix B.4.
        assert_eq!(slow_crc(&[0; 32]), 0x8a91_36aa);
        assert_eq!(slow_crc(b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc(b"123456789"), slow_mask(b"123456789"));
    }

    #[test]
    fn events_decode_independently() {
        let dir = TempDir::new();
        let mut writer = TensorBoardWriter::create(dir.path()).unwrap();
        writer.train(&train(300, 3.25)).unwrap();
        writer.eval(&EvalRecord::new(&pass(), 300, 2.0, 100, Some(400)).unwrap()).unwrap();
        writer.scalar(u64::MAX, "a/b", finite(1e300)).unwrap();
        let events = payloads(&std::fs::read(writer.path()).unwrap());
        assert_eq!(events.len(), 4);

        let first = fields(&events[0]);
        assert_eq!(first[1..], [(2, Value::Number(0)), (3, Value::Bytes(b"brain.Event:2".to_vec()))]);
        let step = fields(&events[1]);
        assert_eq!(step[0], (1, Value::Eight(1_700_000_300.0_f64.to_le_bytes())));
        assert_eq!(step[1], (2, Value::Number(300)));
        let values = scalars(&events[1]);
        assert_eq!(values[0], ("train/loss".to_owned(), 3.25));
        assert_eq!(values[3], ("train/tokens_per_s".to_owned(), 12_345.0));
        assert_eq!(values.len(), 9);
        assert_eq!(scalars(&events[2])[2].0, "eval/bits_per_byte");
        assert_eq!(fields(&events[3])[1], (2, Value::Number(i64::MAX as u64)));
        assert_eq!(scalars(&events[3]), [("a/b".to_owned(), f32::MAX)]);
    }

    #[test]
    fn resume_starts_a_later_file_that_purges() {
        let dir = TempDir::new();
        let first = TensorBoardWriter::create(dir.path()).unwrap();
        let second = TensorBoardWriter::resume(dir.path(), 300).unwrap();
        let third = TensorBoardWriter::resume(dir.path(), 300).unwrap();
        assert!(first.path() < second.path() && second.path() < third.path());
        let events = payloads(&std::fs::read(second.path()).unwrap());
        let session = fields(&events[1]);
        // TensorBoard forgets steps from this one on: the checkpoint's own step stays.
        assert_eq!(session[1], (2, Value::Number(301)));
        let (7, Value::Bytes(log)) = &session[2] else { panic!("{session:?}") };
        assert_eq!(fields(log), [(1, Value::Number(1))]);
    }

    #[test]
    fn file_names() {
        assert_eq!(event_file_seconds("events.out.tfevents.1700000000.host.12"), Some(1_700_000_000));
        assert_eq!(event_file_seconds("events.out.tfevents.x.host.12"), None);
        assert_eq!(event_file_seconds("notes.txt"), None);
        assert!(!host_name().is_empty() && !host_name().contains(['/', '.']));
    }
}
