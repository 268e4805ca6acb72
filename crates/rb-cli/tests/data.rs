//! `rb tokenizer` and `rb data`: from text to a run on prepared data, and what is refused on the way.

mod common;

use common::Place;

/// Documents in English and Bangla, with a field that tells which.
fn two_languages(place: &Place) {
    let mut lines = String::new();
    for i in 0..60 {
        let en = format!("the river and the boat number {i} of the {} people who sat there", i * 7 % 11);
        let bn = format!("বাংলা নদী আর নৌকা {i} আমাদের {} মানুষের দেশে বসে", i * 5 % 13);
        lines +=
            &format!("{{\"text\": \"{en}\", \"lang\": \"en\"}}\n{{\"text\": \"{bn}\", \"lang\": \"bn\"}}\n");
    }
    place.write("two.jsonl", lines);
}

const BN: &str = "bn,field=lang=bn,floor=2";
const EN: &str = "en,field=lang=en";

/// The words of a command with both languages declared.
fn with<'w>(words: &[&'w str]) -> Vec<&'w str> {
    [words, &["--language", BN, "--language", EN]].concat()
}

#[test]
fn text_to_tokenizer_to_folder_to_run() {
    let place = Place::new();
    two_languages(&place);
    let output = place.good(&with(&[
        "tokenizer",
        "train",
        "two.jsonl",
        "--vocab-size",
        "700",
        "--special-token",
        "<end>",
    ]));
    assert!(output.contains("tokenizer.json: ") && output.contains("bn: 60 documents"), "{output}");
    let output = place.good(&with(&[
        "tokenizer",
        "report",
        "tokenizer.json",
        "two.jsonl",
        "--html",
        "page.html",
        "--json",
        "report.json",
    ]));
    assert!(output.contains("every document comes back byte for byte"), "{output}");
    let page = std::fs::read_to_string(place.path("page.html")).unwrap();
    assert!(page.matches("<svg").count() == 5 && page.contains("accepted"));
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(place.path("report.json")).unwrap()).unwrap();
    assert!(report["languages"][0]["chars_per_token"].as_f64().unwrap() > 2.0);
    place.good(&["tokenizer", "encode", "tokenizer.json", "two.jsonl", "--out", "ids.jsonl"]);
    assert_eq!(std::fs::read_to_string(place.path("ids.jsonl")).unwrap().lines().count(), 120);

    let prepare =
        ["data", "prepare", "*.jsonl", "--tokenizer", "tokenizer.json", "--out", "prepared", "--text-field"];
    std::fs::remove_file(place.path("ids.jsonl")).unwrap();
    let output = place
        .good(&with(&[&prepare[..], &["text", "--shard-tokens", "500", "--mixture", "tokens"]].concat()));
    assert!(output.contains("read 120 documents") && output.contains("parts of tokens"), "{output}");
    place.refused(&[&prepare[..], &["text"]].concat(), 2, &["prepared exists already"]);
    let output = place.good(&["data", "check", "prepared", "--seq-len", "16", "--json", "check.json"]);
    assert!(output.contains("is a target once an epoch, 0 dropped"), "{output}");

    let words = ["train", "tiny.toml", "--out", "run", "--data", "prepared", "--set", "train.max_steps=2"];
    let output = place.good(&[&words[..], &["--set", "train.eval_steps=2"]].concat());
    assert!(output.contains("data: ") && output.contains("eval loss"), "{output}");
    assert!(!place.path("run/data/train.bin").exists(), "tokens stay in the prepared folder");
    let output = place.good(&["train", "--resume", "run", "--set", "train.max_steps=4"]);
    assert!(output.contains("resumed at step 2"), "{output}");
    let output = place.good(&["eval", "run", "--held-out"]);
    assert!(output.contains("held_out ") && output.contains("unigram: from the training tokens"), "{output}");
    std::fs::rename(place.path("prepared"), place.path("moved")).unwrap();
    place.refused(&["train", "--resume", "run"], 1, &["prepared does not exist"]);
}

