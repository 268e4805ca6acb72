use std::sync::Arc;

use super::*;
use crate::TokenizerConfig;
use crate::loader::{Loader, LoaderConfig};

fn tokenizer() -> Tokenizer {
    let config = TokenizerConfig { vocab_size: 300, ..TokenizerConfig::default() };
    let text =
        "the river and the boat of the people of the river \u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE} ".repeat(5);
    Tokenizer::train([text].iter().map(Ok), &config).unwrap().0
}

fn languages() -> Languages {
    let list = ["bn,script=Bengali,weight=1", "en,script=Latin,weight=3"];
    Languages::new(list.iter().map(|l| l.parse().unwrap()).collect()).unwrap()
}

fn document(text: &str) -> Item {
    let document =
        Document { text: text.into(), file: Path::new("a.txt").into(), line: 1, fields: Vec::new() };
    Item { document, ids: None }
}

/// Fifty documents of each language, of different lengths.
fn texts() -> Vec<String> {
    let bn = (0..50).map(|i| {
        format!(
            "\u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE} {}",
            "\u{995}\u{9BE} ".repeat(i % 7 + 1) + &i.to_string()
        )
    });
    let en = (0..50).map(|i| format!("the river {}", "of the boat ".repeat(i % 5 + 1) + &i.to_string()));
    bn.chain(en).collect()
}

fn run(texts: &[String], options: &PrepareOptions, out: &Path) -> Result<PreparedIndex> {
    let items = texts.iter().map(|t| Ok(document(t)));
    prepare(items, &tokenizer(), &languages(), options, out, &mut |_| Ok(()))
}

/// Documents of a stream, as text.
fn documents(prepared: &Prepared, data: &crate::TokenData) -> Vec<String> {
    let mut out = Vec::new();
    for document in 0..data.num_documents() {
        let start = data.document_start(document).unwrap();
        let end = data.document_start(document + 1).unwrap_or(data.len()) - 1;
        assert_eq!(data.get(end), Some(data.eos_id()));
        let ids: Vec<u32> = (start..end).map(|i| data.get(i).unwrap()).collect();
        out.push(prepared.tokenizer.decode(&ids).unwrap());
    }
    out
}

#[test]
fn every_text_is_on_one_side_once_and_in_many_files_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut given = texts();
    given.extend_from_slice(&texts()[..30]);
    let split = SplitConfig { val_fraction: 0.2 };
    let mut streams = Vec::new();
    for (name, shard_tokens) in [("one", 1 << 30), ("many", 100)] {
        let options = PrepareOptions { split, shard_tokens, ..PrepareOptions::default() };
        let out = dir.path().join(name);
        let index = run(&given, &options, &out).unwrap();
        assert_eq!((index.documents_read, index.duplicates), (130, 30));
        assert_eq!(index.held_out, "documents");
        let prepared = Prepared::open(&out).unwrap();
        prepared.verify_checksums().unwrap();
        assert_eq!(prepared.index, index);
        let validation = prepared.validation.as_ref().unwrap();
        let (train, held_out) = (documents(&prepared, &prepared.train), documents(&prepared, validation));
        assert!(held_out.iter().all(|t| crate::split::side_of(t, 0.2) == Side::Val));
        let mut all = [train.clone(), held_out.clone()].concat();
        all.sort();
        let mut expected = texts();
        expected.sort();
        assert_eq!(all, expected);
        // Counts by language are those of the streams.
        let sum =
            |side: fn(&LanguageCounts) -> Counts| {
                index.languages.iter().map(side).fold((0, 0, 0, 0), |s, c| {
                    (s.0 + c.documents, s.1 + c.bytes, s.2 + c.chars, s.3 + c.tokens)
                })
            };
        let of = |d: &crate::TokenData| (d.num_documents(), d.text_bytes(), d.text_chars(), d.len());
        assert_eq!(sum(|l| l.train), of(&prepared.train));
        assert_eq!(sum(|l| l.validation), of(validation));
        assert!(index.languages.len() == 2 && index.languages.iter().all(|l| l.repeats == 1.0));
        // Shuffled: neither the order of reading nor sorted by language.
        let in_order: Vec<String> = texts().into_iter().filter(|t| train.contains(t)).collect();
        assert_ne!(train, in_order);
        let coverage = {
            let mut loader =
                Loader::new(Arc::new(prepared.train), LoaderConfig { seq_len: 7, ..Default::default() })
                    .unwrap();
            loader.check().unwrap()
        };
        streams.push((train, held_out, coverage));
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            streams.len(),
            "nothing is left beside it"
        );
        let files = std::fs::read_dir(&out).unwrap().count();
        assert_eq!(files, index.shards.len() + 2, "and nothing in it but files, index and tokenizer");
    }
    assert!(streams[0] == streams[1], "the size of files changes nothing");
}

