//! `rb plan` needs no GPU, and refuses what does not fit.

mod common;

use common::Place;

#[test]
fn a_step_is_planned_without_a_gpu() {
    let place = Place::new();
    let text = place.good(&["plan", "tiny.toml"]);
    for part in
        ["sm_90, bf16", "2 sequences of 16 tokens", "vocabulary 300", "peak of a step", "recomputation"]
    {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let words = ["plan", "tiny.toml", "--card", "sm_86", "--set", "run.precision=fp32"];
    let text = place
        .good(&[&words[..], &["--set", "train.recompute=auto", "--set", "model.vocab_size=500"]].concat());
    assert!(text.contains("sm_86, fp32") && text.contains("vocabulary 500"), "{text}");
}

/// Time, cost and how often the text is read, from shipped measurements or the user's own.
#[test]
fn a_run_is_forecast() {
    let place = Place::new();
    let text = place.good(&["plan", "tiny.toml", "--money", "7", "--price", "3.5"]);
    for part in [
        "tokens of the run     128 (4 steps of 32)",
        "about, from ",
        "bytes a token, before a tokenizer is there",
        "speed, NVIDIA H200    about",
        "this batch is outside of them",
        "in 2.0 h: ",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    assert!(!text.contains("warning"), "{text}");
    let steps = ["--set", "train.max_steps=1000000"];
    let text = place
        .good(&[&["plan", "tiny.toml", "--tokens-per-second", "1000", "--hours", "1"], &steps[..]].concat());
    for part in [
        "about 1,000 tokens/s, as given",
        "8.9 h",
        "warning: the run reads its text",
        "longer than its budget",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let text = place.good(&["plan", "tiny.toml", "--gpu", "Abacus 3"]);
    assert!(text.contains("no speed of Abacus 3 is known; measure it with bench --json"), "{text}");
    place.write(
        "bench.json",
        r#"{"tokens_per_s": 500.0, "flops_per_token": 1e9, "shape": {"batch_size": 2, "seq_len": 16}}"#,
    );
    let text = place.good(&["plan", "tiny.toml", "--measured", "bench.json"]);
    assert!(text.contains("from bench.json"), "{text}");
}

#[test]
fn unusable_requests_are_refused() {
    let place = Place::new();
    let budget = ["plan", "tiny.toml", "--set", "run.gpu_memory_budget_mib=1"];
    place.refused(
        &budget,
        2,
        &["GPU memory: a step needs", "largest: ", "raise --gpu-memory-budget-mib to "],
    );
    place.refused(&["plan", "tiny.toml", "--card", "sm_70"], 2, &["--card", "sm_80 or newer"]);
    place.refused(&["plan", "tiny.toml", "--card", "h200"], 2, &["--card", "such as sm_90"]);
    place.refused(&["plan", "tiny.toml", "--set", "train.recompute=blocks"], 2, &["did you mean `block`?"]);
    place.refused(&["plan", "tiny.toml", "--money", "5"], 2, &["--price"]);
    place.refused(&["plan", "tiny.toml", "--hours", "0"], 2, &["--hours", "a number above 0"]);
    place.refused(&["plan", "tiny.toml", "--measured", "gone.json"], 2, &["gone.json", "bench --json"]);
    place.write("bench.json", "{}");
    place.refused(&["plan", "tiny.toml", "--measured", "bench.json"], 2, &["no number /flops_per_token"]);
    place.refused(&["train", "tiny.toml", "--gpu-memory-budget-mib", "0"], 2, &["--gpu-memory-budget-mib"]);
}
