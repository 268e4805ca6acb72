use std::path::PathBuf;

use proptest::prelude::*;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use super::*;

const BANGLA: &str = "শুরু করছি আল্লাহর নামে যিনি পরম করুণাময়, অতি দয়ালু। র‍্যাব ক্ষুধা ১৯৭১";

fn train(texts: &[&str], vocab_size: usize) -> (Tokenizer, TrainReport) {
    let config = TokenizerConfig { vocab_size, ..TokenizerConfig::default() };
    Tokenizer::train(texts.iter().map(Ok), &config).unwrap()
}

fn small() -> Tokenizer {
    train(&["the cat sat on the mat, the end of the cat", BANGLA, BANGLA], 300).0
}

fn refusal(config: TokenizerConfig) -> String {
    Tokenizer::train(["text"].iter().map(Ok), &config).unwrap_err().to_string()
}

/// Text of the shared folder, or `None` with the reason printed.
fn shared(name: &str) -> Option<String> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data")).join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(e) => {
            println!("skipped: {} cannot be read: {e}", path.display());
            None
        }
    }
}

/// The slow truth for training: Hugging Face's own trainer.
fn hugging_face_json(texts: &[&str], vocab_size: usize) -> Value {
    let config = TokenizerConfig { vocab_size: 257, ..TokenizerConfig::default() };
    let (skeleton, _) = Tokenizer::train(["x"].iter().map(Ok), &config).unwrap();
    let mut inner = skeleton.inner;
    inner.with_model(BPE::default());
    let mut trainer: tokenizers::models::TrainerWrapper = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(vec![tokenizers::AddedToken::from(DEFAULT_EOS, true)])
        .initial_alphabet(splitter::byte_chars().into_iter().collect())
        .build()
        .into();
    inner.train(&mut trainer, texts.iter()).unwrap();
    serde_json::from_str(&inner.to_string(false).unwrap()).unwrap()
}

#[test]
fn training_matches_reference() {
    let texts = [shared("tinyshakespeare.txt"), shared("udhr/ben.txt"), shared("udhr/jpn.txt")];
    let mut texts: Vec<&str> = texts.iter().flatten().map(String::as_str).collect();
    texts.extend([BANGLA, "aaaa aaa abab bababa aa"]);
    let (ours, _) = train(&texts, 1500);
    let ours: Value = serde_json::from_str(&ours.to_json().unwrap()).unwrap();
    let theirs = hugging_face_json(&texts, 1500);
    assert_eq!(ours["model"]["merges"], theirs["model"]["merges"]);
    assert_eq!(ours["model"]["vocab"], theirs["model"]["vocab"]);
    assert_eq!(ours, theirs);
}

#[test]
fn training_is_deterministic() {
    let texts = ["the cat sat on the mat, the end of the cat", BANGLA, "x y z x y z"];
    let (one, _) = train(&texts, 330);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let (two, _) = pool.install(|| train(&[texts[2], texts[0], texts[1]], 330));
    assert_eq!(one.to_json().unwrap(), two.to_json().unwrap());
    assert_eq!(one.sha256(), two.sha256());
}

#[test]
fn unigram_encodes_every_text_and_repeats() {
    let config = TokenizerConfig {
        vocab_size: 400,
        model: ModelKind::Unigram,
        special_tokens: vec![DEFAULT_EOS.into(), "cat".into()],
        ..TokenizerConfig::default()
    };
    let texts = ["the cat sat on the mat, the end of the cat. ".repeat(9), BANGLA.repeat(9)];
    let (one, report) = Tokenizer::train(texts.iter().map(Ok), &config).unwrap();
    assert!((270..=400).contains(&report.vocab_size), "{report:?}");
    assert_eq!((one.model_name(), one.eos_id(), one.is_special(1)), ("unigram", 0, true));
    for text in ["", "the cat", BANGLA, "日本語 \0 \u{1F468}\u{200D}\u{1F469} \u{fffd}", "cat<|endoftext|>"]
    {
        let ids = one.encode(text).unwrap();
        assert!(ids.iter().all(|id| !one.is_special(*id)), "{text}");
        assert_eq!(one.decode(&ids).unwrap(), text);
        assert_eq!(ids, one.encode_reference(text).unwrap());
    }
    // Whole words are pieces, also those that are in no other.
    assert_eq!(one.encode(" sat").unwrap().len(), 1);
    let least = TokenizerConfig { vocab_size: 258, ..config.clone() };
    assert_eq!(Tokenizer::train(texts.iter().map(Ok), &least).unwrap().0.vocab_size(), 258);
    // Another number of threads and another order of the documents: the same file.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let (two, _) = pool.install(|| Tokenizer::train(texts.iter().rev().map(Ok), &config)).unwrap();
    assert_eq!(one.to_json().unwrap(), two.to_json().unwrap());
}

