//! `rb eval`

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rb_autograd::{ParamBuilder, ParamStore};
use rb_data::prepare::{Prepared, is_prepared};
use rb_data::{Corpus, CorpusOptions, TokenData, Tokenizer};
use rb_eval::results::{Results, Run};
use rb_eval::{Accuracy, ChoiceReport, Judge, LanguageReport, Text, Unigram, answer, judge_texts};
use rb_nn::CausalLm;
use rb_tensor::{Device, Rng};

use crate::cli::{EvalArgs, NamedPath, TaskFile};
use crate::progress::Counter;
use crate::{Failure, model};

/// Tokens read at once: enough to keep a device busy, few enough for its memory.
const CPU_TOKENS: usize = 2048;
const GPU_TOKENS: usize = 16_384;

pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    if args.data.is_empty() && args.task.is_empty() && !args.held_out {
        let what = "say what to judge with: --held-out or --data [NAME=]PATH for text, --task KIND=FILE for questions";
        return Err(Failure::new(2, what));
    }
    let started = Instant::now();
    for path in args.out.iter().chain(&args.samples) {
        rb_data::atomic::check(path).map_err(Failure::failed)?;
    }
    // Files are read before the model: a typing error costs no time.
    let mut texts = read_texts(&args.data, args.language_field.as_deref())?;
    let tasks =
        args.task.iter().map(|task| Ok((task, questions(task)?))).collect::<Result<Vec<_>, Failure>>()?;
    let folder = model::folder(&args.model)?;
    let (lm, params) = model::load_on(&folder, &args.place)?;
    let tokenizer = model::tokenizer(&folder, lm.config())?;
    let device = params.arena().device();
    let usual = if device == Device::Cpu { CPU_TOKENS } else { GPU_TOKENS };
    let batch_tokens = args.batch_tokens.map_or(usual, |tokens| tokens as usize);
    let judge = Judge::new(&lm, &params, batch_tokens);
    let needs_run = args.held_out || !texts.is_empty();
    let run = if needs_run { RunTokens::open(&args.model, &tokenizer)? } else { RunTokens::default() };
    if args.held_out {
        texts.extend(held_out(&args.model, run.validation.as_ref(), &tokenizer)?);
    }
    let mut results = Results::default();
    if !texts.is_empty() {
        let twin = twin(&lm, &params, args.twin_seed)?;
        let twin = Judge::new(&lm, &twin, batch_tokens);
        let unigram = run.train.as_ref().map(|data| Unigram::of_training(data, lm.config().vocab_size));
        let mut counter = Counter::new("held-out text");
        let judged = judge_texts((&judge, &twin), &tokenizer, &texts, unigram, &mut |done, all| {
            counter.show(done, all);
        });
        counter.finish();
        let (reports, unigram) = judged.map_err(failure)?;
        print_languages(&reports, &unigram);
        reports.iter().for_each(|report| results.add_language(report, &unigram.source));
    }
    let mut samples = Vec::new();
    for (task, questions) in &tasks {
        let limit = args.limit.map_or(usize::MAX, |limit| limit as usize);
        let taken = &questions[..limit.min(questions.len())];
        let mut counter = Counter::new(&task.name);
        let answered = answer(&judge, &tokenizer, taken, task.kind.has_lengths(), &mut |done, all| {
            counter.show(done, all);
        });
        counter.finish();
        let report = answered.map_err(failure)?;
        print_choices(&task.name, &report);
        samples.extend(report.questions.iter().enumerate().map(|(number, question)| {
            let resps: Vec<f64> = question.costs.iter().map(|cost| -cost).collect();
            let picks = question.picks;
            serde_json::json!({
                "task": task.name, "doc_id": number, "target": question.answer, "resps": resps,
                "acc": f64::from(picks[0] == question.answer), "picks": picks,
            })
        }));
        results.add_choices(&task.name, task.kind, &report, questions.len());
    }
    let run = Run {
        model: folder.display().to_string(),
        device: device.to_string(),
        parameters: params.layout().num_parameters(),
        limit: args.limit.map(|limit| limit as usize),
        date: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        seconds: started.elapsed().as_secs_f64(),
    };
    if let Some(path) = &args.samples {
        let lines: String = samples.iter().map(|sample| format!("{sample}\n")).collect();
        write(path, &lines)?;
    }
    if let Some(path) = &args.out {
        write(path, &format!("{:#}\n", results.to_json(&run)))?;
        println!("results: {}", path.display());
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    rb_data::atomic::write(path, text.as_bytes()).map_err(Failure::failed)
}

/// A figure that is refused leaves as every gate does.
fn failure(error: rb_eval::EvalError) -> Failure {
    let code = if matches!(error, rb_eval::EvalError::Refused(_)) { 3 } else { 1 };
    Failure::new(code, error.to_string())
}

fn questions(task: &TaskFile) -> Result<Vec<rb_eval::Question>, Failure> {
    task.kind.read(&task.path).map_err(failure)
}

/// Every document under the value of `field`, under the name given for its path, or under the name of its file: the first
/// of these that it has.
fn read_texts(paths: &[NamedPath], field: Option<&str>) -> Result<Vec<Text>, Failure> {
    let mut texts = Vec::new();
    for NamedPath { name, path } in paths {
        let options =
            CorpusOptions { fields: field.map(str::to_string).into_iter().collect(), ..Default::default() };
        let corpus = Corpus::open_with(std::slice::from_ref(path), options).map_err(Failure::failed)?;
        for document in corpus.documents() {
            let document = document.map_err(Failure::failed)?;
            let stem = || document.file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let value = document.fields.first().map(|(_, value)| value.clone());
            let language = value.or_else(|| name.clone()).unwrap_or_else(stem);
            texts.push(Text { language, text: document.text });
        }
    }
    Ok(texts)
}

