//! From text to token files: the tokenizer, the split and the two token files of a run.

use std::path::Path;
use std::sync::Arc;

use rb_data::{Corpus, SplitConfig, SplitPlan, TokenData, Tokenizer, TokenizerConfig, corpus, token_file};

use crate::config::Config;
use crate::run_dir::RunDir;
use crate::{Result, TrainError};

/// Tokens of a run and the tokenizer that made them.
pub struct Data {
    /// Training side.
    pub train: Arc<TokenData>,
    /// Held-out side, if any.
    pub validation: Option<Arc<TokenData>>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

/// Reads the config's text, gets the tokenizer and writes the run's token files; `say` gets a line for each
/// thing a user should know.
pub fn prepare(config: &Config, run: &RunDir, say: &mut dyn FnMut(&str)) -> Result<Data> {
    if config.data.paths.is_empty() {
        return Err(TrainError::Config {
            origin: "data.paths".into(),
            reason: "no text is given; add paths to [data] in the config, or pass --data FILE_OR_FOLDER"
                .into(),
        });
    }
    let corpus = corpus::open(&config.data.paths)?;
    let plan = plan(config, &corpus)?;
    let tokenizer = match &config.tokenizer.path {
        Some(path) => Tokenizer::load(path)?,
        None => train_tokenizer(config, &corpus, &plan, say)?,
    };
    // A model to start from may have more entries than its tokenizer.
    if config.run.init_from.is_none() {
        check_vocabulary(config.model.vocab_size, tokenizer.vocab_size())?;
    }
    tokenizer.save(run.tokenizer())?;
    let documents = corpus.documents().map(|d| d.map(|d| d.text));
    let (train, validation) =
        token_file::build_split(documents, &tokenizer, &plan, run.train_tokens(), run.validation_tokens())?;
    let held_out = validation.as_ref().map_or((0, 0, 0), |v| (v.documents, v.tokens, v.text_chars));
    let chars = train.text_chars + held_out.2;
    say(&format!(
        "data: {chars} characters; {} training tokens in {} documents, {} held out in {}; {:.2} characters a \
         training token",
        train.tokens,
        train.documents,
        held_out.1,
        held_out.0,
        train.text_chars as f64 / train.tokens.max(1) as f64
    ));
    if validation.is_none() {
        say("data: no text is held out, so there is no validation loss");
    }
    open(run)
}

/// The tokenizer sets the size of the vocabulary; another one in the config is a mistake, not a wish.
fn check_vocabulary(stated: usize, entries: usize) -> Result<()> {
    if stated == 0 || stated == entries {
        return Ok(());
    }
    Err(TrainError::Config {
        origin: "model.vocab_size".into(),
        reason: format!(
            "{stated} is asked for, but the tokenizer has {entries} entries; leave it out: the tokenizer sets it"
        ),
    })
}

/// Opens the token files and the tokenizer that a run wrote earlier, with their checksums.
pub fn open(run: &RunDir) -> Result<Data> {
    let tokenizer = Tokenizer::load(run.tokenizer())?;
    let read = |path: &Path| -> Result<Arc<TokenData>> {
        let data = TokenData::open(path)?;
        data.verify_checksum()?;
        data.check_tokenizer(&tokenizer)?;
        Ok(Arc::new(data))
    };
    let train = read(&run.train_tokens())?;
    let held_out = run.validation_tokens();
    let validation = if held_out.exists() { Some(read(&held_out)?) } else { None };
    Ok(Data { train, validation, tokenizer })
}

fn plan(config: &Config, corpus: &Corpus) -> Result<SplitPlan> {
    let split = SplitConfig { val_fraction: config.data.validation_fraction };
    Ok(SplitPlan::new(corpus.documents(), split)?)
}

/// Trains on the training side only: held-out text must not shape the vocabulary it is judged with.
fn train_tokenizer(
    config: &Config,
    corpus: &Corpus,
    plan: &SplitPlan,
    say: &mut dyn FnMut(&str),
) -> Result<Tokenizer> {
    let settings = TokenizerConfig {
        vocab_size: config.tokenizer.vocab_size,
        splitter: config.tokenizer.splitter.into(),
        ..TokenizerConfig::default()
    };
    let texts = corpus.documents().map(|d| d.map(|d| plan.split(&d.text).0.to_string()));
    let (tokenizer, _) = Tokenizer::train(texts, &settings)?;
    let reached = tokenizer.vocab_size();
    say(&format!("tokenizer: {reached} entries trained"));
    if reached < settings.vocab_size {
        say(&format!(
            "tokenizer: the text gives only {reached} of the {} entries asked for; a smaller tokenizer.vocab_size loses nothing",
            settings.vocab_size
        ));
    }
    Ok(tokenizer)
}
