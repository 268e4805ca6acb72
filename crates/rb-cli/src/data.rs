//! `rb data`

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use rb_data::corpus::CorpusOptions;
use rb_data::examine::{Examination, examine};
use rb_data::fertility::{self, FertilityOptions};
use rb_data::prepare::{
    self, BinFormat, Counts, Import, Item, Mixture, MixtureUnit, PrepareOptions, Prepared, PreparedIndex,
    Progress, Short, SideName,
};
use rb_data::{Corpus, Language, Languages, LoaderConfig, SplitConfig, Tokenizer};
use rb_train::forecast::EPOCHS;
use rb_train::prepare::check_fertility;

use crate::tokenizer::checked_fraction;
use crate::{Failure, stop};

/// Longest `.txt` file that is one document: its text and ids are in memory at once.
const MAX_TXT_BYTES: u64 = 256 << 20;

#[derive(Subcommand)]
pub(crate) enum DataCommand {
    /// Tokenise text into a folder that `rb train` takes as data
    #[command(
        after_help = "Examples:\n  rb data prepare my_text/ --tokenizer tokenizer.json --out prepared\n  \
        rb data prepare 'crawl/*.jsonl.zst' books.parquet --tokenizer tokenizer.json --out prepared \\\n    \
        --language bn,field=lang=bn,floor=3 --language en,field=lang=en --mixture tokens\n  \
        rb data prepare train.bin --tokenizer gpt2/tokenizer.json --out prepared\n\n\
        Exit code 3: a declared language has fewer characters a token than its floor, or than half of the best one's."
    )]
    Prepare(Box<PrepareArgs>),
    /// Prove that each token of a prepared folder is a target once an epoch, and look at the order
    #[command(after_help = "Example:\n  rb data check prepared --seq-len 1024\n\n\
        Exit code 3: the stream is sorted or repeats itself.")]
    Check(CheckArgs),
}

#[derive(Args)]
pub(crate) struct PrepareArgs {
    /// .txt, .jsonl (.gz, .zst) and .parquet files, folders of them, and patterns; or .bin files of llm.c, nanoGPT and
    /// Megatron.
    #[arg(required = true)]
    data: Vec<PathBuf>,
    /// The tokenizer.json to encode with, or that .bin files were made with.
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Folder to make.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Field or column with the text.
    #[arg(long, value_name = "FIELD", default_value = "text")]
    text_field: String,
    /// A language of the text: NAME, then one of file=PATTERN, field=FIELD=VALUE and script=SCRIPT, and optionally
    /// weight=W and floor=CHARACTERS_A_TOKEN, with commas between. May be repeated.
    #[arg(long = "language", value_name = "NAME,KEY=VALUE,..")]
    languages: Vec<Language>,
    /// Put the languages into the training stream in the ratio of their weights, as parts of bytes or of tokens.
    /// Left out: as they come.
    #[arg(long, value_enum, value_name = "UNIT")]
    mixture: Option<UnitArg>,
    /// Where a language has less than its part: repeat its documents, or drop documents of the others.
    #[arg(long, value_enum, default_value_t = ShortArg::Repeat, requires = "mixture")]
    short: ShortArg,
    /// Part of the documents that is held out, chosen by the hash of their text.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    validation_fraction: f64,
    /// Keep documents whose text has come before.
    #[arg(long)]
    keep_duplicates: bool,
    /// Keep training documents in the order they are read in.
    #[arg(long)]
    no_shuffle: bool,
    /// Seed of the order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Tokens of a file.
    #[arg(long, value_name = "TOKENS", default_value_t = PrepareOptions::default().shard_tokens)]
    shard_tokens: u64,
    /// What .bin files are; told from the file if left out, which is not possible for nanogpt.
    #[arg(long, value_enum, value_name = "FORMAT")]
    bin: Option<BinArg>,
}

#[derive(Args)]
pub(crate) struct CheckArgs {
    /// Folder that `rb data prepare` made.
    folder: PathBuf,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 1024)]
    seq_len: usize,
    /// Keep documents apart, as data.document_mask does.
    #[arg(long)]
    document_mask: bool,
    /// Look at the order of the file, as data.shuffle=false trains.
    #[arg(long)]
    no_shuffle: bool,
    /// Seed of the order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum UnitArg {
    Bytes,
    Tokens,
}

#[derive(Clone, Copy, ValueEnum)]
enum ShortArg {
    Repeat,
    Drop,
}

#[derive(Clone, Copy, ValueEnum)]
enum BinArg {
    #[value(name = "llmc")]
    LlmC,
    #[value(name = "nanogpt")]
    NanoGpt,
    Megatron,
}

pub(crate) fn run(command: &DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Prepare(args) => prepare(args),
        DataCommand::Check(args) => check(args),
    }
}

