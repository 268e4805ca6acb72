use std::fs;

use super::*;
use crate::split::{SplitConfig, SplitPlan};
use crate::{Tokenizer, TokenizerConfig};

fn tokenizer() -> Tokenizer {
    let config = TokenizerConfig { vocab_size: 280, ..TokenizerConfig::default() };
    Tokenizer::train(["the cat sat on the mat the end"].iter().map(Ok), &config).unwrap().0
}

const TEXTS: [&str; 4] = ["the cat", "\u{1F600} \0", "x", "the mat \u{995}\u{9BE}"];

fn ok(texts: &[&'static str]) -> impl Iterator<Item = Result<&'static str>> {
    texts.iter().copied().map(Ok)
}

/// A folder with a token file of `TEXTS`.
fn sample() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.rbt");
    build(ok(&TEXTS), &tokenizer(), &path).unwrap();
    (dir, path)
}

fn refusal(path: &Path, change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    let bad = path.with_file_name("bad.rbt");
    fs::write(&bad, bytes).unwrap();
    TokenData::open(&bad).unwrap_err().to_string()
}

#[test]
fn round_trip() {
    let (_dir, path) = sample();
    let t = tokenizer();
    let data = TokenData::open(&path).unwrap();
    data.verify_checksum().unwrap();
    data.check_tokenizer(&t).unwrap();
    assert_eq!(
        (data.num_documents(), data.eos_id(), data.vocab_size()),
        (4, t.eos_id(), t.vocab_size() as u32)
    );
    let mut at = 0;
    for (d, text) in TEXTS.iter().enumerate() {
        assert_eq!(data.document_start(d as u64), Some(at));
        let ids: Vec<u32> = t.encode(text).unwrap();
        for id in ids.into_iter().chain([t.eos_id()]) {
            assert_eq!(data.get(at), Some(id));
            assert_eq!(data.document_of(at), d as u64);
            at += 1;
        }
    }
    assert_eq!((data.len(), data.get(at), data.document_start(4)), (at, None, None));
    assert_eq!(data.text_bytes(), TEXTS.iter().map(|x| x.len() as u64).sum::<u64>());
    assert_eq!(data.text_chars(), TEXTS.iter().map(|x| x.chars().count() as u64).sum::<u64>());
    let mut copy = vec![-1; at as usize + 3];
    assert_eq!(data.copy_to(2, &mut copy), at as usize - 2);
    assert_eq!(copy[0], data.get(2).unwrap() as i32);
    assert_eq!(&copy[at as usize - 2..], [-1; 5]);
    assert_eq!(data.copy_to(at, &mut copy), 0);
    assert_eq!(data.copy_to(u64::MAX, &mut copy), 0);
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let (_dir, path) = sample();
    let other = path.with_file_name("again.rbt");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    pool.install(|| build(ok(&TEXTS), &tokenizer(), &other)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(&other).unwrap());
}

#[test]
fn wide_tokens() {
    // Four bytes a token from 65,537 entries on; written by hand, as training so large a vocabulary is slow.
    for (vocab_size, width) in [(65_536u32, 2u32), (65_537, 4), (70_000, 4)] {
        let tokens = [0u32, 1, vocab_size - 1, 0];
        let mut payload = Vec::new();
        tokens.iter().for_each(|t| payload.extend_from_slice(&t.to_le_bytes()[..width as usize]));
        payload.extend_from_slice(&0u64.to_le_bytes());
        payload.extend_from_slice(&1u64.to_le_bytes());
        let header = Header {
            width: Header::width_for(vocab_size),
            tokens: 4,
            documents: 2,
            vocab_size,
            payload_sha256: Sha256::digest(&payload).into(),
            ..Header::default()
        };
        assert_eq!(header.width, width);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.rbt");
        fs::write(&path, [&header.to_bytes()[..], &payload].concat()).unwrap();
        let data = TokenData::open(&path).unwrap();
        data.verify_checksum().unwrap();
        assert_eq!((0..4).map(|i| data.get(i).unwrap()).collect::<Vec<_>>(), tokens);
        let mut copy = [0; 4];
        assert_eq!(data.copy_to(0, &mut copy), 4);
        assert_eq!(copy.map(|t| t as u32), tokens);
    }
}

#[test]
fn every_truncation_is_refused() {
    let (_dir, path) = sample();
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        let e = refusal(&path, |b| b.truncate(length));
        let expected = if length < HEADER_BYTES { HEADER_BYTES } else { bytes.len() };
        assert!(e.contains("bad.rbt: truncated"), "{length}: {e}");
        assert!(e.contains(&format!("expected {expected} bytes, found {length};")), "{length}: {e}");
    }
    assert!(refusal(&path, |b| b.push(0)).contains("too long"));
}

