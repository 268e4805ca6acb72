//! Recomputation changes memory and time, and no number of a run; what a plan says of it.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use rb_autograd::Precision;
use rb_nn::{LlamaConfig, Recompute};
use rb_train::observe::Record;
use rb_train::{Config, Override, Trainer, plan};

const CONFIG: &str = r#"
[run]
device = "cpu"
[data]
paths = ["text.txt"]
document_mask = true
validation_fraction = 0.2
[tokenizer]
vocab_size = 280
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 16
tie_word_embeddings = true
use_qk_norm = true
[train]
max_steps = 4
seq_len = 16
per_device_train_batch_size = 2
gradient_accumulation_steps = 2
warmup_steps = 0
logging_steps = 1
eval_steps = 2
save_steps = 2
"#;

const MIXED: Precision = Precision::MIXED;

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text: String =
        (0..60).map(|i| format!("line {i} of the river and the boat number {}\n\n", i * 7 % 11)).collect();
    std::fs::write(dir.path().join("text.txt"), text).unwrap();
    std::fs::write(dir.path().join("tiny.toml"), CONFIG).unwrap();
    dir
}

fn overrides(list: &[&str]) -> Vec<Override> {
    list.iter().map(|o| o.parse().unwrap()).collect()
}

/// Bits of all losses and norms in the order of the log.
fn numbers(run: &Path) -> Vec<u64> {
    let records = rb_train::observe::read(&run.join("metrics.jsonl")).unwrap();
    let of = |record| match record {
        Record::Train(t) => vec![t.loss.get().to_bits(), t.grad_norm.get().to_bits()],
        Record::Eval(e) => vec![e.loss.get().to_bits()],
        _ => Vec::new(),
    };
    records.into_iter().flat_map(of).collect()
}

#[test]
fn runs_have_the_same_bits() {
    let dir = folder();
    let run = |name: &str, choice: &str| {
        let out = dir.path().join(name);
        let mut all = overrides(&[choice]);
        all.push(Override::new("run.out", out.to_str().unwrap()));
        let mut trainer = Trainer::create(&dir.path().join("tiny.toml"), &all).unwrap();
        trainer.run(&AtomicBool::new(false)).unwrap();
        let weights = trainer.parts().1.arena().as_slice::<f32>().unwrap().to_vec();
        (numbers(&out), weights.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    let plain = run("none", "train.recompute=none");
    assert_eq!(plain.0.len(), 4 * 2 + 2);
    for choice in ["mlp", "block", "auto"] {
        let again = run(choice, &format!("train.recompute={choice}"));
        assert_eq!(plain.0, again.0, "losses and norms with {choice}");
        assert!(plain.1 == again.1, "weights with {choice}");
    }
}

#[test]
fn it_may_change_on_resume() {
    let dir = folder();
    let out = dir.path().join("run");
    let mut all = overrides(&["train.max_steps=2"]);
    all.push(Override::new("run.out", out.to_str().unwrap()));
    Trainer::create(&dir.path().join("tiny.toml"), &all).unwrap().run(&AtomicBool::new(false)).unwrap();
    let changed = overrides(&["train.recompute=block", "train.max_steps=4"]);
    let mut trainer = Trainer::resume(&out, &changed).unwrap();
    trainer.run(&AtomicBool::new(false)).unwrap();
    assert_eq!(trainer.config().train.recompute, rb_train::config::RecomputeChoice::Block);
}

/// The model of 101.7M parameters that benchmarks use, 16 sequences of 1024.
fn large() -> Config {
    let model = LlamaConfig {
        num_key_value_heads: Some(4),
        head_dim: Some(64),
        max_position_embeddings: 1024,
        tie_word_embeddings: true,
        ..LlamaConfig::new(32004, 768, 1408, 16, 12)
    };
    let mut config: Config = toml::from_str(CONFIG).unwrap();
    config.model = model;
    config.data.document_mask = false;
    config.train.seq_len = 1024;
    config.train.per_device_train_batch_size = 16;
    config.train.gradient_accumulation_steps = 1;
    config
}

#[test]
fn plans_shrink() {
    let config = large();
    let peak = |recompute| plan::plan(&config, (9, 0), MIXED, recompute).unwrap();
    let plans = [Recompute::None, Recompute::Mlp, Recompute::Block].map(peak);
    let peaks = plans.each_ref().map(|plan| plan.memory.peak >> 20);
    println!("{}", plans.each_ref().map(plan::Plan::table).join("\n"));
    assert_eq!(plans[0].num_parameters, 101_674_752);
    assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{peaks:?} MiB");
}

#[test]
fn what_does_not_fit_is_refused_with_a_setting_that_does() {
    let mut config = large();
    config.model.num_hidden_layers = 4;
    config.train.per_device_train_batch_size = 6;
    let needs =
        |config: &Config, recompute| plan::plan(config, (9, 0), MIXED, recompute).unwrap().reserved_bytes;
    let [none, mlp, block] =
        [Recompute::None, Recompute::Mlp, Recompute::Block].map(|recompute| needs(&config, recompute));
    assert!(none > mlp && mlp > block, "{none} {mlp} {block}");
    let refusal = |config: &Config, budget: usize| {
        let plan = plan::choose(config, (9, 0), MIXED, budget).unwrap();
        plan::check(&plan, config, (9, 0), MIXED, budget).unwrap_err().to_string()
    };
    for (budget, parts) in [
        (none - 1, ["largest: ", "it fits with train.recompute=\"mlp\""]),
        (mlp - 1, ["GPU memory: a step needs ", "it fits with train.recompute=\"block\""]),
        (
            block - 1,
            ["train.per_device_train_batch_size=3, train.gradient_accumulation_steps=2", "\"block\""],
        ),
        (1 << 20, ["with one sequence a batch", "raise --gpu-memory-budget-mib to "]),
    ] {
        let message = refusal(&config, budget);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    // `auto` takes the first that fits.
    config.train.recompute = rb_train::config::RecomputeChoice::Auto;
    for (budget, want) in [(none, Recompute::None), (mlp, Recompute::Mlp), (block, Recompute::Block)] {
        assert_eq!(plan::choose(&config, (9, 0), MIXED, budget).unwrap().recompute, want);
    }
}

#[test]
fn a_plan_takes_tensor_cores_for_attention_or_says_why_not() {
    let mut config = large();
    config.model.num_hidden_layers = 1;
    config.train.per_device_train_batch_size = 1;
    let kernels = |config: &Config, precision| {
        let plan = plan::plan(config, (8, 6), precision, Recompute::None).unwrap();
        let names: Vec<&str> = plan.units.iter().map(|unit| unit.name).collect();
        (names.contains(&"attention_mma_fwd"), names.contains(&"attention_fwd"), plan.table())
    };
    let (mma, plain, table) = kernels(&config, MIXED);
    assert!(mma && !plain && !table.contains("without tensor cores"), "{table}");
    // fp32 has no tensor core path and asks for none.
    let (mma, plain, table) = kernels(&config, Precision::Full);
    assert!(!mma && plain && !table.contains("without tensor cores"), "{table}");
    config.model.head_dim = Some(80);
    config.model.use_qk_norm = true;
    let (mma, plain, table) = kernels(&config, MIXED);
    assert!(!mma && plain, "{table}");
    let notice = "attention runs without tensor cores, many times slower: a head size of 80 is none of 32, 64, 96 and 128";
    assert!(table.contains(notice), "{table}");
}