#[test]
fn the_gate_stops_a_tokenizer_that_cuts_words() {
    let place = Place::new();
    two_languages(&place);
    place.good(&[
        "tokenizer",
        "train",
        "two.jsonl",
        "--vocab-size",
        "700",
        "--splitter",
        "gpt2",
        "--out",
        "gpt2.json",
    ]);
    let parts = [
        "the tokenizer was refused: bn has ",
        "below its floor of 2.00",
        "cause: splitter",
        "the splitter rb",
    ];
    place.refused(&with(&["tokenizer", "report", "gpt2.json", "two.jsonl"]), 3, &parts);
    let prepare = ["data", "prepare", "two.jsonl", "--tokenizer", "gpt2.json", "--out", "prepared"];
    place.refused(&with(&prepare), 3, &parts);
    assert!(!place.path("prepared").exists());

    let gated = format!(
        "{}\n[[data.languages]]\nname = \"bn\"\nscript = \"Bengali\"\nfloor = 2.0\n\
         [[data.languages]]\nname = \"en\"\nfield = \"lang=en\"\n",
        common::CONFIG.replace("text.txt", "two.jsonl").replace("vocab_size = 300", "vocab_size = 700")
    );
    place.write("gated.toml", &gated);
    place.good(&["train", "gated.toml", "--out", "good", "--set", "train.max_steps=1"]);
    let words = ["train", "gated.toml", "--out", "run", "--set", "tokenizer.splitter=gpt2"];
    place.refused(&words, 3, &parts);
    assert!(!place.path("run/config.toml").exists(), "nothing is trained");
    // Resumed runs keep what was declared.
    let resume = ["train", "--resume", "good", "--set", "tokenizer.splitter=gpt2"];
    place.refused(&resume, 2, &["cannot change", "tokenizer.splitter"]);
    let wrong = gated.replace("script = \"Bengali\"", "script = \"Bangla\"");
    place.write("wrong.toml", wrong);
    place.refused(&["train", "wrong.toml"], 2, &["data.languages", "`Bangla` is no Unicode script"]);
}

#[test]
fn a_sorted_stream_is_refused() {
    let place = Place::new();
    let words = ["river", "boat", "house", "tree", "stone", "road", "hill", "lake", "field", "gate", "bell"];
    let mut state = 1u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        words[(state >> 33) as usize % words.len()]
    };
    // Each a word longer than the one before.
    let mut text = |i: usize| (0..5 + i).map(|_| word()).collect::<Vec<_>>().join(" ");
    let lines: String = (0..120).map(|i| format!("{{\"text\": \"{}\"}}\n", text(i))).collect();
    place.write("sorted.jsonl", lines);
    place.good(&["tokenizer", "train", "sorted.jsonl", "--vocab-size", "300"]);
    let words =
        ["data", "prepare", "sorted.jsonl", "--tokenizer", "tokenizer.json", "--no-shuffle", "--out", "p"];
    place.good(&words);
    let check = ["data", "check", "p", "--seq-len", "32", "--no-shuffle"];
    place.refused(&check, 3, &["the training stream was refused", "sorted by length", "data.shuffle=true"]);
    let output = place.good(&["data", "check", "p", "--seq-len", "32"]);
    assert!(output.contains("note: documents are sorted by length"), "{output}");
}

#[test]
fn input_that_cannot_be_prepared() {
    let place = Place::new();
    place.good(&["tokenizer", "train", "text.txt", "--vocab-size", "300"]);
    place.write("latin.txt", b"caf\xe9");
    place.write("bad.jsonl", "{\"text\": \"a\"}\n{\"text\": 5}\n");
    place.write("cut.jsonl.gz", [0x1f, 0x8b, 8, 0, 0]);
    place.write("bad.zst", "x");
    place.write("bad.txt.zst", "not zstd");
    place.write("bad.parquet", "PAR1xxPAR1");
    place.write("bare.bin", [1u8, 0, 2, 0]);
    let refused = |data: &str, code, parts: &[&str]| {
        let words = ["data", "prepare", data, "--tokenizer", "tokenizer.json", "--out", "prepared"];
        place.refused(&words, code, parts);
        let left = std::fs::read_dir(place.path(".")).unwrap().flatten();
        let left: Vec<String> = left.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        assert!(!left.iter().any(|name| name.contains("prepared")), "{data}: {left:?}");
    };
    refused("nothing.jsonl", 1, &["nothing.jsonl does not exist"]);
    refused("latin.txt", 1, &["byte 3 (0xE9) is not valid UTF-8"]);
    refused("bad.jsonl", 1, &["bad.jsonl line 2: field \"text\" is a number"]);
    refused("cut.jsonl.gz", 1, &["cut.jsonl.gz: damaged or truncated gzip data"]);
    refused("bad.zst", 1, &["bad.zst is not a .txt, .jsonl (.gz, .zst) or .parquet file"]);
    refused("bad.txt.zst", 1, &["bad.txt.zst: damaged or truncated zstd data"]);
    refused("bad.parquet", 1, &["bad.parquet: not a readable Parquet file"]);
    refused("bare.bin", 1, &["--bin nanogpt"]);
    refused("*.csv", 1, &["*.csv: fits no"]);
    place.refused(
        &["data", "prepare", "text.txt", "--tokenizer", "no.json", "--out", "prepared"],
        1,
        &["no.json does not exist"],
    );
    let words = ["data", "prepare", "text.txt", "--tokenizer", "tokenizer.json", "--out", "prepared"];
    place.refused(&[&words[..], &["--mixture", "tokens"]].concat(), 2, &["--mixture needs languages"]);
    place.refused(
        &[&words[..], &["--validation-fraction", "0.9"]].concat(),
        2,
        &["expected a number from 0 to 0.5"],
    );
    place.refused(&[&words[..], &["--language", "x,script=Nowhere"]].concat(), 2, &["is no Unicode script"]);
    place.refused(&["data", "check", "nowhere"], 2, &["nowhere: is not a folder of `rb data prepare`"]);
    place.good(&words);
    std::fs::write(place.path("prepared/index.json"), "{").unwrap();
    place.refused(&["data", "check", "prepared"], 1, &["index.json: not an index of prepared data"]);
    place.refused(
        &["train", "tiny.toml", "--out", "run", "--data", "prepared"],
        1,
        &["index.json: not an index of prepared data"],
    );
    place.write("two.jsonl", "{\"text\": \"a\"}\n");
    // An older good tokenizer stays where a new one fails.
    let before = std::fs::read(place.path("tokenizer.json")).unwrap();
    place.refused(&["tokenizer", "train", "bad.jsonl"], 1, &["bad.jsonl line 2"]);
    place.refused(
        &["tokenizer", "train", "two.jsonl", "--language", "bn,script=Bengali"],
        2,
        &["no document is in it"],
    );
    assert_eq!(std::fs::read(place.path("tokenizer.json")).unwrap(), before);
    place.refused(
        &["tokenizer", "encode", "tokenizer.json", "bad.jsonl", "--out", "ids.jsonl"],
        1,
        &["line 2"],
    );
    assert!(!place.path("ids.jsonl").exists());
}