#[test]
fn every_flipped_byte_is_noticed() {
    let (_dir, path) = sample();
    let bytes = fs::read(&path).unwrap();
    let t = tokenizer();
    let bad = path.with_file_name("bad.rbt");
    // The two counts of text and the unused bytes are not covered by a checksum.
    for at in (0..104).chain(HEADER_BYTES..bytes.len()) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x41;
        fs::write(&bad, &damaged).unwrap();
        let noticed = TokenData::open(&bad).and_then(|data| {
            data.verify_checksum()?;
            data.check_tokenizer(&t)?;
            // A changed end id or vocabulary size that still fits the file is a mismatch with the tokenizer.
            let same = data.eos_id() == t.eos_id() && data.vocab_size() as usize == t.vocab_size();
            if same { Ok(()) } else { Err(DataError::NoPaths) }
        });
        assert!(noticed.is_err(), "byte {at}");
    }
}

#[test]
fn damage_is_named() {
    let (_dir, path) = sample();
    let e = refusal(&path, |b| b[..8].copy_from_slice(b"PK\x03\x04zipp"));
    assert!(e.contains("bad.rbt: not a RustingBrain token file") && e.contains("PK"), "{e}");
    let e = refusal(&path, |b| b[8] = 9);
    assert!(e.contains("token file version 9, expected 1"), "{e}");
    let e = refusal(&path, |b| b[12] = 4);
    assert!(e.contains("byte 12: bytes per token is 4, expected 2 for a vocabulary of 2"), "{e}");
    let e = refusal(&path, |b| b[16..32].fill(0xFF));
    assert!(e.contains("byte 16: number of tokens is 18446744073709551615"), "{e}");
    let e = refusal(&path, |b| b[36..40].copy_from_slice(&999u32.to_le_bytes()));
    assert!(e.contains("byte 36: eos_id is 999"), "{e}");
    let e = TokenData::open(path.with_file_name("none.rbt")).unwrap_err().to_string();
    assert!(e.contains("none.rbt does not exist"), "{e}");

    let index = TokenData::open(&path).unwrap().header.index_offset() as usize;
    let e = refusal(&path, |b| b[index] = 1);
    assert!(
        e.contains(&format!("byte {index}: document start is 1, expected 0 (the first document)")),
        "{e}"
    );
    let e = refusal(&path, |b| b[index + 8] = 0);
    assert!(e.contains("document start is 0, expected more than 0"), "{e}");
    let e = refusal(&path, |b| b[index + 8] += 1);
    assert!(e.contains("expected a position after an end-of-document token"), "{e}");
    let e = refusal(&path, |b| b[index + 24..index + 32].fill(0xFF));
    assert!(e.contains("expected less than the"), "{e}");

    let bad = path.with_file_name("bad.rbt");
    let mut bytes = fs::read(&path).unwrap();
    bytes[HEADER_BYTES] ^= 1;
    fs::write(&bad, bytes).unwrap();
    let e = TokenData::open(&bad).unwrap().verify_checksum().unwrap_err().to_string();
    assert!(e.contains("bad.rbt: sha256 is ") && e.contains("the file is damaged"), "{e}");
}

#[test]
fn ids_outside_the_vocabulary_are_located() {
    let (_dir, path) = sample();
    let vocab_size = tokenizer().vocab_size();
    for id in [vocab_size as u16, 65_535] {
        let e = refusal(&path, |b| b[HEADER_BYTES + 6..HEADER_BYTES + 8].copy_from_slice(&id.to_le_bytes()));
        assert!(
            e.ends_with(&format!(
                "bad.rbt: byte 134: token 3 has id {id}, expected an id below the vocabulary size {vocab_size}"
            )),
            "{e}"
        );
    }
    // -1 as a label of another tool is the largest unsigned number.
    let e = TokenData::from_documents(&[vec![1, u32::MAX]], 10, 0).unwrap_err().to_string();
    assert!(e.contains("<memory>") && e.contains("token 1 has id 4294967295"), "{e}");
    assert!(TokenData::from_documents(&[vec![1]], 10, 10).is_err());

    let mut writer = TokenFileWriter::create(path.with_file_name("w.rbt"), &tokenizer()).unwrap();
    let e = writer.push("x", &[1, vocab_size as u32]).unwrap_err().to_string();
    assert!(e.contains("w.rbt: byte 130: token 1 has id"), "{e}");
}

