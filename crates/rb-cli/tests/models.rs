//! What is done with a finished model: text, judgement, folders for other programs, and training it on.

mod common;

use common::Place;
use serde_json::Value;

fn json(place: &Place, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(place.path(name)).unwrap()).unwrap()
}

#[test]
fn generated_text_does_not_depend_on_the_cache() {
    let place = Place::new();
    place.run("run", 2);
    let words = ["generate", "run", "--prompt", "the river", "--max-new-tokens", "40", "--seed", "3"];
    let more = ["--temperature", "1.5", "--min-p", "0.01", "--repetition-penalty", "1.1", "--ignore-eos"];
    let all: Vec<&str> = words.iter().chain(&more).copied().collect();
    let cached = place.good(&all);
    let plain = place.good(&[&all[..], &["--no-cache"]].concat());
    assert_eq!(cached, plain);
    assert!(cached.starts_with("the river") && cached.len() > 20, "{cached}");
    let stats = place.good(&[&all[..], &["--stats", "--device", "cpu"]].concat());
    assert!(stats.contains("40 tokens written"), "{stats}");
    place.refused(&["generate", "run", "--min-p", "2"], 2, &["--min-p is 2, expected 0 to 1"]);
    place.refused(&["generate", "run", "--precision", "bf16", "--device", "cpu"], 2, &["needs a GPU"]);
}

#[test]
fn a_model_is_judged() {
    let place = Place::new();
    place.run("run", 4);
    place.write("held_out.txt", "line 3 of the river and the boat number 5\n".repeat(3));
    place.write("bn.jsonl", "{\"text\": \"\u{9a8}\u{9a6}\u{9c0} \u{993} \u{9a8}\u{9cc}\u{995}\u{9be}\"}\n");
    let question = |answer: usize| {
        format!(
            "{{\"context\": \"the river and\", \"choices\": [\"the boat\", \"zzzz\"], \"answer\": {answer}}}\n"
        )
    };
    place.write("own.jsonl", question(0).repeat(9) + &question(1));
    let output = place.good(&[
        "eval",
        "run",
        "--data",
        "held_out.txt",
        "--data",
        "bangla=bn.jsonl",
        "--task",
        "choices=own.jsonl",
        "--out",
        "results.json",
        "--samples",
        "samples.jsonl",
        "--device",
        "cpu",
    ]);
    for part in
        ["held_out", "bangla", "all", "random twin", "unigram: from the training tokens", "own: 10 questions"]
    {
        assert!(output.contains(part), "no `{part}` in: {output}");
    }
    let results = json(&place, "results.json");
    let text = &results["results"]["heldout_all"];
    let number = |key: &str| text[key].as_f64().unwrap_or_else(|| panic!("no {key} in {text}"));
    let uniform = number("uniform_nats_per_token,none");
    assert!((uniform - 293f64.ln()).abs() < 1e-9, "{uniform}");
    assert!(
        number("nats_per_token,none") < uniform && number("random_twin_nats_per_token,none") > 0.9 * uniform
    );
    let bytes = number("bytes");
    let bits = number("nats_per_token,none") * number("tokens") / bytes / 2f64.ln();
    assert!((number("bits_per_byte,none") - bits).abs() < 1e-9);
    let own = &results["results"]["own"];
    let acc = own["acc,none"].as_f64().unwrap();
    assert!((acc - 0.9).abs() < 1e-9 || (acc - 0.1).abs() < 1e-9, "{own}");
    assert!((own["acc_stderr,none"].as_f64().unwrap() - 0.1).abs() < 1e-9);
    assert_eq!(results["n-samples"]["own"]["effective"], 10);
    let samples = std::fs::read_to_string(place.path("samples.jsonl")).unwrap();
    assert_eq!(samples.lines().count(), 10);

    let mixed = "{\"text\": \"the boat\", \"lang\": \"en\"}\n{\"text\": \"le bateau\", \"lang\": \"fr\"}\n{\"text\": \"?\"}\n";
    place.write("mixed.jsonl", mixed);
    let by_field = place.good(&["eval", "run", "--data", "mixed.jsonl", "--language-field", "lang"]);
    for name in ["en ", "fr ", "mixed ", "all "] {
        assert!(by_field.lines().any(|line| line.starts_with(name)), "no `{name}` in: {by_field}");
    }
    assert!(place.good(&["eval", "run", "--held-out"]).contains("held_out "));
    place.good(&["export", "run", "--out", "alone"]);
    place.refused(&["eval", "alone", "--held-out"], 2, &["alone: belongs to no run that held text out"]);
    let limited = ["eval", "run", "--task", "choices=own.jsonl", "--limit", "3"];
    assert!(place.good(&limited).contains("own: 3 questions"));
    place.refused(&["eval", "run"], 2, &["--data", "--task"]);
    place.refused(&["eval", "run", "--task", "mmlu=own.jsonl"], 2, &["`mmlu` is no kind of task"]);
    place.refused(&["eval", "run", "--task", "piqa=own.jsonl"], 1, &["own.jsonl:1: has no `label`"]);
    place.refused(&["eval", "run", "--data", "nowhere.txt"], 1, &["nowhere.txt"]);
    place.refused(&["eval", "nowhere", "--data", "held_out.txt"], 2, &["nowhere: is neither a model folder"]);
}

