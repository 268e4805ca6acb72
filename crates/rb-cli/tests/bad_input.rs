//! Input that cannot be used: one error that names the thing, the place and what to do, exit code 1 or 2.

mod common;

use common::{CONFIG, Place};

/// `rb train tiny.toml` on this data.
fn data(place: &Place, path: &str, parts: &[&str]) {
    let words = ["train", "tiny.toml", "--out", "run", "--data", path];
    place.refused(&words, 1, parts);
    // The place is free for a second try.
    place.refused(&words, 1, parts);
}

#[test]
fn text_that_cannot_be_read() {
    let place = Place::new();
    data(&place, "nothing.txt", &["nothing.txt does not exist", "check the path"]);
    place.write("empty.txt", "");
    data(&place, "empty.txt", &["empty.txt is empty"]);
    place.write("latin.txt", b"caf\xe9 au lait");
    data(&place, "latin.txt", &["latin.txt: byte 3 (0xE9) is not valid UTF-8", "iconv"]);
    place.write("table.csv", "a,b");
    data(
        &place,
        "table.csv",
        &["table.csv is not a .txt, .jsonl (.gz, .zst) or .parquet file", "convert it"],
    );
    std::fs::create_dir(place.path("folder")).unwrap();
    data(&place, "folder", &["folder holds no .txt, .jsonl or .parquet file"]);
}

#[test]
fn lines_that_are_no_documents() {
    let place = Place::new();
    for (line, parts) in [
        ("{\"text\": \"a\"", ["not a JSON object", "each line must look like"]),
        ("[1]", ["not a JSON object", "each line must look like"]),
        ("{\"body\": \"a\"}", ["no field \"text\"", "each line must look like"]),
        ("{\"text\": 5}", ["field \"text\" is a number", "expected a string"]),
    ] {
        place.write("bad.jsonl", format!("{{\"text\": \"good\"}}\n{line}\n"));
        data(&place, "bad.jsonl", &["bad.jsonl line 2: ", parts[0], parts[1]]);
    }
    place.write("zero.jsonl", "{\"text\": \"\"}\n{\"text\": \"\"}\n");
    data(&place, "zero.jsonl", &["no documents", "2 documents in them had no text"]);
}

/// A line is read up to a limit, so that one without end cannot fill the memory. The file has a hole, not bytes.
#[test]
fn a_line_without_end() {
    let place = Place::new();
    let file = std::fs::File::create(place.path("huge.jsonl")).unwrap();
    file.set_len(1 << 31).unwrap();
    data(&place, "huge.jsonl", &["huge.jsonl line 1: longer than the limit of", "split the document"]);
}

#[test]
fn documents_without_text_are_left_out_and_counted() {
    let place = Place::new();
    let full = "{\"text\": \"the river and the boat, the river and the boat\"}\n".repeat(9);
    place.write("mixed.jsonl", format!("{full}{{\"text\": \"\"}}\n"));
    let words = ["train", "tiny.toml", "--out", "run", "--data", "mixed.jsonl", "--set"];
    let output = place.good(&[&words[..], &["train.max_steps=1"]].concat());
    assert!(output.contains("training tokens in 9 documents"), "{output}");
    let notice = "documents without text were skipped documents=1";
    assert_eq!(output.matches(notice).count(), 1, "{output}");
}

