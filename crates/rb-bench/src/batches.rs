//! The batches that steps take in turn: random ids, or a file's.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rb_data::{Batch, TokenData};
use rb_tensor::Rng;
use rb_train::{Result, TrainError};

use crate::args::{Args, TokenKind};

/// Batches and where they come from.
pub struct Batches {
    /// At least one.
    pub all: Vec<Batch>,
    /// For people.
    pub origin: String,
}

/// The batches for a command line.
///
/// # Errors
/// A file that cannot be read, is too short for one batch or has ids outside the vocabulary.
pub fn make(args: &Args) -> Result<Batches> {
    let tokens = args.step_tokens();
    match &args.tokens {
        None => {
            let count = args.batches.unwrap_or(if args.gpu { 4 } else { 1 });
            let mut rng = Rng::new(1).fork("bench batch");
            let ids: Vec<i32> = (0..=count * tokens).map(|_| rng.below(args.vocab as u64) as i32).collect();
            Ok(Batches { all: cut(args, &ids, count), origin: "random ids".into() })
        }
        Some(path) => {
            let most = args.batches.unwrap_or(args.all_steps());
            let ids = read(path, args.tokens_as, most.saturating_mul(tokens).saturating_add(1))?;
            if let Some(at) = ids.iter().position(|&id| id as usize >= args.vocab) {
                return Err(unusable(
                    path,
                    format!("token {at} is {}, --vocab {} is too small for it", ids[at], args.vocab),
                ));
            }
            let count = ids.len().saturating_sub(1) / tokens;
            if count == 0 {
                let reason = format!("{} tokens; one step needs {}", ids.len(), tokens + 1);
                return Err(unusable(path, reason));
            }
            // Every id is below the vocabulary, which a model limits to i32.
            let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
            Ok(Batches { all: cut(args, &ids, count), origin: path.display().to_string() })
        }
    }
}

/// `count` batches of consecutive rows; each label is the id that follows.
fn cut(args: &Args, ids: &[i32], count: usize) -> Vec<Batch> {
    let n = args.step_tokens();
    let batch = |start: usize| Batch {
        batch_size: args.batch_size,
        seq_len: args.seq_len,
        input_ids: ids[start..start + n].to_vec(),
        labels: ids[start + 1..=start + n].to_vec(),
        position_ids: (0..n).map(|i| (i % args.seq_len) as i32).collect(),
        doc_start: vec![0; n],
        valid_tokens: n,
        dropped_targets: 0,
        epoch: 0,
    };
    (0..count).map(|i| batch(i * n)).collect()
}

/// At most `limit` ids from the beginning of a file.
fn read(path: &Path, kind: Option<TokenKind>, limit: usize) -> Result<Vec<u32>> {
    let failed = |error: std::io::Error| unusable(path, error.to_string());
    let mut file = File::open(path).map_err(failed)?;
    let mut start = Vec::new();
    file.by_ref().take(8).read_to_end(&mut start).map_err(failed)?;
    if kind.is_none() && start == b"RBTOKENS" {
        let data = TokenData::open(path)?;
        let mut ids = vec![0; limit.min(usize::try_from(data.len()).unwrap_or(usize::MAX))];
        let copied = data.copy_to(0, &mut ids);
        ids.truncate(copied);
        return Ok(ids.into_iter().map(|id| id as u32).collect());
    }
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let kind = kind.unwrap_or(match extension {
        "u16" | "bin" => TokenKind::U16,
        "u32" => TokenKind::U32,
        _ => TokenKind::Bytes,
    });
    let width = match kind {
        TokenKind::U16 => 2,
        TokenKind::U32 => 4,
        TokenKind::Bytes => 1,
    };
    let mut bytes = start;
    let rest = limit.saturating_mul(width).saturating_sub(bytes.len());
    file.take(rest as u64).read_to_end(&mut bytes).map_err(failed)?;
    if !bytes.len().is_multiple_of(width) {
        return Err(unusable(path, format!("{} bytes are no whole number of {width}-byte ids", bytes.len())));
    }
    let little_endian = |id: &[u8]| id.iter().rev().fold(0, |value, &byte| (value << 8) | u32::from(byte));
    Ok(bytes.chunks_exact(width).take(limit).map(little_endian).collect())
}

fn unusable(path: &Path, reason: String) -> TrainError {
    TrainError::Config { origin: format!("--tokens {}", path.display()), reason }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn args(path: Option<&Path>, more: &[&str]) -> Args {
        let mut line = vec!["bench", "--seq-len", "3", "--batch-size", "2", "--vocab", "300"];
        line.extend(path.iter().flat_map(|p| ["--tokens", p.to_str().unwrap()]));
        line.extend(more);
        Args::try_parse_from(line).unwrap()
    }

    #[test]
    fn each_label_is_the_next_id() {
        for more in [&["--batches", "3"][..], &[]] {
            let batches = make(&args(None, more)).unwrap().all;
            assert_eq!(batches.len(), if more.is_empty() { 1 } else { 3 });
            for batch in &batches {
                assert_eq!(batch.input_ids[1..], batch.labels[..5]);
                assert_eq!(batch.position_ids, [0, 1, 2, 0, 1, 2]);
                assert!(batch.input_ids.iter().all(|id| (0..300).contains(id)));
            }
        }
    }

    #[test]
    fn files_of_three_kinds() {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<u32> = (0..20).map(|i| i * 15).collect();
        let file = |name: &str, bytes: Vec<u8>| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let two = file("a.u16", ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect());
        let four = file("a.u32", ids.iter().flat_map(|id| id.to_le_bytes()).collect());
        for path in [&two, &four] {
            let batches = make(&args(Some(path), &[])).unwrap().all;
            assert_eq!(batches.len(), 3, "19 targets make three batches of six");
            assert_eq!(batches[2].labels, [195, 210, 225, 240, 255, 270]);
        }
        assert_eq!(make(&args(Some(&two), &["--batches", "1"])).unwrap().all.len(), 1);
        let text = file("a.txt", b"abcdefg and more".to_vec());
        let batches = make(&args(Some(&text), &[])).unwrap().all;
        assert_eq!((batches.len(), &batches[0].labels[..2]), (2, &[98, 99][..]));

        let message = |path: &Path, more: &[&str]| make(&args(Some(path), more)).err().unwrap().to_string();
        assert!(message(&file("b.txt", b"abcdef".to_vec()), &[]).ends_with("6 tokens; one step needs 7"));
        assert!(message(&file("c.u16", vec![1; 15]), &[]).contains("no whole number of 2-byte ids"));
        assert!(message(&four, &["--vocab", "200"]).contains("token 14 is 210"));
        assert!(message(&dir.path().join("none"), &[]).contains("none"));
    }
}
