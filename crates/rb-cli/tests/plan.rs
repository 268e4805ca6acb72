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
    place.refused(&["train", "tiny.toml", "--gpu-memory-budget-mib", "0"], 2, &["--gpu-memory-budget-mib"]);
}