#[test]
fn configs() {
    let place = Place::new();
    let refused = |config: String, parts: &[&str]| {
        place.write("bad.toml", config);
        place.refused(&["train", "bad.toml", "--out", "run"], 2, parts);
        assert!(!place.path("run").exists(), "nothing is made for a config that is refused");
    };
    let with = |from: &str, to: &str| CONFIG.replacen(from, to, 1);
    refused(with("hidden_size", "hiden_size"), &["bad.toml:10", "hiden_size", "hidden_size"]);
    refused(
        with("max_steps = 4", "max_steps = \"four\""),
        &["bad.toml:18", "max_steps", "four", "expected u64"],
    );
    refused(with("max_steps = 4", "max_steps = -4"), &["bad.toml:18", "-4"]);
    refused(with("[train]", "[trian]"), &["bad.toml:", "trian", "train"]);
    refused(
        with("num_key_value_heads = 1", "num_key_value_heads = 3"),
        &["bad.toml", "num_key_value_heads is 3"],
    );
    refused(with("num_attention_heads = 2", "num_attention_heads = 3"), &["bad.toml", "hidden_size", "8"]);
    refused(with("seq_len = 16", "seq_len = 17"), &["train.seq_len is 17", "max_position_embeddings 16"]);
    refused(with("[model]", "[model"), &["bad.toml:9"]);
    refused(with("\"text.txt\"", "\"\""), &["bad.toml", "data.paths has an empty path"]);
    refused(String::new(), &["bad.toml", "model"]);
    place.refused(
        &["train", "tiny.toml", "--set", "train.max_step=9"],
        2,
        &["train.max_step=9", "max_steps"],
    );
    place.refused(&["train", "tiny.toml", "--set", "train.max_steps"], 2, &["is not key=value"]);
    place.refused(&["train", "missing.toml"], 2, &["missing.toml", "check the path"]);
    place.write("latin.toml", b"# caf\xe9\n");
    place.refused(&["train", "latin.toml"], 2, &["latin.toml", "UTF-8"]);
}

/// The tokenizer sets the vocabulary: a config that says otherwise is refused, and one that agrees is taken.
#[test]
fn a_vocabulary_that_the_tokenizer_does_not_have() {
    let place = Place::new();
    let run = |entries: usize| {
        place
            .write("stated.toml", CONFIG.replacen("[model]", &format!("[model]\nvocab_size = {entries}"), 1));
        ["train", "stated.toml", "--out", "run", "--set", "train.max_steps=1"]
    };
    place.refused(
        &run(290),
        2,
        &["model.vocab_size: 290 is asked for, but the tokenizer has 293 entries", "leave it out"],
    );
    let output = place.good(&run(293));
    let notice = "ends in its warm-up (train.warmup_steps 2 of train.max_steps 1)";
    assert_eq!(output.matches(notice).count(), 1, "{output}");
}

/// Values of the right type that no run can use: refused before anything is made.
#[test]
fn values_that_cannot_be() {
    let place = Place::new();
    for (set, part) in [
        ("tokenizer.vocab_size=0", "tokenizer.vocab_size is 0, expected 257 to 16777216"),
        ("tokenizer.vocab_size=99999999999", "expected 257 to 16777216"),
        ("train.adam_epsilon=0", "train.adam_epsilon is 0, expected a finite number above 0"),
        ("train.gradient_accumulation_steps=99999999999", "expected 1 to 1048576"),
        ("train.per_device_train_batch_size=99999999999", "expected 1 to 2147483647"),
        ("run.gpu_memory_budget_mib=0", "run.gpu_memory_budget_mib is 0, expected at least 1"),
        ("data.paths=[\"\"]", "data.paths has an empty path"),
        ("train.max_step=9", "did you mean `max_steps`? known here: "),
        ("elsewhere=9", "unknown key `elsewhere`; known here: run, data"),
    ] {
        place.refused(&["train", "tiny.toml", "--out", "run", "--set", set], 2, &[part]);
        assert!(!place.path("run").exists(), "{set}");
    }
    place.refused(
        &["train", "tiny.toml", "--out", "run", "--set", "train.frozen=[\"*\"]"],
        2,
        &["train.frozen: freezes every parameter"],
    );
    place.refused(&["doctor", "--threads", "0"], 2, &["--threads", "1..=1024"]);
    place.refused(&["doctor", "--threads", "100000"], 2, &["--threads", "1..=1024"]);
}

/// What does not fit into the machine's memory is refused, where the system says how much there is.
#[test]
fn models_that_are_too_large() {
    let place = Place::new();
    if !std::path::Path::new("/proc/meminfo").exists() {
        return println!("skipped: the size of the memory is unknown here");
    }
    let memory = ["a step needs at least", "GiB of memory", "make the model smaller"];
    for (set, parts) in [
        ("model.hidden_size=100000000", &memory[..]),
        ("model.intermediate_size=2147483647", &memory),
        ("train.per_device_train_batch_size=4000000", &memory),
        ("model.num_hidden_layers=100000000", &["num_hidden_layers is 100000000", "1 to 65536"]),
        (
            "train.per_device_train_batch_size=2147483647",
            &["34359738352 tokens", "raise train.gradient_accumulation_steps"],
        ),
    ] {
        let words = ["train", "tiny.toml", "--out", "run", "--set", "run.device=cpu", "--set", set];
        place.refused(&words, 2, parts);
        assert!(!place.path("run").exists(), "{set}");
        if parts.len() == 2 {
            place.refused(&["plan", "tiny.toml", "--set", set], 2, parts);
        }
    }
}

