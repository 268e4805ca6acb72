//! From text to token files: the tokenizer, the split and the two token files of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rb_data::fertility::{self, FertilityOptions, FertilityReport};
use rb_data::prepare::{Prepared, is_prepared};
use rb_data::{
    Corpus, CorpusOptions, Document, Languages, SplitConfig, SplitMode, SplitPlan, TokenData, Tokenizer,
    TokenizerConfig, token_file,
};

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
    if let Some(folder) = prepared_folder(config) {
        return prepare_from(config, folder, run, say);
    }
    let languages = Languages::new(config.data.languages.clone())?;
    let options = CorpusOptions {
        text_field: config.data.text_field.clone(),
        fields: languages.fields(),
        ..CorpusOptions::default()
    };
    let corpus = Corpus::open_with(&config.data.paths, options)?;
    let plan = plan(config, &corpus)?;
    let tokenizer = match &config.tokenizer.path {
        Some(path) => Tokenizer::load(path)?,
        None => train_tokenizer(config, &corpus, &plan, &languages, say)?,
    };
    // A model to start from may have more entries than its tokenizer.
    if config.run.init_from.is_none() {
        check_vocabulary(config.model.vocab_size, tokenizer.vocab_size())?;
    }
    if !languages.is_empty() {
        let held_out =
            if plan.mode() == SplitMode::Documents { config.data.validation_fraction } else { 0.0 };
        let options = FertilityOptions { held_out, ..FertilityOptions::default() };
        check_fertility(
            &fertility::measure(corpus.documents_ahead(), &tokenizer, &languages, options)?,
            say,
        )?;
    }
    tokenizer.save(run.tokenizer())?;
    let documents = corpus.documents_ahead().map(|d| d.map(|d| d.text));
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
    open(config, run)
}

/// The folder of `rb data prepare` that a config names as its data.
pub(crate) fn prepared_folder(config: &Config) -> Option<&Path> {
    config.data.paths.iter().map(PathBuf::as_path).find(|path| is_prepared(path))
}

/// Takes tokens and tokenizer of a prepared folder. The tokens stay where they are; the run keeps the tokenizer.
fn prepare_from(config: &Config, folder: &Path, run: &RunDir, say: &mut dyn FnMut(&str)) -> Result<Data> {
    let refuse = |origin: &str, reason: String| Err(TrainError::Config { origin: origin.into(), reason });
    if config.data.paths.len() > 1 {
        let reason =
            format!("{} is prepared data, which stands alone; prepare all text together", folder.display());
        return refuse("data.paths", reason);
    }
    let prepared = Prepared::open(folder)?;
    prepared.verify_checksums()?;
    if let Some(path) = &config.tokenizer.path
        && Tokenizer::load(path)?.sha256() != prepared.tokenizer.sha256()
    {
        let reason = format!(
            "{} is another tokenizer than that of {}; leave it out, or prepare the text again with it",
            path.display(),
            folder.display()
        );
        return refuse("tokenizer.path", reason);
    }
    let (train, held_out) = (&prepared.train, prepared.validation.as_ref());
    if !config.data.languages.is_empty() {
        let languages = Languages::new(config.data.languages.clone())?;
        if let Some(language) = languages.list().iter().find(|l| l.script.is_none()) {
            let reason = format!(
                "{} is told by file or field, which prepared data do not keep; declare it by script, or declare it to \
                 `rb data prepare`, which has the same gate",
                language.name
            );
            return refuse("data.languages", reason);
        }
        let documents = documents(held_out.unwrap_or(train), &prepared.tokenizer);
        let report =
            fertility::measure(documents, &prepared.tokenizer, &languages, FertilityOptions::default())?;
        check_fertility(&report, say)?;
    }
    check_vocabulary(config.model.vocab_size, prepared.tokenizer.vocab_size())?;
    prepared.tokenizer.save(run.tokenizer())?;
    let (held_out_tokens, held_out_documents) = held_out.map_or((0, 0), |v| (v.len(), v.num_documents()));
    say(&format!(
        "data: {}; {} characters; {} training tokens in {} documents, {held_out_tokens} held out in \
         {held_out_documents}; {:.2} characters a training token",
        folder.display(),
        train.text_chars() + held_out.map_or(0, TokenData::text_chars),
        train.len(),
        train.num_documents(),
        train.text_chars() as f64 / train.len().max(1) as f64
    ));
    if held_out.is_none() {
        say("data: no text is held out, so there is no validation loss");
    }
    Ok(data_of(prepared))
}

