//! `rb import`

use rb_infer::export::save_folder;
use rb_nn::weights::SaveOptions;
use rb_tensor::io::FloatFormat;

use crate::cli::ImportArgs;
use crate::{Failure, model};

/// Reads everything, so that what cannot be used is refused now and not in the middle of a run, and writes it in fp32,
/// which holds every value of the shorter types.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    if !args.folder.join("config.json").is_file() {
        let message = format!(
            "{}: has no config.json; give a Hugging Face model folder, downloaded whole",
            args.folder.display()
        );
        return Err(Failure::new(2, message));
    }
    let (model, params) = model::load(&args.folder)?;
    let tokenizer = model::tokenizer(&args.folder, model.config())?;
    let options = SaveOptions { format: FloatFormat::F32, shard_bytes: None };
    save_folder(model.config(), &params, &tokenizer, &args.out, &options, args.overwrite)
        .map_err(Failure::failed)?;
    let config = model.config();
    println!(
        "{}: {} parameters, {} layers of {}, {} query and {} key heads of {}, {} positions, vocabulary {} (tokenizer {})",
        args.out.display(),
        rb_train::observe::grouped(params.layout().num_parameters() as u64),
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.kv_heads(),
        config.head_dim(),
        config.max_position_embeddings,
        config.vocab_size,
        tokenizer.vocab_size()
    );
    println!("train it on with run.init_from = \"{}\" in the config", args.out.display());
    Ok(())
}