#[test]
fn failure_leaves_the_old_file() {
    let (dir, path) = sample();
    let before = fs::read(&path).unwrap();
    let failing = [Ok("a"), Err(DataError::NoPaths)].into_iter();
    assert!(matches!(build(failing, &tokenizer(), &path), Err(DataError::NoPaths)));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn replacing_an_open_file_keeps_the_old_content() {
    let (_dir, path) = sample();
    let data = TokenData::open(&path).unwrap();
    let first = data.get(0);
    build(ok(&["other"]), &tokenizer(), &path).unwrap();
    assert_eq!((data.get(0), data.num_documents()), (first, 4));
    assert_eq!(TokenData::open(&path).unwrap().num_documents(), 1);
}

#[test]
fn another_tokenizer_is_refused() {
    let (_dir, path) = sample();
    let config = TokenizerConfig { vocab_size: 280, ..TokenizerConfig::default() };
    let other = Tokenizer::train(["other words"].iter().map(Ok), &config).unwrap().0;
    let e = TokenData::open(&path).unwrap().check_tokenizer(&other).unwrap_err().to_string();
    assert!(e.contains("train.rbt: built with another tokenizer"), "{e}");
}

#[test]
fn no_documents_make_a_file_without_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.rbt");
    let report = build(ok(&[]), &tokenizer(), &path).unwrap();
    assert_eq!((report.documents, report.tokens), (0, 0));
    assert!(TokenData::open(&path).unwrap().is_empty());
}

#[test]
fn both_sides_in_one_pass() {
    let dir = tempfile::tempdir().unwrap();
    let (train, val) = (dir.path().join("train.rbt"), dir.path().join("val.rbt"));
    let t = tokenizer();
    for count in [3, 60] {
        let texts: Vec<String> =
            (0..count).map(|i| format!("the cat sat on the mat number {i}\nthe end {i}\n")).collect();
        let plan = SplitPlan::new(texts.iter().map(Ok), SplitConfig { val_fraction: 0.2 }).unwrap();
        let (a, b) = build_split(texts.iter().map(Ok), &t, &plan, &train, &val).unwrap();
        let b = b.unwrap();
        assert_eq!((a.documents, b.documents), (plan.train_documents, plan.val_documents));
        assert_eq!((a.text_bytes, b.text_bytes), (plan.train_bytes, plan.val_bytes));
        assert_eq!(a.text_bytes + b.text_bytes, texts.iter().map(|x| x.len() as u64).sum::<u64>());
        assert_eq!(TokenData::open(&train).unwrap().sha256(), a.sha256);
    }
    let plan = SplitPlan::new(["x"].iter().map(Ok), SplitConfig { val_fraction: 0.1 }).unwrap();
    let none = dir.path().join("none.rbt");
    let (_, val) = build_split(["x"].iter().map(Ok), &t, &plan, &train, &none).unwrap();
    assert!(val.is_none() && !none.exists());
    // An older validation file must not pass for the new one.
    std::fs::copy(&train, &none).unwrap();
    assert!(build_split(["x"].iter().map(Ok), &t, &plan, &train, &none).unwrap().1.is_none());
    assert!(!none.exists());
    let e = build_split(["x"].iter().map(Ok), &t, &plan, &train, &train).unwrap_err().to_string();
    assert!(e.contains("val_path is") && e.contains("another file than train_path"), "{e}");
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_refused_or_read(mut bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.rbt");
        if bytes.len() > 12 {
            bytes[..8].copy_from_slice(header::MAGIC);
            bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
        }
        fs::write(&path, &bytes).unwrap();
        proptest::prop_assert!(TokenData::open(&path).is_err());
    }
}