#[test]
fn weights_set_the_parts_of_groups() {
    // `ab` occurs ten times as often as `xy`: which comes first is a matter of the weights.
    let documents = ["ab ".repeat(100), "xy ".repeat(10), "pq ".repeat(99)];
    let config = TokenizerConfig { vocab_size: 258, ..TokenizerConfig::default() };
    let first = |weights: &[f64]| {
        let texts = documents.iter().zip(0..).map(|(text, group)| Ok((text, group)));
        let (t, report) = Tokenizer::train_weighted(texts, weights, &config).unwrap();
        (String::from_utf8(t.token_bytes(257).unwrap().to_vec()).unwrap(), report.groups)
    };
    let (token, groups) = first(&[1.0, 1.0]);
    // At equal parts `ab` and `xy` tie; documents without a group count once.
    assert_eq!(token, "ab");
    let factors: Vec<f64> = groups.iter().map(|g| g.factor).collect();
    assert_eq!(factors, [1.0, 10.0, 1.0]);
    assert_eq!(groups.iter().map(|g| g.chars).collect::<Vec<_>>(), [300, 30, 297]);
    assert_eq!(first(&[1.0, 2.0]).0, "xy");
    assert_eq!(first(&[]).0, "ab");
    let texts = documents.iter().map(|text| Ok((text, 0)));
    let e = Tokenizer::train_weighted(texts, &[0.0], &config).unwrap_err().to_string();
    assert_eq!(e, "tokenizer: weight is 0, expected a finite number above 0");
}

#[test]
fn ids_have_the_stated_order() {
    let (t, report) = train(&["aab aab aab"], 260);
    assert_eq!(report.vocab_size, 260);
    assert!(report.is_full());
    assert_eq!((t.vocab_size(), t.eos_id()), (260, 0));
    assert_eq!(t.token_bytes(0), Some(DEFAULT_EOS.as_bytes()));
    assert!(t.is_special(0) && !t.is_special(1) && !t.is_special(999));
    let mut bytes: Vec<u8> = (1..257).map(|id| t.token_bytes(id).unwrap()).map(|b| b[0]).collect();
    assert_eq!(&bytes[..3], b"!\"#");
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<_>>());
    assert_eq!(t.token_bytes(257), Some(&b"aa"[..]));
    assert_eq!(t.token_bytes(258), Some(&b"aab"[..]));
    assert_eq!(t.token_bytes(259), Some(&b" aab"[..]));
    assert_eq!(t.token_bytes(260), None);
    assert_eq!(t.encode("aab aab").unwrap(), [258, 259]);
}

#[test]
fn all_bytes_round_trip() {
    let t = small();
    let every_char_class =
        "\0\u{1}\u{7f}\u{80}\u{a0}\u{ad}\r\n\t  \u{feff}\u{200d}\u{fffd}\u{1F468}\u{200D}\u{1F469}";
    for text in
        ["", " ", "\n", "a\0b", "  a  ", "e\u{301}", every_char_class, BANGLA, "日本語テキスト", "👍🏽 ok"]
    {
        let ids = t.encode(text).unwrap();
        assert_eq!(t.decode(&ids).unwrap(), text);
        let bytes: Vec<u8> = ids.iter().flat_map(|id| t.token_bytes(*id).unwrap().to_vec()).collect();
        assert_eq!(bytes, text.as_bytes(), "the tokens' bytes are the text's bytes");
    }
    // Every byte alone, also those that are no character.
    for byte in 0..=255u8 {
        let id = (0..257).find(|id| !t.is_special(*id) && t.token_bytes(*id) == Some(&[byte])).unwrap();
        let _ = t.decode(&[id]).unwrap();
    }
}