fn data_of(prepared: Prepared) -> Data {
    Data {
        train: Arc::new(prepared.train),
        validation: prepared.validation.map(Arc::new),
        tokenizer: prepared.tokenizer,
    }
}

/// The documents of a stream as text.
fn documents<'d>(
    data: &'d TokenData,
    tokenizer: &'d Tokenizer,
) -> impl Iterator<Item = rb_data::Result<Document>> + 'd {
    (0..data.num_documents()).map(move |document| {
        let start = data.document_start(document).unwrap_or_default();
        // The last token of a document ends it.
        let end = data.document_start(document + 1).unwrap_or(data.len()).saturating_sub(1);
        let ids: Vec<u32> = (start..end).filter_map(|index| data.get(index)).collect();
        let text = tokenizer.decode(&ids)?;
        Ok(Document { text, file: data.path().into(), line: document + 1, fields: Vec::new() })
    })
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

/// Opens the token files and the tokenizer of a run, with their checksums: those that it wrote earlier, or those of
/// the prepared folder that its config names.
pub fn open(config: &Config, run: &RunDir) -> Result<Data> {
    if let Some(folder) = prepared_folder(config) {
        let prepared = Prepared::open(folder)?;
        prepared.verify_checksums()?;
        if Tokenizer::load(run.tokenizer())?.sha256() != prepared.tokenizer.sha256() {
            return Err(TrainError::Config {
                origin: folder.display().to_string(),
                reason: "was prepared again with another tokenizer since this run began; start a new run"
                    .into(),
            });
        }
        return Ok(data_of(prepared));
    }
    // A run on prepared data has no tokens of its own.
    if !run.train_tokens().exists()
        && let Some(path) = config.data.paths.iter().find(|path| !path.exists())
    {
        return Err(rb_data::DataError::NotFound { path: path.clone() }.into());
    }
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
    Ok(SplitPlan::new(corpus.documents_ahead(), split)?)
}

/// Says what each declared language gets, and refuses a tokenizer that serves one too badly.
///
/// # Errors
/// [`TrainError::Gate`] with the cause for each such language; [`TrainError::Config`] for a language without text.
pub fn check_fertility(report: &FertilityReport, say: &mut dyn FnMut(&str)) -> Result<()> {
    if let Some(name) = report.without_text.first() {
        return Err(TrainError::Config {
            origin: format!("language {name}"),
            reason: "no document is in it; correct its file, field or script, or remove it".into(),
        });
    }
    for language in &report.languages {
        say(&format!(
            "language {}: {:.2} characters, {:.2} bytes and {:.2} words a token{}",
            language.name,
            language.chars_per_token,
            language.bytes_per_token,
            language.words_per_token,
            if language.held_out { " of held-out text" } else { "" }
        ));
    }
    if report.refusals.is_empty() {
        return Ok(());
    }
    let reasons: Vec<&str> = report.refusals.iter().map(|r| r.message.as_str()).collect();
    Err(TrainError::Gate { reason: format!("the tokenizer was refused: {}", reasons.join("; ")) })
}

/// Trains on the training side only: held-out text must not shape the vocabulary it is judged with.
fn train_tokenizer(
    config: &Config,
    corpus: &Corpus,
    plan: &SplitPlan,
    languages: &Languages,
    say: &mut dyn FnMut(&str),
) -> Result<Tokenizer> {
    let settings = TokenizerConfig {
        vocab_size: config.tokenizer.vocab_size,
        model: config.tokenizer.model,
        splitter: config.tokenizer.splitter,
        normalization: config.tokenizer.normalization,
        ..TokenizerConfig::default()
    };
    let texts = corpus.documents_ahead().map(|document| {
        let document = document?;
        let language = languages.of(&document).unwrap_or(usize::MAX);
        Ok((plan.split(&document.text).0.to_string(), language))
    });
    let (tokenizer, _) = Tokenizer::train_weighted(texts, &languages.weights(), &settings)?;
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