fn is_bin(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("bin"))
}

fn prepare(args: &PrepareArgs) -> Result<(), Failure> {
    let val_fraction = checked_fraction("--validation-fraction", args.validation_fraction)?;
    let languages = Languages::new(args.languages.clone()).map_err(|e| Failure::new(2, e.to_string()))?;
    if args.mixture.is_some() && languages.is_empty() {
        return Err(Failure::new(
            2,
            "--mixture needs languages: declare each with --language NAME,KEY=VALUE",
        ));
    }
    // Before anything is read: a long preparation must not end here.
    if args.out.exists() {
        let reason = "exists already: choose another folder, or remove it first";
        return Err(Failure::new(2, format!("{} {reason}", args.out.display())));
    }
    let tokenizer = Tokenizer::load(&args.tokenizer).map_err(Failure::failed)?;
    let (bins, texts): (Vec<PathBuf>, Vec<PathBuf>) =
        args.data.iter().cloned().partition(|path| is_bin(path));
    let format = args.bin.map(|bin| match bin {
        BinArg::LlmC => BinFormat::LlmC,
        BinArg::NanoGpt => BinFormat::NanoGpt,
        BinArg::Megatron => BinFormat::Megatron,
    });
    let imports: Vec<Import> = bins
        .iter()
        .map(|path| Import::open(path, format))
        .collect::<Result<_, _>>()
        .map_err(Failure::failed)?;
    let options = CorpusOptions {
        text_field: args.text_field.clone(),
        fields: languages.fields(),
        max_txt_bytes: MAX_TXT_BYTES,
        ..CorpusOptions::default()
    };
    let corpus = match texts.is_empty() {
        true => None,
        false => Some(Corpus::open_with(&texts, options).map_err(Failure::failed)?),
    };
    let items = || {
        let texts = corpus.iter().flat_map(Corpus::documents_ahead);
        let texts = texts.map(|d| d.map(|document| Item { document, ids: None }));
        texts.chain(imports.iter().flat_map(|import| import.items(&tokenizer)))
    };
    if !languages.is_empty() {
        // The gate comes first: it reads only as much of each language as it needs to judge.
        let options = FertilityOptions { held_out: val_fraction, ..FertilityOptions::default() };
        let documents = items().map(|item| item.map(|item| item.document));
        let report =
            fertility::measure(documents, &tokenizer, &languages, options).map_err(Failure::failed)?;
        check_fertility(&report, &mut |line| println!("{line}"))?;
    }
    let options = PrepareOptions {
        split: SplitConfig { val_fraction },
        deduplicate: !args.keep_duplicates,
        mixture: args.mixture.map(|unit| Mixture {
            unit: match unit {
                UnitArg::Bytes => MixtureUnit::Bytes,
                UnitArg::Tokens => MixtureUnit::Tokens,
            },
            short: match args.short {
                ShortArg::Repeat => Short::Repeat,
                ShortArg::Drop => Short::Drop,
            },
        }),
        shuffle: !args.no_shuffle,
        seed: args.seed,
        shard_tokens: args.shard_tokens,
    };
    let mut meter = Meter::new();
    let stop = stop::on_signal("stopping, nothing is kept")?;
    let progress = &mut |progress| {
        meter.show(progress);
        stop::check(&stop)
    };
    let index = prepare::prepare(items(), &tokenizer, &languages, &options, &args.out, progress)
        .map_err(stop::failure)?;
    meter.end();
    describe(&index);
    println!("prepared: {} in {:.1} s", args.out.display(), meter.started.elapsed().as_secs_f64());
    Ok(())
}

/// Prints what a prepared folder holds.
fn describe(index: &PreparedIndex) {
    println!(
        "read {} documents, {} bytes; left out {} repeated ones, {} bytes",
        index.documents_read, index.bytes_read, index.duplicates, index.duplicate_bytes
    );
    let line = |name: &str, counts: &Counts| {
        println!(
            "  {name:<24} {:>10} documents {:>13} bytes {:>13} characters {:>12} tokens",
            counts.documents, counts.bytes, counts.chars, counts.tokens
        );
    };
    for (side, name) in [(SideName::Train, "training"), (SideName::Validation, "held out")] {
        line(name, &index.total(side));
        for language in index.languages.iter().filter(|_| index.languages.len() > 1) {
            let of = language.language.as_ref().map_or("(no language)", |l| l.name.as_str());
            let counts = if side == SideName::Train { language.train } else { language.validation };
            let times = match side {
                SideName::Train if language.repeats != 1.0 => {
                    format!("  {of} ({:.2} times)", language.repeats)
                }
                _ => format!("  {of}"),
            };
            line(&times, &counts);
            if side == SideName::Train && language.repeats > EPOCHS {
                println!(
                    "    {of} is repeated {:.1} times: a model gains little from so many passes",
                    language.repeats
                );
            }
        }
    }
    if let Some(mixture) = index.mixture {
        let unit = if mixture.unit == MixtureUnit::Bytes { "bytes" } else { "tokens" };
        println!("  mixture: weights are parts of {unit} of the training text");
    }
    if index.total(SideName::Validation).documents == 0 {
        println!("  no text is held out, so there is no validation loss");
    }
}