/// An output that cannot be written: one line and exit code 1.
#[cfg(target_os = "linux")]
#[test]
fn outputs_that_are_gone() {
    let place = Place::new();
    for words in
        [&["completions", "bash"][..], &["plan", "tiny.toml"], &["train", "tiny.toml", "--out", "run"]]
    {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = place.rb(words).stdout(full).output().unwrap();
        common::refused(&output, &words.join(" "), 1, &["cannot write to standard output: No space left"]);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = place.rb(words).stdout(writer).output().unwrap();
        common::refused(&output, &words.join(" "), 1, &["cannot write to standard output: Broken pipe"]);
    }
}

/// Without a GPU, asking for one says what is missing, where it was looked for and what to do.
#[test]
fn a_gpu_that_is_not_there() {
    let place = Place::new();
    place.refused(
        &["train", "tiny.toml", "--out", "run", "--set", "run.device=cpu", "--set", "run.precision=bf16"],
        2,
        &["run.precision", "bf16 needs a GPU", "\"fp32\""],
    );
    if rb_cuda::Gpu::count_devices().is_ok_and(|count| count > 0) {
        return println!("skipped: there is a GPU");
    }
    let words = ["train", "tiny.toml", "--out", "run", "--set", "run.device=cuda"];
    let remedy = "or train on the CPU with run.device=\"cpu\"";
    place.refused(&words, 2, &["run.device: cuda cannot be used: ", remedy]);
    assert!(!place.path("run").exists(), "nothing is made for a device that cannot be had");
    let output = place.rb(&words).output().unwrap();
    let error = common::text(&output);
    if let Err(rb_cuda::CudaError::Missing { component, looked_for, places, .. }) =
        rb_cuda::Gpu::count_devices()
    {
        for part in [component, &looked_for, &places] {
            assert!(error.contains(part), "no `{part}` in: {error}");
        }
    }
    place.refused(&["verify", "--device", "cuda"], 1, &["GPU"]);
    place.good(&["doctor"]);
}

#[test]
fn places() {
    let place = Place::new();
    place.run("run", 1);
    place.refused(&["train", "tiny.toml", "--out", "run"], 2, &["run: holds a run already", "--resume run"]);
    place.refused(&["train", "--resume", "nowhere"], 2, &["nowhere: is not a run directory"]);
    place.refused(
        &["train", "tiny.toml", "--out", "text.txt/run"],
        1,
        &["text.txt/run", "a file and a folder"],
    );
    place.refused(&["generate", "nowhere"], 2, &["nowhere: is neither a model folder"]);
    place.refused(&["generate", "text.txt"], 2, &["text.txt: is neither a model folder"]);
    place.refused(
        &["verify", "--config", "tiny.toml", "--json", "no/such/report.json"],
        1,
        &["no/such/report.json", "check the path"],
    );
    place.refused(&["generate", "run", "--temperature=-1"], 2, &["temperature"]);
    place.refused(&["logits", "run", "--out", "no/such/probe"], 1, &["no/such/probe", "check the path"]);
    place.refused(
        &["tokenizer", "train", "text.txt", "--vocab-size", "3"],
        1,
        &["vocab_size is 3, expected at least"],
    );
    place.refused(&["verify"], 2, &["--all"]);
}

