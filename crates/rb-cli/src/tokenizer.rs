//! `rb tokenizer`

use rb_data::{Splitter, Tokenizer, TokenizerConfig, corpus};

use crate::Failure;
use crate::cli::{SplitterArg, TokenizerCommand};

pub(crate) fn run(command: &TokenizerCommand) -> Result<(), Failure> {
    let TokenizerCommand::Train(args) = command;
    let corpus = corpus::open(&args.data).map_err(Failure::failed)?;
    let splitter = match args.splitter {
        SplitterArg::Rb => Splitter::Rb,
        SplitterArg::Gpt2 => Splitter::Gpt2,
    };
    let config = TokenizerConfig { vocab_size: args.vocab_size, splitter, ..TokenizerConfig::default() };
    let texts = corpus.documents().map(|d| d.map(|d| d.text));
    let (tokenizer, report) = Tokenizer::train(texts, &config).map_err(Failure::failed)?;
    tokenizer.save(&args.out).map_err(Failure::failed)?;
    println!(
        "{}: {} entries from {} documents, {} bytes",
        args.out.display(),
        report.vocab_size,
        report.documents,
        report.text_bytes
    );
    if !report.is_full() {
        println!("the text gives no more; {} entries were asked for", report.requested_vocab_size);
    }
    Ok(())
}