/// Shows progress on standard error: one line that is written over on a terminal, a line now and then elsewhere.
struct Meter {
    started: Instant,
    shown: Instant,
    terminal: bool,
}

impl Meter {
    fn new() -> Self {
        let now = Instant::now();
        Self { started: now, shown: now, terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, progress: Progress) {
        let pause = Duration::from_millis(if self.terminal { 200 } else { 10_000 });
        if self.shown.elapsed() < pause {
            return;
        }
        self.shown = Instant::now();
        let seconds = self.started.elapsed().as_secs_f64();
        let bytes = progress.bytes as f64 / 1e6;
        let line = match progress.writing {
            false => format!(
                "read {} documents, {bytes:.1} MB, {} tokens, {:.1} MB/s",
                progress.documents,
                progress.tokens,
                bytes / seconds
            ),
            true => format!("wrote {} tokens", progress.tokens),
        };
        // A terminal that has gone away does not stop the work.
        let _ = match self.terminal {
            true => write!(std::io::stderr(), "\r{line:<79}"),
            false => writeln!(std::io::stderr(), "{line}"),
        };
    }

    fn end(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r{:<79}\r", "");
        }
    }
}

fn check(args: &CheckArgs) -> Result<(), Failure> {
    if !prepare::is_prepared(&args.folder) {
        let reason = "is not a folder of `rb data prepare` (it has no index.json of one); give one, or prepare the text first";
        return Err(Failure::new(2, format!("{}: {reason}", args.folder.display())));
    }
    let prepared = Prepared::open(&args.folder).map_err(Failure::failed)?;
    prepared.verify_checksums().map_err(Failure::failed)?;
    let config = LoaderConfig {
        seq_len: args.seq_len,
        document_mask: args.document_mask,
        shuffle: !args.no_shuffle,
        seed: args.seed,
        ..LoaderConfig::default()
    };
    let repeats = prepared.index.mixture.is_some();
    println!("{}: {} files, checksums hold", args.folder.display(), prepared.index.shards.len());
    let mut flags = Vec::new();
    let mut all = serde_json::Map::new();
    let sides = [("training", Some(prepared.train)), ("held out", prepared.validation)];
    for (name, data) in sides.into_iter().filter_map(|(name, data)| Some((name, Arc::new(data?)))) {
        // Held-out text is read in the order of its file, once, and order means nothing for it.
        let shuffle = config.shuffle && name == "training";
        let found =
            examine(data, &LoaderConfig { shuffle, ..config.clone() }, repeats).map_err(Failure::failed)?;
        say(name, &found, name == "training");
        if name == "training" {
            flags.extend(found.flags.iter().cloned());
        }
        all.insert(name.replace(' ', "_"), serde_json::to_value(&found).map_err(Failure::failed)?);
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&all).map_err(Failure::failed)?;
        rb_data::atomic::write(path, format!("{text}\n").as_bytes()).map_err(Failure::failed)?;
    }
    match flags.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(3, format!("the training stream was refused: {}", flags.join("; ")))),
    }
}

fn say(name: &str, found: &Examination, with_order: bool) {
    let (coverage, order) = (&found.coverage, &found.order);
    println!(
        "{name}: each of {} tokens is a target once an epoch, {} dropped, in {} sequences with {} padded positions",
        coverage.valid + coverage.dropped,
        coverage.dropped,
        coverage.sequences,
        coverage.padded
    );
    if !with_order {
        return;
    }
    println!(
        "  order of the file: lengths correlate {:.2}, {:.0} % of neighbours ascend, halves differ {:.1} times as much \
         as odd and even sequences",
        order.length_correlation,
        100.0 * order.ascending,
        order.file_drift
    );
    println!(
        "  order of an epoch: correlates {:.2} with the file, halves differ {:.1} times as much",
        order.epoch_correlation, order.epoch_drift
    );
    println!(
        "  repeated: {:.2} % of tokens in documents, {:.2} % of sequences",
        100.0 * order.repeated_documents,
        100.0 * order.repeated_sequences
    );
    for note in &found.notes {
        println!("  note: {note}");
    }
    for flag in &found.flags {
        println!("  flag: {flag}");
    }
}