/// The same model with the weights that training would start from.
fn twin(lm: &CausalLm, params: &ParamStore, seed: u64) -> Result<ParamStore, Failure> {
    let mut builder = ParamBuilder::default();
    CausalLm::init(lm.config(), &mut builder).map_err(Failure::failed)?;
    let twin = builder.build(&Rng::new(seed).fork("weights"), Device::Cpu).map_err(Failure::failed)?;
    let mut twin = twin.to_device(params.arena().device()).map_err(Failure::failed)?;
    twin.set_precision(params.precision()).map_err(Failure::failed)?;
    Ok(twin)
}

/// A file of the run that a model belongs to: of the run given, or of the run whose checkpoint is given.
fn run_file(given: &Path, name: &str) -> Option<PathBuf> {
    let runs = [Some(given), given.parent().and_then(Path::parent)].into_iter().flatten();
    runs.map(|run| run.join(name)).find(|path| path.is_file())
}

/// Tokens of the run that a model belongs to: its own files, or the prepared data that it was trained on.
#[derive(Default)]
struct RunTokens {
    train: Option<TokenData>,
    validation: Option<TokenData>,
}

impl RunTokens {
    fn open(given: &Path, tokenizer: &Tokenizer) -> Result<RunTokens, Failure> {
        let own = |name| {
            run_file(given, name).map(|path| TokenData::open(&path).map_err(Failure::failed)).transpose()
        };
        let mut run = RunTokens { train: own("data/train.bin")?, validation: own("data/validation.bin")? };
        if run.train.is_none()
            && let Some(config) = run_file(given, "config.toml")
            && let config = rb_train::config::load(&config, &[])?
            && let Some(folder) = config.data.paths.iter().find(|path| is_prepared(path))
        {
            let prepared = Prepared::open(folder).map_err(Failure::failed)?;
            run = RunTokens { train: Some(prepared.train), validation: prepared.validation };
        }
        for data in run.train.iter().chain(&run.validation) {
            data.check_tokenizer(tokenizer).map_err(Failure::failed)?;
        }
        Ok(run)
    }
}

/// The documents of the run's validation side, as text again.
fn held_out(given: &Path, data: Option<&TokenData>, tokenizer: &Tokenizer) -> Result<Vec<Text>, Failure> {
    let Some(data) = data else {
        let what = "belongs to no run that held text out; name a text with --data";
        return Err(Failure::new(2, format!("{}: {what}", given.display())));
    };
    let mut texts = Vec::new();
    for document in 0..data.num_documents() {
        let start = data.document_start(document).unwrap_or(0);
        let end = data.document_start(document + 1).unwrap_or(data.len());
        let ids: Vec<u32> =
            (start..end).filter_map(|i| data.get(i)).filter(|id| *id != data.eos_id()).collect();
        let text = tokenizer.decode(&ids).map_err(Failure::failed)?;
        texts.push(Text { language: "held_out".into(), text });
    }
    Ok(texts)
}

fn print_languages(reports: &[LanguageReport], unigram: &Unigram) {
    println!(
        "held-out text, nats a token (bits a byte); each document after an end token, windows of the model's positions"
    );
    let width = reports.iter().map(|r| r.language.chars().count()).max().unwrap_or(0).max(8);
    println!(
        "{:width$} {:>9} {:>9} {:>10} {:>17} {:>17} {:>17} {:>17}",
        "language", "documents", "tokens", "perplexity", "model", "unigram", "uniform", "random twin"
    );
    for report in reports {
        let shown = |cost: &rb_eval::Cost| {
            format!("{:.4} ({:.4})", cost.nats_per_token.get(), cost.bits_per_byte.get())
        };
        let [(_, uniform), (_, unigram), (_, twin)] = &report.baselines;
        println!(
            "{:width$} {:>9} {:>9} {:>10.3} {:>17} {:>17} {:>17} {:>17}",
            report.language,
            report.documents,
            report.tokens,
            report.model.perplexity.get(),
            shown(&report.model),
            shown(unigram),
            shown(uniform),
            shown(twin)
        );
    }
    println!("unigram: from {}", unigram.source);
    for report in reports {
        let lost = report.not_beaten();
        if !lost.is_empty() {
            println!("{}: the model does not beat: {}", report.language, names(&lost));
        }
    }
}

fn names(baselines: &[rb_eval::Baseline]) -> String {
    let name = |baseline: &rb_eval::Baseline| match baseline {
        rb_eval::Baseline::Uniform => "uniform",
        rb_eval::Baseline::Unigram => "unigram",
        rb_eval::Baseline::Twin => "random twin",
    };
    baselines.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn print_choices(name: &str, report: &ChoiceReport) {
    let count = report.questions.len();
    println!("{name}: {count} questions, chance {:.4}", report.chance.get());
    let line = |rule: &str, what: &str, accuracy: &Accuracy| {
        let stderr = accuracy.stderr.map_or("n/a".into(), |stderr| format!("{:.4}", stderr.get()));
        println!("  {rule:<9} {:.4} +- {stderr}  {}  ({what})", accuracy.value.get(), accuracy.verdict);
    };
    line("acc", "the likeliest choice", &report.acc);
    if let Some(accuracy) = &report.acc_norm {
        line("acc_norm", "by log-likelihood a character", accuracy);
    }
    if let Some(accuracy) = &report.acc_bytes {
        line("acc_bytes", "by log-likelihood a byte", accuracy);
    }
}
