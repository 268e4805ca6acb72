//! `rb generate`

use std::io::Write;
use std::path::{Path, PathBuf};

use rb_autograd::ParamBuilder;
use rb_data::Tokenizer;
use rb_infer::SampleOptions;
use rb_nn::{CausalLm, LlamaConfig, weights};
use rb_tensor::{Device, Rng};

use crate::Failure;
use crate::cli::GenerateArgs;

pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let fail = |e: &dyn std::fmt::Display| Failure::new(1, e.to_string());
    let dir = model_folder(&args.model)?;
    let config = LlamaConfig::from_json(&dir.join("config.json")).map_err(|e| fail(&e))?;
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder).map_err(|e| fail(&e))?;
    let mut params = builder.build(&Rng::new(0), Device::Cpu).map_err(|e| fail(&e))?;
    weights::load_hf(&mut params, &dir).map_err(|e| fail(&e))?;
    let tokenizer = Tokenizer::load(dir.join("tokenizer.json")).map_err(|e| fail(&e))?;
    if tokenizer.vocab_size() > config.vocab_size {
        return Err(Failure::new(
            1,
            format!(
                "{}: the tokenizer has {} entries, the model {}; they do not belong together",
                dir.display(),
                tokenizer.vocab_size(),
                config.vocab_size
            ),
        ));
    }
    let options = SampleOptions {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    options.check().map_err(|e| Failure::new(2, format!("--{e}")))?;
    let mut out = std::io::stdout().lock();
    // A closed pipe (`rb generate ... | head`) ends the output, not the program with an error.
    let mut write = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok();
    write(&args.prompt);
    let result = rb_infer::generate(&model, &params, &tokenizer, &args.prompt, &options, |text| {
        write(text);
    });
    write("\n");
    result.map_err(|e| fail(&e))
}

/// The folder of a model: the one given, or the newest whole checkpoint of the run given.
fn model_folder(path: &Path) -> Result<PathBuf, Failure> {
    if path.join("config.json").is_file() {
        return Ok(path.to_path_buf());
    }
    match rb_train::checkpoint::find_latest(&path.join("checkpoints"))? {
        Some(found) => Ok(found.path),
        None => Err(Failure::new(
            2,
            format!("{}: is neither a model folder (config.json) nor a run with checkpoints", path.display()),
        )),
    }
}