/// Files are read at the same time and text is counted and encoded in parallel: nothing of that shows in what is written.
#[test]
fn any_number_of_threads_writes_the_same_bytes() {
    let place = Place::new();
    two_languages(&place);
    std::fs::create_dir(place.path("text")).unwrap();
    std::fs::rename(place.path("two.jsonl"), place.path("text/two.jsonl")).unwrap();
    // Larger than two of the parts that are read at the same time.
    let long: String =
        (0..9000).map(|i| format!("{{\"text\": \"{} {i}\"}}\n", "the river ".repeat(110))).collect();
    assert!(long.len() > 9 << 20);
    place.write("text/a.jsonl", &long);
    (0..9).for_each(|i| drop(place.write(&format!("text/{i}.txt"), format!("the boat number {i} "))));
    let mut written: Vec<Vec<(String, Vec<u8>)>> = Vec::new();
    for threads in ["1", "2", "5"] {
        let (tokenizer, out) = (format!("{threads}.json"), format!("prepared{threads}"));
        let train =
            ["tokenizer", "train", "text", "--vocab-size", "330", "--held-out", "0.2", "--out", &tokenizer];
        place.good(&[&["--threads", threads], &train[..]].concat());
        let prepare =
            ["data", "prepare", "text", "--tokenizer", &tokenizer, "--out", &out, "--shard-tokens", "300000"];
        place.good(&[&["--threads", threads], &prepare[..]].concat());
        let files = std::fs::read_dir(place.path(&out)).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files
            .map(|path| {
                (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap())
            })
            .collect();
        files.sort();
        written.push(files);
    }
    let names: Vec<&str> = written[0].iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"train-00001.rbt") && names.contains(&"tokenizer.json"), "{names:?}");
    assert!(written[1] == written[0] && written[2] == written[0]);
}

#[test]
fn outputs_and_weights_that_cannot_be() {
    let place = Place::new();
    two_languages(&place);
    let train = |out| ["tokenizer", "train", "missing.jsonl", "--out", out];
    // Before the text is looked at.
    place.refused(&train("no/such/t.json"), 1, &["no/such/t.json", "check the path"]);
    std::fs::create_dir(place.path("folder")).unwrap();
    place.refused(&train("folder"), 1, &["cannot write folder", "a file and a folder are mixed up"]);
    place.refused(&train("t.json"), 1, &["missing.jsonl does not exist"]);
    place.good(&["tokenizer", "train", "two.jsonl", "--vocab-size", "600", "--out", "t.json"]);
    let heavy = ["--mixture", "tokens", "--language", EN, "--language", "bn,field=lang=bn,weight=1e9"];
    let prepare = ["data", "prepare", "two.jsonl", "--tokenizer", "t.json", "--out", "prepared"];
    let parts = ["bn would be repeated", "at most 1000 times", "lower its weight"];
    place.refused(&[&prepare[..], &heavy].concat(), 1, &parts);
    let names = std::fs::read_dir(place.path("")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains("prepared")).collect();
    assert!(left.is_empty(), "{left:?}");
}
