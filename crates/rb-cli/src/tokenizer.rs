//! `rb tokenizer`

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rb_data::corpus::CorpusOptions;
use rb_data::fertility::{self, FertilityOptions};
use rb_data::split::{Side, side_of};
use rb_data::{
    Corpus, Document, Language, Languages, ModelKind, Normalization, Splitter, Tokenizer, TokenizerConfig,
};
use rb_train::observe::TokenizerPage;

use crate::{Failure, stop};

#[derive(Subcommand)]
pub(crate) enum TokenizerCommand {
    /// Train a tokenizer and write tokenizer.json
    #[command(
        after_help = "Examples:\n  rb tokenizer train my_text/ --vocab-size 16000 --out tokenizer.json\n  \
        rb tokenizer train bn.jsonl en.jsonl --language bn,script=Bengali --language en,script=Latin,weight=2"
    )]
    Train(TrainArgs),
    /// Measure characters, bytes and words a token for each language, against floors
    #[command(after_help = "Examples:\n  rb tokenizer report tokenizer.json my_text/ --html report.html\n  \
        rb tokenizer report tokenizer.json bn.jsonl en.jsonl --held-out 0.1 \\\n    \
        --language bn,script=Bengali,floor=4.1 --language en,script=Latin,floor=4.0\n\n\
        Exit code 3: a declared language has fewer characters a token than its floor, or than half of the best one's.")]
    Report(ReportArgs),
    /// Write the token ids of each document as a line of JSON
    #[command(after_help = "Example:\n  rb tokenizer encode tokenizer.json my_text/ --out ids.jsonl")]
    Encode(EncodeArgs),
}

/// The text of a command and its languages.
#[derive(Args)]
pub(crate) struct TextArgs {
    /// .txt, .jsonl (.gz, .zst) and .parquet files, folders of them, and patterns.
    #[arg(required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// Field or column with the text.
    #[arg(long, value_name = "FIELD", default_value = "text")]
    pub(crate) text_field: String,
    /// A language of the text: NAME, then one of file=PATTERN, field=FIELD=VALUE and script=SCRIPT, and optionally
    /// weight=W and floor=CHARACTERS_A_TOKEN, with commas between. May be repeated.
    #[arg(long = "language", value_name = "NAME,KEY=VALUE,..")]
    pub(crate) languages: Vec<Language>,
}

impl TextArgs {
    /// The documents and the declared languages.
    pub(crate) fn open(&self) -> Result<(Corpus, Languages), Failure> {
        let languages = Languages::new(self.languages.clone()).map_err(|e| Failure::new(2, e.to_string()))?;
        let options = CorpusOptions {
            text_field: self.text_field.clone(),
            fields: languages.fields(),
            ..CorpusOptions::default()
        };
        Ok((Corpus::open_with(&self.data, options).map_err(Failure::failed)?, languages))
    }
}

#[derive(Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Entries, the 256 bytes and special tokens included.
    #[arg(long, default_value_t = 8192)]
    vocab_size: usize,
    /// How the vocabulary is learned.
    #[arg(long, value_enum, default_value_t = ModelArg::Bpe)]
    model: ModelArg,
    /// How text is cut before merges.
    #[arg(long, value_enum, default_value_t = SplitterArg::Rb)]
    splitter: SplitterArg,
    /// Unicode normalisation before encoding; with nfc, decoding gives the composed text.
    #[arg(long, value_enum, default_value_t = NormalizationArg::None)]
    normalization: NormalizationArg,
    /// A special token; the first one ends a document. May be repeated. Left out: <|endoftext|>.
    #[arg(long = "special-token", value_name = "TOKEN")]
    special_tokens: Vec<String>,
    /// How often a pair must occur to become an entry (BPE).
    #[arg(long, default_value_t = 2)]
    min_frequency: u64,
    /// Part of the documents, chosen by the hash of their text, that is not trained on.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    held_out: f64,
    /// File to write.
    #[arg(long, default_value = "tokenizer.json")]
    out: PathBuf,
}

