//! `rb generate`

use std::io::Write;

use rb_infer::SampleOptions;

use crate::cli::GenerateArgs;
use crate::{Failure, model};

pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let options = SampleOptions {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        ignore_eos: args.ignore_eos,
        kv_cache: !args.no_cache,
    };
    options.check().map_err(|e| Failure::new(2, format!("--{e}")))?;
    let dir = model::folder(&args.model)?;
    let (model, params) = model::load_on(&dir, &args.place)?;
    let tokenizer = model::tokenizer(&dir, model.config())?;
    let mut out = std::io::stdout().lock();
    // A closed pipe (`rb generate ... | head`) ends the output, not the program with an error.
    let mut write = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok();
    write(&args.prompt);
    let result = rb_infer::generate(&model, &params, &tokenizer, &args.prompt, &options, |text| {
        write(text);
    });
    write("\n");
    let done = result.map_err(Failure::failed)?;
    if args.stats {
        let speed =
            done.tokens_per_s().map_or("too few to tell".into(), |speed| format!("{speed:.1} a second"));
        eprintln!(
            "{}: {} tokens read, the first one came after {:.3} s; {} tokens written, after the first {speed}{}",
            params.arena().device(),
            done.prompt_tokens,
            done.first_token_s,
            done.new_tokens,
            if done.ended { "; the text ended by itself" } else { "" },
        );
    }
    Ok(())
}
