//! A run that is saved, read by a new process's objects and continued, beside one that never stopped.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rb_autograd::{GradStore, ParamStore};
use rb_data::{Loader, LoaderConfig, TokenData, Tokenizer, TokenizerConfig};
use rb_nn::CausalLm;
use rb_optim::{AdamW, AdamWConfig, Optimizer, Schedule};
use rb_verify::Check;

use super::steps;
use crate::checkpoint::{self, Contents, TrainerState};
use crate::step::{LossTerms, forward_backward};
use crate::{Result, TrainError};

const STEPS: u64 = 8;
const SAVED: u64 = 3;

/// What a run is made of.
struct Run {
    model: CausalLm,
    params: ParamStore,
    grads: GradStore,
    adam: AdamW,
    loader: Loader,
    losses: Vec<u64>,
}

impl Run {
    fn new(seed: u64, data: &Arc<TokenData>) -> Result<Run> {
        let (model, params) = steps::model(seed)?;
        let grads = GradStore::new(&params)?;
        let adam = AdamW::new(AdamWConfig::default(), &params)?;
        let config = LoaderConfig { seq_len: 12, batch_size: 2, seed, ..LoaderConfig::default() };
        Ok(Run { model, params, grads, adam, loader: Loader::new(data.clone(), config)?, losses: Vec::new() })
    }

    fn train(&mut self, steps: std::ops::Range<u64>) -> Result<()> {
        let schedule = Schedule::cosine(1e-2, 1e-3, 2, STEPS);
        for step in steps {
            let batch = [self.loader.next_batch()];
            let terms = LossTerms::default();
            let loss = forward_backward(&self.model, &self.params, &mut self.grads, &batch, false, terms)?;
            self.adam.clipped_step(&mut self.params, &mut self.grads, schedule.lr(step), 1.0, &loss)?;
            self.losses.push(loss.item()?.to_bits());
        }
        Ok(())
    }

    /// Bytes of all weights and of the optimizer's state.
    fn bytes(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut all = Vec::new();
        for (_, part) in self.params.layout().parts() {
            all.push((part.name.clone(), self.params.part(&part.name)?.as_bytes()?.to_vec()));
        }
        for (name, tensor) in self.adam.state()? {
            all.push((name, tensor.as_bytes()?.to_vec()));
        }
        Ok(all)
    }
}

/// A folder that is removed when the check is over.
struct Scratch(PathBuf);

impl Scratch {
    fn new(seed: u64) -> Result<Scratch> {
        let name = format!("rustingbrain-verify-{}-{seed}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).map_err(|e| TrainError::io(&path, "creating", e))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left over, it is only untidy.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Checks that weights, moments, count of steps and place in the data all pass through a checkpoint.
pub(super) fn resumes_bit_for_bit(seed: u64) -> Result<Vec<Check>> {
    let documents: Vec<Vec<u32>> =
        (0..9).map(|d| (0..11 + d).map(|i| (i * 7 + d * 3) % 49).collect()).collect();
    let data = Arc::new(TokenData::from_documents(&documents, 50, 49)?);
    let text = ["one river and one boat", "the boat is on the river"].map(|t| Ok(t.to_string()));
    let settings = TokenizerConfig { vocab_size: 260, ..TokenizerConfig::default() };
    let (tokenizer, _) = Tokenizer::train(text.into_iter(), &settings)?;
    let scratch = Scratch::new(seed)?;

    let mut whole = Run::new(seed, &data)?;
    whole.train(0..STEPS)?;
    let mut first = Run::new(seed, &data)?;
    first.train(0..SAVED)?;
    let saved = save(&scratch.0, &first, &tokenizer)?;
    // Other weights: nothing of the first run is left but what the checkpoint holds.
    let mut second = Run::new(seed + 1, &data)?;
    let config = LoaderConfig { seq_len: 12, batch_size: 2, seed, ..LoaderConfig::default() };
    second.loader = Loader::new(data.clone(), config)?;
    checkpoint::verify(&saved)?;
    let state = checkpoint::read_state(&saved)?;
    checkpoint::restore(&saved, &state, &mut second.params, &mut second.adam)?;
    second.loader.set_state(&state.loader)?;
    let restored = first.bytes()?;
    let differs = |a: &[(String, Vec<u8>)], b: &[(String, Vec<u8>)]| {
        a.iter().zip(b).find(|(a, b)| a != b).map(|(a, _)| a.0.clone())
    };
    let wrong = differs(&restored, &second.bytes()?);
    let detail = match &wrong {
        Some(name) => format!("{name} is not what was saved"),
        None => format!("{} tensors came back bit for bit", restored.len()),
    };
    let mut checks = vec![Check::new("a checkpoint holds everything", wrong.is_none(), detail)];
    second.train(SAVED..STEPS)?;
    let losses = whole.losses[SAVED as usize..] == second.losses[..];
    let wrong = differs(&whole.bytes()?, &second.bytes()?);
    let detail = match (&wrong, losses) {
        (_, false) => "the losses after the checkpoint differ".to_string(),
        (Some(name), _) => format!("{name} differs at the end"),
        _ => format!("{SAVED} and {} steps end in the bits of {STEPS}", STEPS - SAVED),
    };
    checks.push(Check::new("resume equality", wrong.is_none() && losses, detail));
    Ok(checks)
}

fn save(folder: &Path, run: &Run, tokenizer: &Tokenizer) -> Result<PathBuf> {
    let state = TrainerState::new(SAVED, SAVED * 24, 0, run.adam.steps_done()?, run.loader.state());
    checkpoint::save(
        folder,
        &Contents { model: &run.model, params: &run.params, optimizer: &run.adam, state: &state, tokenizer },
    )
}