#[derive(Args)]
pub(crate) struct ReportArgs {
    /// A tokenizer.json.
    tokenizer: PathBuf,
    #[command(flatten)]
    text: TextArgs,
    /// Measure only this part of the documents, chosen by the hash of their text: what `train` with the same value
    /// did not see.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    held_out: f64,
    /// Characters of each language to measure at most.
    #[arg(long, default_value_t = FertilityOptions::default().max_chars)]
    max_chars: u64,
    /// Also write a page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write the numbers as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct EncodeArgs {
    /// A tokenizer.json.
    tokenizer: PathBuf,
    #[command(flatten)]
    text: TextArgs,
    /// File to write: objects with `file`, `line` and `ids`.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum ModelArg {
    /// Byte-level BPE.
    Bpe,
    /// Unigram over bytes.
    Unigram,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum SplitterArg {
    /// Letters stay with their marks, joiners stay inside words.
    Rb,
    /// GPT-2's pattern, which cuts words at every combining mark.
    Gpt2,
    /// GPT-4's pattern, which cuts words at every combining mark too.
    #[value(name = "cl100k")]
    Cl100k,
    /// GPT-4o's pattern: marks stay, joiners cut.
    #[value(name = "o200k")]
    O200k,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum NormalizationArg {
    /// The text as it is: decoding gives back every byte.
    None,
    /// Composed characters.
    Nfc,
}

pub(crate) fn run(command: &TokenizerCommand) -> Result<(), Failure> {
    match command {
        TokenizerCommand::Train(args) => train(args),
        TokenizerCommand::Report(args) => report(args),
        TokenizerCommand::Encode(args) => encode(args),
    }
}

/// A part of the documents, as a number from 0 to 0.5.
pub(crate) fn checked_fraction(name: &str, value: f64) -> Result<f64, Failure> {
    if (0.0..=0.5).contains(&value) {
        return Ok(value);
    }
    Err(Failure::new(2, format!("{name} is {value}, expected a number from 0 to 0.5")))
}

fn train(args: &TrainArgs) -> Result<(), Failure> {
    let held_out = checked_fraction("--held-out", args.held_out)?;
    rb_data::atomic::check(&args.out).map_err(Failure::failed)?;
    let (corpus, languages) = args.text.open()?;
    let mut config = TokenizerConfig {
        vocab_size: args.vocab_size,
        model: match args.model {
            ModelArg::Bpe => ModelKind::Bpe,
            ModelArg::Unigram => ModelKind::Unigram,
        },
        splitter: match args.splitter {
            SplitterArg::Rb => Splitter::Rb,
            SplitterArg::Gpt2 => Splitter::Gpt2,
            SplitterArg::Cl100k => Splitter::Cl100k,
            SplitterArg::O200k => Splitter::O200k,
        },
        normalization: match args.normalization {
            NormalizationArg::None => Normalization::None,
            NormalizationArg::Nfc => Normalization::Nfc,
        },
        min_frequency: args.min_frequency,
        ..TokenizerConfig::default()
    };
    if !args.special_tokens.is_empty() {
        config.special_tokens.clone_from(&args.special_tokens);
    }
    let groups = languages.clone();
    let texts = corpus.read_ahead(move |document: &Document| {
        let kept = held_out == 0.0 || side_of(&document.text, held_out) == Side::Train;
        kept.then(|| groups.of(document).unwrap_or(usize::MAX))
    });
    let texts = texts.map(|item| item.map(|(document, language)| (document.text, language)));
    let (tokenizer, report) =
        Tokenizer::train_weighted(texts, &languages.weights(), &config).map_err(Failure::failed)?;
    let named = languages.list().iter().map(|l| l.name.as_str()).chain(["(no language)"]);
    let shares: Vec<_> = named.zip(&report.groups).collect();
    if let Some((name, _)) = shares.iter().take(languages.list().len()).find(|(_, g)| g.documents == 0) {
        let reason = "no document is in it; correct its file, field or script, or remove it";
        return Err(Failure::new(2, format!("language {name}: {reason}")));
    }
    tokenizer.save(&args.out).map_err(Failure::failed)?;
    println!(
        "{}: {} entries from {} documents, {} bytes",
        args.out.display(),
        report.vocab_size,
        report.documents,
        report.text_bytes
    );
    for (name, share) in shares.iter().filter(|(_, g)| !languages.is_empty() && g.documents > 0) {
        println!(
            "  {name}: {} documents, {} characters, each counted {:.2} times",
            share.documents, share.chars, share.factor
        );
    }
    if !report.is_full() {
        println!("the text gives no more; {} entries were asked for", report.requested_vocab_size);
    }
    Ok(())
}

fn report(args: &ReportArgs) -> Result<(), Failure> {
    let held_out = checked_fraction("--held-out", args.held_out)?;
    for path in args.html.iter().chain(&args.json) {
        rb_data::atomic::check(path).map_err(Failure::failed)?;
    }
    let tokenizer = Tokenizer::load(&args.tokenizer).map_err(Failure::failed)?;
    let (corpus, languages) = args.text.open()?;
    let options = FertilityOptions { held_out, max_chars: args.max_chars };
    let report = fertility::measure(corpus.documents_ahead(), &tokenizer, &languages, options)
        .map_err(Failure::failed)?;
    println!(
        "{}: {} {}, splitter {}, {}",
        args.tokenizer.display(),
        report.vocab_size,
        report.model,
        report.splitter,
        match report.round_trip_failures {
            0 => "every document comes back byte for byte".to_owned(),
            n => format!("{n} documents do not come back byte for byte"),
        }
    );
    println!(
        "{:<12} {:>5} {:>10} {:>11} {:>11} {:>11} {:>10} {:>6} {:>6}",
        "language",
        "docs",
        "chars",
        "chars/token",
        "bytes/token",
        "words/token",
        "pre-token",
        "vocab",
        "floor"
    );
    for l in &report.languages {
        println!(
            "{:<12} {:>5} {:>10} {:>11.2} {:>11.2} {:>11.2} {:>10.2} {:>5.1}% {:>6}{}",
            l.name,
            l.tally.documents,
            l.tally.chars,
            l.chars_per_token,
            l.bytes_per_token,
            l.words_per_token,
            l.chars_per_pretoken,
            100.0 * l.vocab_share,
            l.floor.map_or("-".to_owned(), |floor| format!("{floor:.2}")),
            if held_out > 0.0 && !l.held_out {
                "  (too little is held out: text that may be trained on)"
            } else {
                ""
            }
        );
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).map_err(Failure::failed)?;
        rb_data::atomic::write(path, format!("{text}\n").as_bytes()).map_err(Failure::failed)?;
    }
    if let Some(path) = &args.html {
        let title = args.tokenizer.display().to_string();
        TokenizerPage { title: &title, report: &report }.write(path).map_err(Failure::failed)?;
        println!("report: {}", path.display());
    }
    if let Some(name) = report.without_text.first() {
        return Err(Failure::new(
            2,
            format!("language {name}: no document is in it; correct its file, field or script"),
        ));
    }
    if report.refusals.is_empty() {
        return Ok(());
    }
    let reasons: Vec<&str> = report.refusals.iter().map(|r| r.message.as_str()).collect();
    Err(Failure::new(3, format!("the tokenizer was refused: {}", reasons.join("; "))))
}

fn encode(args: &EncodeArgs) -> Result<(), Failure> {
    let tokenizer = Tokenizer::load(&args.tokenizer).map_err(Failure::failed)?;
    let (corpus, _) = args.text.open()?;
    let stop = stop::on_signal("stopping, nothing is kept")?;
    let result = rb_data::atomic::replace(&args.out, |out| -> rb_data::Result<()> {
        rb_data::token_file::encode_ordered(corpus.documents_ahead(), &tokenizer, |document, ids| {
            stop::check(&stop)?;
            let file = document.file.display().to_string();
            let line = serde_json::json!({"file": file, "line": document.line, "ids": ids});
            writeln!(out, "{line}").map_err(|source| {
                let path = args.out.clone();
                rb_data::atomic::FileError { action: "write", path, source }.into()
            })
        })
    });
    result.map_err(stop::failure)
}