#[test]
fn a_model_goes_out_and_comes_back() {
    let place = Place::new();
    place.run("run", 2);
    place.good(&["logits", "run", "--out", "before"]);
    place.good(&["export", "run", "--out", "folder"]);
    place.good(&["import", "folder", "--out", "again"]);
    place.good(&["logits", "again", "--out", "after"]);
    assert_eq!(std::fs::read(place.path("before")).unwrap(), std::fs::read(place.path("after")).unwrap());
    place.good(&["export", "run", "--out", "small", "--dtype", "bf16"]);
    let size = |name: &str| std::fs::metadata(place.path(name)).unwrap().len();
    assert!(2 * size("small/model.safetensors") < size("folder/model.safetensors") + 4000);
    place.refused(&["export", "run", "--out", "folder"], 1, &["holds a model already", "--overwrite"]);
    place.good(&["export", "run", "--out", "folder", "--dtype", "f16", "--overwrite"]);
    place.refused(&["import", "run/data", "--out", "x"], 2, &["run/data: has no config.json"]);
    let text = std::fs::read_to_string(place.path("again/config.json")).unwrap();
    place.write("again/config.json", text.replace("\"silu\"", "\"gelu\""));
    place.refused(&["import", "again", "--out", "x"], 1, &["hidden_act is \"gelu\""]);
    assert!(!place.path("x").exists());

    let output = place.good(&["export", "run", "--format", "gguf", "--dtype", "q8_0", "--out", "tiny.gguf"]);
    assert!(output.contains("tokenizer.huggingface.json"), "{output}");
    let bytes = std::fs::read(place.path("tiny.gguf")).unwrap();
    assert_eq!(&bytes[..4], b"GGUF");
    place.refused(&["export", "run", "--format", "gguf", "--out", "tiny.gguf"], 2, &["is there already"]);
    assert_eq!(std::fs::read(place.path("tiny.gguf")).unwrap(), bytes);
    place.refused(&["export", "run", "--dtype", "q8_0", "--out", "y"], 2, &["--format gguf"]);
    let bf16 = ["export", "run", "--format", "gguf", "--dtype", "bf16", "--out", "y"];
    place.refused(&bf16, 2, &["f32, f16 or q8_0"]);
}

#[test]
fn training_goes_on_from_a_model() {
    let place = Place::new();
    place.run("run", 4);
    place.good(&["export", "run", "--out", "start"]);
    let whole = std::fs::read_to_string(place.path("tiny.toml")).unwrap();
    let (before, rest) = whole.split_once("[tokenizer]").unwrap();
    let (_, train) = rest.split_once("[train]").unwrap();
    let config = format!("{before}[train]{train}").replace("[run]", "[run]\ninit_from = \"start\"");
    place.write("on.toml", &config);
    let output = place.good(&["train", "on.toml", "--out", "on", "--set", "train.max_steps=1"]);
    assert!(output.contains("weights: those of") && output.contains("start"), "{output}");
    // The first loss is that of a model with four steps behind it.
    let loss = |run: &str, line: usize| -> f64 {
        let metrics = std::fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
        let losses = metrics.lines().filter_map(|line| {
            let record: Value = serde_json::from_str(line).unwrap();
            record["loss"].as_f64()
        });
        losses.collect::<Vec<_>>()[line]
    };
    let (first, trained) = (loss("run", 0), loss("on", 0));
    assert!(trained < first - 0.001, "{trained} after {first}");
    // A run that starts from a folder is continued without it.
    std::fs::rename(place.path("start"), place.path("elsewhere")).unwrap();
    place.good(&["train", "--resume", "on", "--set", "train.max_steps=2"]);
    std::fs::rename(place.path("elsewhere"), place.path("start")).unwrap();

    let refused = |config: &str, parts: &[&str]| {
        place.write("bad.toml", config);
        place.refused(&["train", "bad.toml", "--out", "bad"], 2, parts);
    };
    let other = whole.replace("[run]", "[run]\ninit_from = \"start\"");
    let other = other.replace("hidden_size = 8", "hidden_size = 16").replace("vocab_size = 300", "");
    refused(&other, &["run.init_from", "model.hidden_size is 16, there 8", "model.head_dim is 8, there 4"]);
    refused(&config.replace("\"start\"", "\"nowhere\""), &["run.init_from", "nowhere: is neither a model"]);
    refused(&config.replace("init_from = \"start\"", ""), &["has no section [model]"]);
    place.run("stranger", 1);
    let stranger = place.path("stranger/tokenizer.json");
    let text = std::fs::read_to_string(&stranger).unwrap();
    place.write("stranger.json", text.replace("<|endoftext|>", "<|the_end|>"));
    let tokenizer = format!("{config}\n[tokenizer]\npath = \"stranger.json\"\n");
    refused(&tokenizer, &["run.init_from", "tokenizer is not the folder's"]);
}
