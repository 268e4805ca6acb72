//! `rb train`

use std::path::PathBuf;

use rb_infer::SampleOptions;
use rb_train::{Override, Trainer};

use crate::Failure;
use crate::cli::TrainArgs;

pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    let stop = crate::stop::on_signal("stopping after this step")?;
    let mut overrides = args.overrides.clone();
    if !args.data.is_empty() {
        overrides.push(Override::new("data.paths", strings(&args.data)?));
    }
    if let Some(out) = &args.out {
        overrides.push(Override::new("run.out", strings(std::slice::from_ref(out))?.remove(0)));
    }
    if let Some(mib) = args.gpu_memory_budget_mib {
        overrides.push(Override::new("run.gpu_memory_budget_mib", i64::from(mib)));
    }
    let mut trainer = match (&args.config, &args.resume) {
        (_, Some(run)) => Trainer::resume(run, &overrides)?,
        (Some(config), None) => Trainer::create(config, &overrides)?,
        // The parser asks for one of the two.
        (None, None) => return Err(Failure::new(2, "give a config file, or --resume RUN")),
    };
    trainer.check_model()?;
    let outcome = trainer.run(&stop)?;
    let run = trainer.run_path().display().to_string();
    if outcome.interrupted {
        println!("stopped after step {}; continue with: rb train --resume {run}", outcome.step);
        return Ok(());
    }
    sample(&mut trainer)?;
    println!("report: {run}/report.html");
    println!("model: {run}/checkpoints/latest");
    if let Some((step, loss)) = outcome.best.filter(|(step, _)| *step != outcome.step) {
        println!("its held-out loss was lower at step {step}, {loss:.4}: {run}/checkpoints/best");
    }
    Ok(())
}

fn sample(trainer: &mut Trainer) -> Result<(), Failure> {
    let train = &trainer.config().train;
    let (prompt, max_new_tokens) = (train.sample_prompt.clone(), train.sample_tokens);
    if prompt.is_empty() || max_new_tokens == 0 {
        return Ok(());
    }
    let options = SampleOptions { max_new_tokens, ..SampleOptions::default() };
    let (model, params, tokenizer) = trainer.parts();
    let mut text = prompt.clone();
    rb_infer::generate(model, params, tokenizer, &prompt, &options, |piece| text.push_str(piece))
        .map_err(|e| Failure::new(1, format!("sample: {e}")))?;
    println!("sample:\n{text}");
    trainer.add_sample(&prompt, &text)?;
    Ok(())
}

fn strings(paths: &[PathBuf]) -> Result<Vec<String>, Failure> {
    let text = |p: &PathBuf| p.to_str().map(str::to_string);
    paths
        .iter()
        .map(text)
        .collect::<Option<_>>()
        .ok_or_else(|| Failure::new(2, "a path is not valid Unicode"))
}
