//! `rb generate`

use std::io::Write;

use rb_data::Tokenizer;
use rb_infer::SampleOptions;

use crate::cli::GenerateArgs;
use crate::{Failure, model};

pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let dir = model::folder(&args.model)?;
    let (model, params) = model::load(&dir)?;
    let tokenizer = Tokenizer::load(dir.join("tokenizer.json")).map_err(Failure::failed)?;
    if tokenizer.vocab_size() > model.config().vocab_size {
        return Err(Failure::new(
            1,
            format!(
                "{}: the tokenizer has {} entries, the model {}; they do not belong together",
                dir.display(),
                tokenizer.vocab_size(),
                model.config().vocab_size
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
    result.map_err(Failure::failed)
}