/// The rule of a resumed run: what it has learned from is fixed, the rest may change and is printed.
#[test]
fn settings_changed_on_resume() {
    let place = Place::new();
    place.run("run", 1);
    for (set, change) in [
        ("run.seed=9", "run.seed: 3 -> 9"),
        ("model.hidden_size=16", "model.hidden_size: 8 -> 16"),
        ("train.seq_len=8", "train.seq_len: 16 -> 8"),
    ] {
        let parts = ["these settings define the run and cannot change", change, "start a new run"];
        place.refused(&["train", "--resume", "run", "--set", set], 2, &parts);
    }
    let sets = ["train.max_steps=2", "train.learning_rate=0.01", "train.per_device_train_batch_size=3"];
    let words: Vec<&str> =
        ["train", "--resume", "run"].into_iter().chain(sets.iter().flat_map(|s| ["--set", s])).collect();
    let output = place.good(&words);
    for change in [
        "train.max_steps: 1 -> 2",
        "train.learning_rate: 0.001 -> 0.01",
        "train.per_device_train_batch_size: 2 -> 3",
    ] {
        assert!(output.contains(&format!("changed on resume: {change}")), "{output}");
    }
    // And they stay changed.
    let output = place.good(&["train", "--resume", "run", "--set", "train.max_steps=3"]);
    assert_eq!(output.matches("changed on resume").count(), 1, "{output}");
}

/// Every file of the only checkpoint, truncated, emptied, removed or swapped: named, and nothing is overwritten.
#[test]
fn damaged_checkpoints() {
    let place = Place::new();
    place.run("run", 1);
    let folder = place.path("run/checkpoints/step-1");
    for name in [
        "model.safetensors",
        "trainer/optimizer.safetensors",
        "trainer/state.json",
        "config.json",
        "tokenizer.json",
    ] {
        let path = folder.join(name);
        let whole = std::fs::read(&path).unwrap();
        let resumed = |parts: &[&str]| place.refused(&["train", "--resume", "run"], 1, parts);
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        resumed(&["step-1", name, "truncated"]);
        std::fs::write(&path, "").unwrap();
        resumed(&["step-1", name, "has 0 bytes", "truncated"]);
        let mut other = whole.clone();
        other[whole.len() - 2] ^= 1;
        std::fs::write(&path, &other).unwrap();
        resumed(&["step-1", name, "another checksum", "swapped"]);
        std::fs::remove_file(&path).unwrap();
        resumed(&["step-1", name, "is missing"]);
        std::fs::write(&path, whole).unwrap();
    }
    std::fs::rename(place.path("run/checkpoints/step-1"), place.path("run/checkpoints/step-7")).unwrap();
    place.refused(&["train", "--resume", "run"], 1, &["step-7", "manifest is of step 1"]);
}

/// A model folder is used without its manifest too, since other programs write such folders.
#[test]
fn damaged_models() {
    let place = Place::new();
    place.run("run", 1);
    let folder = place.path("run/checkpoints/step-1");
    let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors"), &weights[..weights.len() - 9]).unwrap();
    let model = folder.to_str().unwrap();
    place.refused(&["generate", model], 1, &["model.safetensors", "truncated"]);
    std::fs::write(folder.join("model.safetensors"), &weights).unwrap();

    let optimizer = std::fs::read(folder.join("trainer/optimizer.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors"), optimizer).unwrap();
    place.refused(&["generate", model], 1, &["do not fit the config", "missing: model.embed_tokens.weight"]);
    std::fs::write(folder.join("model.safetensors"), &weights).unwrap();

    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    std::fs::write(folder.join("config.json"), config.replace("\"hidden_size\": 8", "\"hidden_size\": 16"))
        .unwrap();
    place.refused(
        &["generate", model],
        1,
        &["do not fit the config", "embed_tokens.weight has [293, 8], expected [293, 16]"],
    );
    std::fs::write(folder.join("config.json"), &config).unwrap();
    place.good(&["generate", model, "--max-new-tokens", "1"]);
}

/// Token files are checked against their checksum and their tokenizer when a run is resumed.
#[test]
fn damaged_tokens() {
    let place = Place::new();
    place.run("run", 1);
    let path = place.path("run/data/train.bin");
    let whole = std::fs::read(&path).unwrap();
    let resumed = |parts: &[&str]| place.refused(&["train", "--resume", "run"], 1, parts);
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    resumed(&["train.bin: truncated: expected", "build it again"]);
    let mut other = whole.clone();
    // The high byte of the last 16-bit id; the start of the one document follows it.
    other[whole.len() - 9] = 0xff;
    std::fs::write(&path, &other).unwrap();
    resumed(&["train.bin: sha256 is", "the file is damaged, build it again"]);
    std::fs::write(&path, "").unwrap();
    resumed(&["train.bin"]);
    std::fs::remove_file(&path).unwrap();
    resumed(&["train.bin does not exist"]);
}
