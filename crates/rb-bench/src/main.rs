//! `bench`: the speed of training one model shape, refused unless its loss is finite and falls.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rb_autograd::{GradStore, ParamBuilder, ParamStore};
use rb_data::Batch;
use rb_nn::{CausalLm, LlamaConfig, flops_per_token};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{Device, Rng};
use rb_train::step::{LossTerms, forward_backward};

/// Times training steps of a Llama-style model on one fixed random batch.
#[derive(Parser)]
#[command(name = "bench", max_term_width = 100)]
struct Args {
    /// Width of the model.
    #[arg(long, default_value_t = 192)]
    d_model: usize,
    /// Layers.
    #[arg(long, default_value_t = 4)]
    n_layers: usize,
    /// Query heads.
    #[arg(long, default_value_t = 6)]
    n_heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    n_kv_heads: usize,
    /// Width of a head.
    #[arg(long, default_value_t = 32)]
    head_dim: usize,
    /// Width of the feed-forward layer.
    #[arg(long, default_value_t = 512)]
    d_ff: usize,
    /// Vocabulary.
    #[arg(long, default_value_t = 32004)]
    vocab: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    seq_len: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// Timed steps.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Threads; all cores if left out.
    #[arg(long)]
    threads: Option<usize>,
    /// Also print one line of JSON at the end.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    rb_train::observe::keep_freed_memory();
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(3),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    if args.steps < 2 || args.batch_size == 0 {
        return Err("--steps must be at least 2 and --batch-size at least 1".into());
    }
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    }
    let config = LlamaConfig {
        num_key_value_heads: Some(args.n_kv_heads),
        head_dim: Some(args.head_dim),
        max_position_embeddings: args.seq_len,
        tie_word_embeddings: true,
        ..LlamaConfig::new(args.vocab, args.d_model, args.d_ff, args.n_layers, args.n_heads)
    };
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder)?;
    let mut params = builder.build(&Rng::new(0), Device::Cpu)?;
    let mut grads = GradStore::new(&params)?;
    let mut adam = AdamW::new(AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() }, &params)?;
    let batch = random_batch(args);
    let count = params.layout().num_parameters();
    println!(
        "{count} parameters, {}x{} tokens, {} threads",
        args.batch_size,
        args.seq_len,
        rayon::current_num_threads()
    );

    let mut step = |params: &mut ParamStore| -> Result<(f64, f64), Box<dyn std::error::Error>> {
        let started = Instant::now();
        let batches = std::slice::from_ref(&batch);
        let loss = forward_backward(&model, params, &mut grads, batches, false, LossTerms::default())?;
        adam.clipped_step(params, &mut grads, 1e-3, 1.0, &loss)?;
        Ok((loss.item()?, started.elapsed().as_secs_f64()))
    };
    const WARM_UP: usize = 2;
    let mut losses = Vec::new();
    let mut times = Vec::new();
    for i in 0..WARM_UP + args.steps {
        let (loss, seconds) = step(&mut params)?;
        losses.push(loss);
        if i >= WARM_UP {
            times.push(seconds);
        }
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    if let Some(reason) = refusal(&losses) {
        eprintln!("refused: {reason}; a speed is reported only for a finite, falling loss");
        return Ok(false);
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let tokens_per_s = (args.batch_size * args.seq_len) as f64 / median;
    let gflops = tokens_per_s * flops_per_token(&config, args.seq_len) / 1e9;
    println!(
        "{tokens_per_s:.0} tokens/s, {:.1} ms a step (median of {}), {gflops:.1} GFLOP/s (6 N + causal attention), \
         loss {first:.4} -> {last:.4}",
        median * 1e3,
        args.steps
    );
    if args.json {
        let line = serde_json::json!({
            "tokens_per_s": tokens_per_s, "step_ms": median * 1e3, "loss_first": first, "loss_last": last,
            "params": count,
        });
        println!("{line}");
    }
    Ok(true)
}

/// Why the speed of these steps must not be shown: a step on NaN is fast and worth nothing.
fn refusal(losses: &[f64]) -> Option<String> {
    if let Some(step) = losses.iter().position(|l| !l.is_finite()) {
        return Some(format!("the loss of step {} is {}", step + 1, losses[step]));
    }
    match losses {
        [first, .., last] if last < first => None,
        _ => Some(format!("the losses {losses:?} do not fall")),
    }
}

fn random_batch(args: &Args) -> Batch {
    let mut rng = Rng::new(1).fork("bench batch");
    let n = args.batch_size * args.seq_len;
    let mut ids = || (0..n).map(|_| rng.below(args.vocab as u64) as i32).collect::<Vec<_>>();
    Batch {
        batch_size: args.batch_size,
        seq_len: args.seq_len,
        input_ids: ids(),
        labels: ids(),
        position_ids: (0..n).map(|i| (i % args.seq_len) as i32).collect(),
        doc_start: vec![0; n],
        valid_tokens: n,
        dropped_targets: 0,
        epoch: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_speed_without_a_finite_falling_loss() {
        assert_eq!(refusal(&[3.0, 3.5, 2.0]), None);
        assert_eq!(refusal(&[3.0, f64::NAN, 2.0]).unwrap(), "the loss of step 2 is NaN");
        assert_eq!(refusal(&[3.0, 2.0, f64::INFINITY]).unwrap(), "the loss of step 3 is inf");
        for flat in [&[3.0, 3.0][..], &[2.0, 3.0], &[3.0], &[]] {
            assert!(refusal(flat).unwrap().contains("do not fall"));
        }
    }
}