#[test]
fn special_tokens_are_not_made_from_text() {
    let text = "a<|endoftext|>b <|endoftext|>";
    let t = train(&[&text.repeat(50), "more text"], 400).0;
    let ids = t.encode(text).unwrap();
    assert!(!ids.contains(&t.eos_id()), "{ids:?}");
    assert_eq!(t.decode(&ids).unwrap(), text);
    let with_end = [ids.as_slice(), &[t.eos_id()]].concat();
    assert_eq!(t.decode(&with_end).unwrap(), text);
    assert_eq!(t.decode_with_special(&with_end).unwrap(), format!("{text}<|endoftext|>"));
    // Also when the special token looks like a word that training would love to merge.
    let config = TokenizerConfig {
        vocab_size: 300,
        special_tokens: vec!["the".into(), "###".into()],
        ..TokenizerConfig::default()
    };
    let (t, _) = Tokenizer::train(["the the ### the ###"].iter().map(Ok), &config).unwrap();
    let ids = t.encode("the the ###").unwrap();
    assert!(ids.iter().all(|id| !t.is_special(*id)), "{ids:?}");
    assert_eq!(t.decode(&ids).unwrap(), "the the ###");
}

#[test]
fn save_and_load() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let t = small();
    t.save(&path).unwrap();
    let u = Tokenizer::load(&path).unwrap();
    assert_eq!(u.sha256(), t.sha256());
    assert_eq!((u.vocab_size(), u.eos_id()), (t.vocab_size(), t.eos_id()));
    assert_eq!(u.encode("the cat<|endoftext|>").unwrap(), t.encode("the cat<|endoftext|>").unwrap());
    assert!(u.chunked, "our own files are encoded in chunks");

    // The first special token stays the end token when there are several.
    let config = TokenizerConfig {
        vocab_size: 280,
        special_tokens: vec!["[Z]".into(), "[A]".into()],
        ..Default::default()
    };
    let (t, _) = Tokenizer::train(["text"].iter().map(Ok), &config).unwrap();
    t.save(&path).unwrap();
    let u = Tokenizer::load(&path).unwrap();
    assert_eq!(u.special_tokens(), [(0, "[Z]".to_owned()), (1, "[A]".to_owned())]);
    assert_eq!(u.eos_id(), 0);
}

