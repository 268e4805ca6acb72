//! `rb logits`

use rb_nn::ModelInput;
use rb_tensor::{Rng, Tensor, io};

use crate::cli::LogitsArgs;
use crate::{Failure, model};

/// Lengths around one token, powers of two and something longer.
const LENGTHS: [usize; 5] = [1, 7, 63, 65, 200];
/// Sequences of each length.
const ROWS: usize = 2;

/// Writes `ids_T [B, T]` (i32) and `logits_T [B, T, V]` (f32) for each length that the model can see.
pub(crate) fn run(args: &LogitsArgs) -> Result<(), Failure> {
    let folder = model::folder(&args.model)?;
    let (model, params) = model::load(&folder)?;
    let config = model.config();
    let mut rng = Rng::new(args.seed).fork("logits");
    let mut tensors = Vec::new();
    let mut lengths = Vec::new();
    for len in LENGTHS.into_iter().filter(|&len| len <= config.max_position_embeddings) {
        let ids = (0..ROWS * len).map(|_| rng.below(config.vocab_size as u64) as i32).collect();
        let ids = Tensor::from_vec::<i32>(ids, [ROWS, len]).map_err(Failure::failed)?;
        let logits = model.logits(&params, &ModelInput::causal(ids.clone())).map_err(Failure::failed)?;
        tensors.extend([(format!("ids_{len}"), ids), (format!("logits_{len}"), logits)]);
        lengths.push(len.to_string());
    }
    io::write_safetensors(&args.out, tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)))
        .map_err(Failure::failed)?;
    println!("{}: logits of {} for lengths {}", args.out.display(), folder.display(), lengths.join(", "));
    Ok(())
}