#[test]
fn threads_change_nothing_and_seeds_change_the_order_alone() {
    let dir = tempfile::tempdir().unwrap();
    let sums = |name: &str, seed| {
        let options = PrepareOptions { seed, ..PrepareOptions::default() };
        run(&texts(), &options, &dir.path().join(name)).unwrap().shards
    };
    let one = sums("a", 1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    assert_eq!(pool.install(|| sums("b", 1)), one);
    let other = sums("c", 2);
    assert_ne!(other[0].sha256, one[0].sha256);
    assert_eq!((other[0].counts, other.last()), (one[0].counts, one.last()));
}

#[test]
fn mixtures_reach_their_parts() {
    let dir = tempfile::tempdir().unwrap();
    for (name, unit, short) in [
        ("a", MixtureUnit::Bytes, Short::Repeat),
        ("b", MixtureUnit::Tokens, Short::Repeat),
        ("c", MixtureUnit::Tokens, Short::Drop),
    ] {
        let mixture = Some(Mixture { unit, short });
        let options =
            PrepareOptions { mixture, split: SplitConfig { val_fraction: 0.1 }, ..PrepareOptions::default() };
        let index = run(&texts(), &options, &dir.path().join(name)).unwrap();
        let [bn, en] = &index.languages[..] else { panic!("{index:?}") };
        let amount = |c: &Counts| match unit {
            MixtureUnit::Bytes => c.bytes as f64,
            MixtureUnit::Tokens => (c.tokens - c.documents) as f64,
        };
        let ratio = amount(&en.train) / amount(&bn.train);
        assert!((ratio - 3.0).abs() < 0.15, "{name}: English to Bangla {ratio}");
        match short {
            Short::Repeat => assert!(bn.repeats == 1.0 && en.repeats > 1.0, "{name}"),
            Short::Drop => assert!(en.repeats == 1.0 && bn.repeats < 1.0, "{name}"),
        }
        assert_eq!(index.mixture, mixture);
        // Validation has each text once, whatever the mixture.
        let held_out: Vec<u64> = index.languages.iter().map(|l| l.validation.documents).collect();
        let plain = run(
            &texts(),
            &PrepareOptions { mixture: None, ..options },
            &dir.path().join(format!("{name}-plain")),
        );
        let expected: Vec<u64> = plain.unwrap().languages.iter().map(|l| l.validation.documents).collect();
        assert_eq!(held_out, expected);
    }
}

#[test]
fn few_documents_lose_their_tails() {
    let dir = tempfile::tempdir().unwrap();
    let text = texts().concat();
    let index = run(std::slice::from_ref(&text), &PrepareOptions::default(), &dir.path().join("a")).unwrap();
    assert_eq!(index.held_out, "tails");
    let prepared = Prepared::open(dir.path().join("a")).unwrap();
    let parts =
        [&prepared.train, prepared.validation.as_ref().unwrap()].map(|d| documents(&prepared, d).concat());
    assert_eq!(parts.concat(), text);
    let none = PrepareOptions { split: SplitConfig { val_fraction: 0.0 }, ..PrepareOptions::default() };
    run(&[text], &none, &dir.path().join("b")).unwrap();
    assert!(Prepared::open(dir.path().join("b")).unwrap().validation.is_none());
}

#[test]
fn errors_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    let items = [Ok(document("x")), Err(DataError::NoPaths)].into_iter();
    let result =
        prepare(items, &tokenizer(), &languages(), &PrepareOptions::default(), &out, &mut |_| Ok(()));
    assert!(matches!(result, Err(DataError::NoPaths)));
    for writing in [false, true] {
        // Whoever is told of the progress may stop it, in the first pass and in the second.
        let progress = &mut |p: Progress| if p.writing == writing { Err(DataError::Stopped) } else { Ok(()) };
        let items = texts().into_iter().map(|text| Ok(document(&text)));
        let result = prepare(items, &tokenizer(), &languages(), &PrepareOptions::default(), &out, progress);
        assert!(matches!(result, Err(DataError::Stopped)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    let refused = |options: PrepareOptions| run(&texts(), &options, &out).unwrap_err().to_string();
    let e = refused(PrepareOptions { split: SplitConfig { val_fraction: 0.7 }, ..PrepareOptions::default() });
    assert!(e.contains("val_fraction is 0.7"), "{e}");
    let e = refused(PrepareOptions { shard_tokens: 0, ..PrepareOptions::default() });
    assert!(e.contains("shard_tokens is 0"), "{e}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    run(&texts(), &PrepareOptions::default(), &out).unwrap();
    let before = std::fs::read(out.join(INDEX_FILE)).unwrap();
    let e = refused(PrepareOptions { seed: 7, ..PrepareOptions::default() });
    assert!(e.contains("exists already: choose another folder"), "{e}");
    assert_eq!(std::fs::read(out.join(INDEX_FILE)).unwrap(), before);
}

#[test]
fn damaged_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    run(&texts(), &PrepareOptions { shard_tokens: 300, ..PrepareOptions::default() }, &out).unwrap();
    let refused = |part: &str| {
        let e = Prepared::open(&out).unwrap_err().to_string();
        assert!(e.contains(part), "no `{part}` in: {e}");
    };
    let index = std::fs::read_to_string(out.join(INDEX_FILE)).unwrap();
    for (text, part) in [
        (index[..index.len() / 2].to_owned(), "not an index of prepared data"),
        (index.replace("\"version\": 1", "\"version\": 9"), "prepare the folder again"),
        (index.replacen("train-00000.rbt", "train-00001.rbt", 1), "sha256 is"),
        (index.replacen("train-00000.rbt", "train-77777.rbt", 1), "train-77777.rbt does not exist"),
    ] {
        assert_ne!(text, index);
        std::fs::write(out.join(INDEX_FILE), text).unwrap();
        refused(part);
    }
    std::fs::write(out.join(INDEX_FILE), &index).unwrap();
    let shard = out.join("train-00000.rbt");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &whole[..whole.len() - 8]).unwrap();
    refused("truncated");
    let mut flipped = whole.clone();
    flipped[128] ^= 1; // The first id: another token, and no end of a document.
    std::fs::write(&shard, &flipped).unwrap();
    let damaged = Prepared::open(&out).unwrap().verify_checksums().unwrap_err().to_string();
    assert!(damaged.contains("sha256 is"), "{damaged}");
    std::fs::write(&shard, &whole).unwrap();
    let other =
        Tokenizer::train(["x"].iter().map(Ok), &TokenizerConfig { vocab_size: 257, ..Default::default() });
    other.unwrap().0.save(out.join("tokenizer.json")).unwrap();
    refused("tokenizer.json: built with another tokenizer");
}

/// Files of other programs, made here byte by byte.
mod imports {
    use super::*;

    fn u16s(ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect()
    }

    fn llm_c(magic: u32, version: u32, count: usize, ids: &[u8]) -> Vec<u8> {
        let mut header = vec![0u8; 1024];
        for (i, n) in [magic, version, count as u32].into_iter().enumerate() {
            header[4 * i..4 * i + 4].copy_from_slice(&n.to_le_bytes());
        }
        [&header[..], ids].concat()
    }

    fn megatron(lengths: &[u32], marks: &[u64]) -> Vec<u8> {
        let mut index = b"MMIDIDX\0\0".to_vec();
        index.extend(1u64.to_le_bytes());
        index.push(8);
        index.extend((lengths.len() as u64).to_le_bytes());
        index.extend((marks.len() as u64).to_le_bytes());
        lengths.iter().for_each(|n| index.extend(n.to_le_bytes()));
        let mut place = 0u64;
        for n in lengths {
            index.extend(place.to_le_bytes());
            place += u64::from(*n) * 2;
        }
        marks.iter().for_each(|n| index.extend(n.to_le_bytes()));
        index
    }

    #[test]
    fn all_formats_give_the_same_documents() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer();
        let texts = ["the river", "of the boat\n", "\u{9AC}\u{9BE}"];
        let ids: Vec<Vec<u32>> = texts.iter().map(|t| tokenizer.encode(t).unwrap()).collect();
        let eos = tokenizer.eos_id();
        // llm.c begins documents with the end token, nanoGPT ends them with it, Megatron counts them.
        let before: Vec<u32> = ids.iter().flat_map(|d| [&[eos], &d[..]].concat()).collect();
        let after: Vec<u32> = ids.iter().flat_map(|d| [&d[..], &[eos]].concat()).collect();
        let wide: Vec<u8> = before.iter().flat_map(|id| id.to_le_bytes()).collect();
        let write = |name: &str, bytes: Vec<u8>| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let narrow = write("a.bin", llm_c(20_240_520, 1, before.len(), &u16s(&before)));
        let wide = write("b.bin", llm_c(20_240_801, 7, before.len(), &wide));
        let nano = write("c.bin", u16s(&after));
        // The first document is two sequences.
        let lengths = [2, ids[0].len() as u32 - 2 + 1, ids[1].len() as u32 + 1, ids[2].len() as u32 + 1];
        write("d.idx", megatron(&lengths, &[0, 2, 3, 4]));
        let mega = write("d.bin", u16s(&after));
        for (path, format) in [(narrow, None), (wide, None), (nano, Some(BinFormat::NanoGpt)), (mega, None)] {
            let import = Import::open(&path, format).unwrap();
            let items: Vec<Item> = import.items(&tokenizer).collect::<Result<_>>().unwrap();
            let got: Vec<&str> = items.iter().map(|i| i.document.text.as_str()).collect();
            assert_eq!(got, texts, "{}", path.display());
            assert_eq!(items.iter().map(|i| i.ids.clone().unwrap()).collect::<Vec<_>>(), ids);
            let out = dir.path().join("out");
            let options = PrepareOptions {
                split: SplitConfig { val_fraction: 0.0 },
                shuffle: false,
                ..PrepareOptions::default()
            };
            let items = items.into_iter().map(Ok);
            prepare(items, &tokenizer, &Languages::default(), &options, &out, &mut |_| Ok(())).unwrap();
            let prepared = Prepared::open(&out).unwrap();
            let stream: Vec<u32> =
                (0..prepared.train.len()).map(|i| prepared.train.get(i).unwrap()).collect();
            assert_eq!(stream, after);
            assert_eq!(prepared.train.text_bytes(), texts.concat().len() as u64);
            std::fs::remove_dir_all(&out).unwrap();
        }
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |bytes: &[u8], index: Option<Vec<u8>>, format, part: &str| {
            let path = dir.path().join("x.bin");
            std::fs::write(&path, bytes).unwrap();
            let beside = path.with_extension("idx");
            match index {
                Some(index) => std::fs::write(&beside, index).unwrap(),
                None => drop(std::fs::remove_file(&beside)),
            }
            let result =
                Import::open(&path, format).and_then(|i| i.items(&tokenizer()).collect::<Result<Vec<_>>>());
            let e = result.err().map_or_else(|| panic!("accepted, expected {part}"), |e| e.to_string());
            assert!(e.contains(part) && e.contains("x."), "no `{part}` in: {e}");
        };
        let ids = u16s(&[5, 6, 7]);
        refused(&ids, None, None, "say so with --bin nanogpt");
        refused(&ids[..5], None, Some(BinFormat::NanoGpt), "expected a multiple of 2");
        refused(&[], None, None, "is empty");
        refused(
            &u16s(&[5, 999]),
            None,
            Some(BinFormat::NanoGpt),
            "has id 999, but the tokenizer has no such token",
        );
        refused(&llm_c(20_240_520, 1, 4, &ids), None, None, "truncated: expected 1032 bytes, found 1030");
        refused(&llm_c(20_240_520, 1, 2, &ids), None, None, "too long");
        refused(&llm_c(20_240_520, 9, 3, &ids), None, None, "is no token file of llm.c");
        refused(&llm_c(20_240_520, 1, 3, &ids)[..99], None, None, "is no token file of llm.c");
        let good = megatron(&[1, 2], &[0, 1, 2]);
        refused(&ids, Some(good[..40].to_vec()), None, "does not have the size of 2 sequences");
        refused(&ids, Some(vec![7; 60]), None, "is no index of Megatron");
        let mut floats = good.clone();
        floats[17] = 7;
        refused(&ids, Some(floats), None, "ids of type 7");
        refused(&ids, Some(megatron(&[1, 3], &[0, 1, 2])), None, "does not fit");
        refused(&ids, Some(megatron(&[1, 2], &[0, 3, 2])), None, "has sequences 0..3 of 2");
    }
}