#[test]
fn hugging_face_folder() {
    let dir = tempfile::tempdir().unwrap();
    let config = TokenizerConfig {
        vocab_size: 280,
        special_tokens: vec!["[A]".into(), "[E]".into()],
        ..Default::default()
    };
    let (t, _) = Tokenizer::train(["text"].iter().map(Ok), &config).unwrap();
    t.save_folder(dir.path(), Some(1024)).unwrap();
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(dir.path().join(name)).unwrap()).unwrap()
    };
    let written = read("tokenizer_config.json");
    assert_eq!(written["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!((&written["eos_token"], &written["bos_token"]), (&"[A]".into(), &"[A]".into()));
    assert_eq!(written["model_max_length"], 1024);
    assert_eq!(written["clean_up_tokenization_spaces"], false);
    assert_eq!(written["added_tokens_decoder"]["1"]["content"], "[E]");
    assert_eq!(read("special_tokens_map.json")["additional_special_tokens"][0], "[E]");
    assert_eq!(Tokenizer::load(dir.path().join("tokenizer.json")).unwrap().eos_id(), 0);

    // The file beside it decides.
    let set = |eos: &str| std::fs::write(dir.path().join("tokenizer_config.json"), eos).unwrap();
    let load = || Tokenizer::load(dir.path().join("tokenizer.json"));
    set(r#"{"eos_token": {"content": "[E]"}}"#);
    assert_eq!(load().unwrap().eos_id(), 1);
    set(r#"{"eos_token": "</s>"}"#);
    let e = load().unwrap_err().to_string();
    assert!(e.contains("eos_token \"</s>\" of tokenizer_config.json is not in the vocabulary"), "{e}");
    set(r#"{"eos_token": 5}"#);
    assert!(load().unwrap_err().to_string().contains("tokenizer_config.json: eos_token is neither"));
    set("{");
    assert!(load().unwrap_err().to_string().contains("tokenizer_config.json: not JSON"));
}

#[test]
fn bad_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let e = Tokenizer::load(&path).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json does not exist"), "{e}");
    for (content, expected) in [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no \"model\""),
        (r#"{"model": 5}"#, "no \"model\""),
        (r#"{"model": {"type": "BPE"}}"#, "not a Hugging Face tokenizer"),
    ] {
        std::fs::write(&path, content).unwrap();
        let e = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(e.contains(expected) && e.contains("tokenizer.json"), "{content}: {e}");
    }
}

/// Removes or replaces every part of a good file in turn: an error or a working tokenizer, never a panic.
#[test]
fn damaged_files_never_panic() {
    fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().take(12).for_each(|(k, v)| {
                let at = format!("{at}/{}", k.replace('~', "~0").replace('/', "~1"));
                out.push(at.clone());
                pointers(v, &at, out);
            }),
            Value::Array(list) => list.iter().enumerate().take(12).for_each(|(i, v)| {
                let at = format!("{at}/{i}");
                out.push(at.clone());
                pointers(v, &at, out);
            }),
            _ => {}
        }
    }
    let good: Value = serde_json::from_str(&small().to_json().unwrap()).unwrap();
    let mut places = Vec::new();
    pointers(&good, "", &mut places);
    let mut loaded = 0;
    for place in &places {
        for bad in
            [Value::Null, 5.into(), u32::MAX.into(), (-1).into(), "".into(), "x".into(), Value::Array(vec![])]
        {
            let mut damaged = good.clone();
            *damaged.pointer_mut(place).unwrap() = bad;
            if let Ok(t) = Tokenizer::from_json(damaged.to_string().as_bytes(), None) {
                loaded += 1;
                let ids = t.encode("the cat\u{1F600}").unwrap_or_default();
                let _ = t.decode(&ids);
            }
        }
        let (parent, key) = place.rsplit_once('/').unwrap();
        let mut damaged = good.clone();
        if let Some(map) = damaged.pointer_mut(parent).and_then(Value::as_object_mut) {
            map.remove(&key.replace("~1", "/").replace("~0", "~"));
            let _ = Tokenizer::from_json(damaged.to_string().as_bytes(), None);
        }
    }
    assert!(places.len() > 50 && loaded > 10, "{} places, {loaded} loaded", places.len());
}

#[test]
fn truncation_and_padding_of_a_file_are_ignored() {
    let mut json: Value = serde_json::from_str(&small().to_json().unwrap()).unwrap();
    json["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = serde_json::json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let t = Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap();
    assert_eq!(t.encode("the cat sat").unwrap(), small().encode("the cat sat").unwrap());
}

#[test]
fn bad_settings() {
    let set = |vocab_size, special: &[&str]| TokenizerConfig {
        vocab_size,
        special_tokens: special.iter().map(|s| s.to_string()).collect(),
        ..TokenizerConfig::default()
    };
    assert_eq!(
        refusal(set(256, &["<e>"])),
        "tokenizer: vocab_size is 256, expected at least 257 (256 bytes + 1 special tokens)"
    );
    assert!(refusal(set(usize::MAX, &["<e>"])).contains("expected at most 16777216"));
    assert!(refusal(set(300, &[])).contains("special_tokens is an empty list"));
    assert!(refusal(set(300, &["<e>", "<e>"])).contains("\"<e>\" is listed twice"));
    assert!(refusal(set(300, &[""])).contains("is empty"));
    assert!(refusal(set(300, &["a"])).contains("stands for a byte"));
    assert!(refusal(set(300, &["\u{120}"])).contains("stands for a byte"));
    let none: [Result<&str>; 0] = [];
    let e = Tokenizer::train(none.into_iter(), &TokenizerConfig::default()).unwrap_err();
    assert!(matches!(e, DataError::NoTrainingText));
    let failing = [Ok("a"), Err(DataError::NoPaths)].into_iter();
    assert!(matches!(Tokenizer::train(failing, &TokenizerConfig::default()), Err(DataError::NoPaths)));
}

#[test]
fn unreachable_vocabulary_is_reported() {
    let (t, report) = train(&["ab ab ab"], 5000);
    assert!(!report.is_full());
    assert_eq!((report.requested_vocab_size, report.vocab_size), (5000, t.vocab_size()));
    assert_eq!(report.vocab_size, 259);
    assert_eq!((report.documents, report.text_bytes, report.distinct_words), (1, 8, 2));
    assert_eq!(train(&["ab ab ab"], 257).0.vocab_size(), 257);
}

#[test]
fn unknown_ids_are_errors() {
    let t = small();
    let e = t.decode(&[1, 300]).unwrap_err().to_string();
    assert!(e.contains("id 300 has no token (vocab_size is 300)"), "{e}");
    assert!(t.decode_stream().push(u32::MAX).is_err());
}

#[test]
fn nfc() {
    let config =
        TokenizerConfig { vocab_size: 270, normalization: Normalization::Nfc, ..TokenizerConfig::default() };
    let (t, _) = Tokenizer::train(["caf\u{e9} cafe\u{301}"].iter().map(Ok), &config).unwrap();
    assert_eq!(t.encode("cafe\u{301}").unwrap(), t.encode("caf\u{e9}").unwrap());
    assert_eq!(t.decode(&t.encode("cafe\u{301}").unwrap()).unwrap(), "caf\u{e9}");
    assert_eq!(small().decode(&small().encode("cafe\u{301}").unwrap()).unwrap(), "cafe\u{301}");
}

#[test]
fn encoding_matches_reference() {
    let Some(text) = shared("tinyshakespeare.txt") else { return };
    let text = &text[..3 * CHUNK_BYTES + 1000];
    for (splitter, normalization) in [
        (Splitter::Rb, Normalization::None),
        (Splitter::Gpt2, Normalization::None),
        (Splitter::Cl100k, Normalization::None),
        (Splitter::O200k, Normalization::None),
        (Splitter::Rb, Normalization::Nfc),
    ] {
        let config =
            TokenizerConfig { vocab_size: 600, splitter, normalization, ..TokenizerConfig::default() };
        let (t, _) = Tokenizer::train([text].into_iter().map(Ok), &config).unwrap();
        assert!(t.chunked);
        assert_eq!(t.fast.is_some(), normalization == Normalization::None);
        assert_eq!(t.encode(text).unwrap(), t.encode_reference(text).unwrap());
    }
}

#[test]
fn words_longer_than_the_fast_way_takes_are_encoded_alike() {
    let words: Vec<String> = (90..103).map(|n| "abab".repeat(30)[..n].to_owned()).collect();
    let t = train(&[&words.join(" ").repeat(3)], 300).0;
    for word in &words {
        assert_eq!(t.encode(word).unwrap(), t.encode_reference(word).unwrap(), "{} bytes", word.len());
    }
}

#[test]
fn added_tokens_that_are_not_special_switch_the_fast_way_off() {
    let mut json: Value = serde_json::from_str(&small().to_json().unwrap()).unwrap();
    let added = serde_json::json!({"id": 300, "content": "cat s", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": false});
    json["added_tokens"].as_array_mut().unwrap().push(added);
    let t = Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap();
    assert!(!t.chunked && t.fast.is_none());
    assert_eq!(t.vocab_size(), 301);
    let ids = t.encode("the cat sat").unwrap();
    assert!(ids.contains(&300));
    assert_eq!(t.decode(&ids).unwrap(), "the cat sat");
}

#[test]
fn streaming() {
    let t = small();
    let text = "a \u{1F468}\u{200D}\u{1F469} \u{1F600} cat";
    let mut stream = t.decode_stream();
    let mut parts: Vec<String> = t.encode(text).unwrap().iter().map(|id| stream.push(*id).unwrap()).collect();
    parts.push(stream.finish());
    assert_eq!(parts.concat(), text);
    assert!(parts.iter().any(String::is_empty), "an emoji takes several tokens");
    // Half an emoji, then the end token, then the end of the stream.
    let ids = t.encode("\u{1F600}").unwrap();
    let mut stream = t.decode_stream();
    assert_eq!(stream.push(ids[0]).unwrap(), "");
    assert_eq!(stream.push(t.eos_id()).unwrap(), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
    assert_eq!(stream.finish(), "");
}

#[test]
fn sentencepiece_style_files_work() {
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            {"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
            "vocab": {"<s>": 0, "</s>": 1, "\u{2581}": 2, "a": 3, "b": 4, "ab": 5, "<0xF0>": 6, "<0x9F>": 7,
                "<0x98>": 8, "<0x80>": 9},
            "merges": [["a", "b"]]},
    });
    let t = Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap();
    assert_eq!(t.eos_id(), 1);
    assert!(!t.chunked);
    let ids = t.encode("ab a\u{1F600}b").unwrap();
    assert_eq!(ids, [2, 5, 2, 3, 6, 7, 8, 9, 4]);
    assert_eq!(t.decode(&ids).unwrap(), "ab a\u{1F600}b");
    assert_eq!(t.token_bytes(7), Some(&[0x9F][..]));
    assert_eq!(t.token_bytes(2), Some(&b" "[..]));
    let mut stream = t.decode_stream();
    let text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(text + &stream.finish(), "ab a\u{1F600}b");
}

#[test]
fn bangla_words_stay_whole() {
    let (Some(bn), Some(en)) = (shared("parallel.bn.jsonl"), shared("parallel.en.jsonl")) else { return };
    let texts = |jsonl: &str| -> Vec<String> {
        let lines = jsonl.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        lines.map(|v| v["text"].as_str().unwrap().to_owned()).collect()
    };
    let (bn, en) = (texts(&bn), texts(&en));
    let chars_per_token = |splitter| {
        let config = TokenizerConfig { vocab_size: 8192, splitter, ..TokenizerConfig::default() };
        let (t, _) = Tokenizer::train(bn.iter().chain(&en).map(Ok), &config).unwrap();
        let rate = |texts: &[String]| {
            let tokens: usize = texts.iter().map(|x| t.encode(x).unwrap().len()).sum();
            texts.iter().map(|x| x.chars().count()).sum::<usize>() as f64 / tokens as f64
        };
        (rate(&bn), rate(&en))
    };
    let (rb, gpt2) = (chars_per_token(Splitter::Rb), chars_per_token(Splitter::Gpt2));
    println!("characters a token (bn, en): rb {rb:.2?}, gpt2 {gpt2:.2?}");
    assert!(rb.0 / rb.1 > 0.7, "Bangla must not cost much more than English: {rb:?}");
    assert!(gpt2.0 / gpt2.1 < 0.5, "the GPT-2 splitter is the negative control: {gpt2:?}");
}

#[test]
fn any_text_round_trips() {
    let t = small();
    // Shared by all cases: what is in it must change nothing.
    let cache = std::cell::RefCell::new(WordCache::default());
    proptest!(|(text in any::<String>(), repeated in "[ab \n<|>\u{9BE}\u{200D}\u{1F600}']{0,60}")| {
        for text in [text, repeated] {
            let ids = t.encode(&text).unwrap();
            prop_assert!(ids.iter().all(|id| !t.is_special(*id)));
            prop_assert_eq!(&ids, &t.encode_reference(&text).unwrap());
            prop_assert_eq!(&ids, &t.encode_cached(&text, &mut cache.borrow_mut()).unwrap());
            prop_assert_eq!(t.decode(&ids).unwrap(), text);
        }
    });
}

#[test]
fn any_ids_stream_as_they_decode() {
    let t = small();
    proptest!(|(ids in proptest::collection::vec(0u32..300, 0..40))| {
        let mut stream = t.decode_stream();
        let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text.push_str(&stream.finish());
        prop_assert_eq!(text, t.decode(&ids).unwrap());
    });
}

#[test]
fn any_cut_keeps_words() {
    let regexes = Splitter::ALL.map(|splitter| splitter.regex().unwrap());
    proptest!(|(text in "[ab' \n\t\u{a0}\u{301}\u{9BE}7.,]{0,80}", least in 0usize..20)| {
        for regex in &regexes {
            let mut whole = Vec::new();
            splitter::words(regex, &text, |w| whole.push(w));
            let mut cut = Vec::new();
            splitter::chunks(&text, least).for_each(|c| splitter::words(regex, c, |w| cut.push(w)));
            prop_assert_eq!(&whole, &cut);
        }
    });
}
