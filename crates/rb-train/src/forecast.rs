//! What a run will take in time and money, from its config, its text and speeds that were measured.

use std::fmt::Write as _;
use std::path::Path;

use rb_data::prepare::Prepared;
use rb_data::{Corpus, Tokenizer, corpus};
use rb_nn::flops_per_token;
use serde::Deserialize;

use crate::config::{Config, Precision};
use crate::observe::grouped;
use crate::{Result, TrainError, plan, prepare};

/// Speeds that this project measured, in bf16, a line each.
const MEASURED: &str = include_str!("../measured/throughput.jsonl");

/// Tokens for each parameter at which a given amount of arithmetic gives the lowest loss.
/// **Source** arXiv:2203.15556.
const CHINCHILLA: f64 = 20.0;

/// Passes over the same text that are worth nearly as much as new text; after 40 they are worth nothing.
/// **Source** arXiv:2305.16264.
pub const EPOCHS: f64 = 4.0;

/// Text that is read to learn how many bytes a token takes.
const SAMPLE_BYTES: usize = 1 << 20;

/// Bytes a token, where no tokenizer is there yet.
const BYTES_PER_TOKEN: f64 = 4.0;

/// What may be spent, and on what.
#[derive(Clone, Debug)]
pub struct Question {
    /// Product name of the card, or a part of it.
    pub card: String,
    /// Speeds of the user's own, as `bench --json` prints them, instead of the shipped ones.
    pub measured: Option<std::path::PathBuf>,
    /// Tokens a second, instead of any measurement.
    pub tokens_per_s: Option<f64>,
    /// Hours of one card.
    pub hours: Option<f64>,
    /// Money, in the currency of `price`.
    pub money: Option<f64>,
    /// Money for an hour of one card.
    pub price: Option<f64>,
}

/// A measured speed.
#[derive(Clone, Debug, Deserialize)]
struct Speed {
    card: String,
    commit: String,
    flops_per_token: f64,
    batch_size: usize,
    seq_len: usize,
    tokens_per_s: f64,
}

impl Speed {
    fn step_flops(&self) -> f64 {
        self.flops_per_token * (self.batch_size * self.seq_len) as f64
    }

    fn flops_per_s(&self) -> f64 {
        self.flops_per_token * self.tokens_per_s
    }
}

/// A speed, and how it is known.
#[derive(Clone, Debug)]
struct Expected {
    tokens_per_s: f64,
    source: String,
}

/// Tokens of the run's text.
#[derive(Clone, Debug)]
struct TextSize {
    tokens: f64,
    source: String,
}

/// What a run takes; made by [`forecast`].
#[derive(Debug)]
pub struct Forecast {
    num_parameters: usize,
    step_tokens: f64,
    max_steps: u64,
    flops_per_token: f64,
    speed: std::result::Result<Expected, String>,
    text: std::result::Result<TextSize, String>,
    card: String,
    hours: Option<f64>,
    price: Option<f64>,
}

/// Says what the run of `config` takes.
///
/// # Errors
/// A config whose vocabulary or model breaks a rule, a file of measurements that cannot be read, money without a
/// price. A speed or a text that is not known is no error: the forecast says so.
pub fn forecast(config: Config, num_parameters: usize, question: &Question) -> Result<Forecast> {
    let config = plan::with_vocabulary(config)?;
    let t = &config.train;
    let flops = flops_per_token(&config.model, t.seq_len);
    let batch_tokens = (t.per_device_train_batch_size * t.seq_len) as f64;
    let hours = match (question.hours, question.money, question.price) {
        (Some(hours), None, _) => Some(hours),
        (None, Some(money), Some(price)) => Some(money / price),
        (None, Some(_), None) => {
            return Err(unusable("--money", "needs --price, the cost of an hour of the card"));
        }
        (Some(_), Some(_), _) => return Err(unusable("--money", "and --hours are two budgets; give one")),
        (None, None, _) => None,
    };
    Ok(Forecast {
        num_parameters,
        step_tokens: batch_tokens * t.gradient_accumulation_steps as f64,
        max_steps: t.max_steps,
        flops_per_token: flops,
        speed: expected(&config, question, flops, flops * batch_tokens)?,
        text: text_size(&config),
        card: question.card.clone(),
        hours,
        price: question.price,
    })
}

fn unusable(origin: &str, reason: &str) -> TrainError {
    TrainError::Config { origin: origin.into(), reason: reason.into() }
}

/// The speed of a model of `flops` a token in batches of `batch_flops`.
fn expected(
    config: &Config,
    question: &Question,
    flops: f64,
    batch_flops: f64,
) -> Result<std::result::Result<Expected, String>> {
    if let Some(tokens_per_s) = question.tokens_per_s {
        return Ok(Ok(Expected { tokens_per_s, source: "as given".into() }));
    }
    let speeds = match &question.measured {
        Some(path) => vec![from_bench(path)?],
        None => {
            if config.run.precision == Precision::Fp32 {
                return Ok(Err("speeds are measured in bf16; measure this with bench".into()));
            }
            MEASURED.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
        }
    };
    let wanted = question.card.to_lowercase();
    let mut speeds: Vec<Speed> = match question.measured {
        Some(_) => speeds,
        None => speeds.into_iter().filter(|s| s.card.to_lowercase().contains(&wanted)).collect(),
    };
    speeds.sort_by(|a, b| a.step_flops().total_cmp(&b.step_flops()));
    let (Some(first), Some(last)) = (speeds.first(), speeds.last()) else {
        return Ok(Err(format!(
            "no speed of {} is known; measure it with bench --json and pass the file as --measured, or pass \
             --tokens-per-second",
            question.card
        )));
    };
    let by = match &question.measured {
        Some(path) => path.display().to_string(),
        None => format!("measurements of a 101.7M model at commit {}", last.commit),
    };
    let outside = batch_flops < 0.99 * first.step_flops() || batch_flops > 1.01 * last.step_flops();
    let source =
        if outside { format!("from {by}; this batch is outside of them") } else { format!("from {by}") };
    Ok(Ok(Expected { tokens_per_s: interpolate(&speeds, batch_flops) / flops, source }))
}

/// Operations a second for a batch of `batch_flops`: a batch fills a card as far as its arithmetic allows, so
/// measurements are joined by lines over its logarithm. A smaller batch than any takes as long as the smallest, a
/// larger one keeps the rate of the largest.
fn interpolate(sorted: &[Speed], batch_flops: f64) -> f64 {
    let above = sorted.partition_point(|s| s.step_flops() < batch_flops);
    match (above.checked_sub(1).and_then(|i| sorted.get(i)), sorted.get(above)) {
        (Some(low), Some(high)) => {
            let part = (batch_flops / low.step_flops()).ln() / (high.step_flops() / low.step_flops()).ln();
            low.flops_per_s() + part * (high.flops_per_s() - low.flops_per_s())
        }
        (None, Some(first)) => first.flops_per_s() * batch_flops / first.step_flops(),
        (Some(last), None) => last.flops_per_s(),
        (None, None) => f64::NAN,
    }
}

/// The measurement in a file that `bench --json` wrote.
fn from_bench(path: &Path) -> Result<Speed> {
    let bad = |reason: String| TrainError::Config {
        origin: path.display().to_string(),
        reason: format!("{reason}; expected what bench --json prints"),
    };
    let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
    // The object is the last line; the lines before it are for people.
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let json: serde_json::Value = serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(last))
        .map_err(|e| bad(e.to_string()))?;
    let number = |pointer: &str| {
        let value = json.pointer(pointer).and_then(serde_json::Value::as_f64);
        value.filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| bad(format!("has no number {pointer}")))
    };
    Ok(Speed {
        card: json.pointer("/gpu/card").and_then(|c| c.as_str()).unwrap_or("the CPU").into(),
        commit: String::new(),
        flops_per_token: number("/flops_per_token")?,
        batch_size: number("/shape/batch_size")? as usize,
        seq_len: number("/shape/seq_len")? as usize,
        tokens_per_s: number("/tokens_per_s")?,
    })
}

/// Tokens of the config's text: the size of its files by the bytes that a token takes in their first part.
fn text_size(config: &Config) -> std::result::Result<TextSize, String> {
    if config.data.paths.is_empty() {
        return Err("no text is named in data.paths".into());
    }
    if let Some(folder) = prepare::prepared_folder(config) {
        let tokens = Prepared::open(folder).map_err(|e| e.to_string())?.train.len() as f64;
        return Ok(TextSize { tokens, source: format!("the training tokens of {}", folder.display()) });
    }
    let corpus = corpus::open(&config.data.paths).map_err(|e| e.to_string())?;
    let bytes: u64 = corpus.files().filter_map(|file| file.metadata().ok()).map(|m| m.len()).sum();
    let (per_token, how) = match &config.tokenizer.path {
        None => (BYTES_PER_TOKEN, format!("at {BYTES_PER_TOKEN} bytes a token, before a tokenizer is there")),
        Some(path) => {
            let tokenizer = Tokenizer::load(path).map_err(|e| e.to_string())?;
            let per_token = bytes_per_token(&corpus, &tokenizer).map_err(|e| e.to_string())?;
            (per_token, format!("at {per_token:.2} bytes a token by {}", path.display()))
        }
    };
    let training = 1.0 - config.data.validation_fraction;
    Ok(TextSize {
        tokens: bytes as f64 / per_token * training,
        source: format!("about, from {} bytes of files {how}", grouped(bytes)),
    })
}

/// Bytes a token over the first document of each file, then the next ones, up to a limit.
fn bytes_per_token(corpus: &Corpus, tokenizer: &Tokenizer) -> rb_data::Result<f64> {
    let (mut bytes, mut tokens) = (0, 0);
    for document in corpus.documents() {
        let document = document?;
        // A whole file may be one document.
        let most = document.text.len().min(SAMPLE_BYTES);
        let end = (0..=most).rev().find(|&i| document.text.is_char_boundary(i)).unwrap_or(0);
        let text = &document.text[..end];
        bytes += text.len();
        tokens += tokenizer.encode(text)?.len();
        if bytes >= SAMPLE_BYTES {
            break;
        }
    }
    Ok(if tokens == 0 { BYTES_PER_TOKEN } else { bytes as f64 / tokens as f64 })
}

impl Forecast {
    /// Tokens of the run.
    fn tokens(&self) -> f64 {
        self.step_tokens * self.max_steps as f64
    }

    /// A table for people, and a warning for each thing that is probably not meant.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<22}{value}");
        };
        let tokens = self.tokens();
        let steps = grouped(self.max_steps);
        row("tokens of the run", format!("{} ({steps} steps of {})", whole(tokens), whole(self.step_tokens)));
        let flops = self.flops_per_token;
        row("arithmetic", format!("{:.3e} FLOPs, {flops:.3e} a token (6 N + 6 L T H D)", flops * tokens));
        row("tokens a parameter", self.ratio(tokens));
        match &self.text {
            Ok(size) => {
                row("tokens of the text", format!("{}: {}", whole(size.tokens), size.source));
                row("passes over the text", format!("{:.2}", tokens / size.tokens));
            }
            Err(reason) => row("tokens of the text", format!("not known: {reason}")),
        }
        match &self.speed {
            Ok(speed) => {
                let line = format!("about {} tokens/s, {}", whole(speed.tokens_per_s), speed.source);
                row(&format!("speed, {}", self.card), line);
                row("time", self.time(tokens / speed.tokens_per_s));
                if let Some(hours) = self.hours {
                    row("for the budget", self.within(hours, speed.tokens_per_s));
                }
            }
            Err(reason) => row("time", format!("not known: {reason}")),
        }
        for warning in self.warnings() {
            let _ = writeln!(text, "warning: {warning}");
        }
        text
    }

    fn ratio(&self, tokens: f64) -> String {
        let ratio = tokens / self.num_parameters.max(1) as f64;
        format!("{ratio:.2} (about {CHINCHILLA} give the lowest loss for their arithmetic, arXiv:2203.15556)")
    }

    fn time(&self, seconds: f64) -> String {
        let hours = seconds / 3600.0;
        let cost =
            self.price.map_or(String::new(), |price| format!(", {:.2} at {price} an hour", hours * price));
        format!("{}{cost}, without start, evaluation and checkpoints", duration(seconds))
    }

    fn within(&self, hours: f64, tokens_per_s: f64) -> String {
        let steps = (hours * 3600.0 * tokens_per_s / self.step_tokens).floor();
        let tokens = steps * self.step_tokens;
        let passes = match &self.text {
            Ok(size) => format!(", {:.2} passes over the text", tokens / size.tokens),
            Err(_) => String::new(),
        };
        format!(
            "train.max_steps={steps} in {}: {} tokens, {:.2} a parameter{passes}",
            duration(hours * 3600.0),
            whole(tokens),
            tokens / self.num_parameters.max(1) as f64
        )
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Ok(size) = &self.text {
            warnings.extend(repetition(self.max_steps, self.step_tokens, size.tokens));
        }
        if let (Ok(speed), Some(hours)) = (&self.speed, self.hours)
            && self.tokens() / speed.tokens_per_s > hours * 3600.0
        {
            warnings.push(format!("the run takes longer than its budget of {}", duration(hours * 3600.0)));
        }
        warnings
    }
}

/// What to tell the user of a run that reads its text too often: `max_steps` steps of `step_tokens` tokens on
/// `text_tokens` training tokens.
pub fn repetition(max_steps: u64, step_tokens: f64, text_tokens: f64) -> Option<String> {
    let passes = max_steps as f64 * step_tokens / text_tokens;
    (passes > EPOCHS).then(|| {
        // A text of a few steps has no length of run that would do it justice.
        let fewer = match (EPOCHS * text_tokens / step_tokens).floor() {
            0.0 => String::new(),
            steps => format!(", or lower train.max_steps to {steps}"),
        };
        format!(
            "the run reads its text {passes:.1} times; beyond {EPOCHS} times repeated text is worth less and less, \
             beyond 40 nothing (arXiv:2305.16264): add text{fewer}"
        )
    })
}

fn whole(count: f64) -> String {
    grouped(count.max(0.0).round() as u64)
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(batch_size: usize, tokens_per_s: f64) -> Speed {
        let (card, commit) = ("card".to_string(), String::new());
        Speed { card, commit, flops_per_token: 1e9, batch_size, seq_len: 100, tokens_per_s }
    }

    #[test]
    fn measurements_are_met_and_joined() {
        let speeds = [speed(1, 10.0), speed(4, 30.0), speed(16, 40.0)];
        for (flops, tokens_per_s) in
            [(1e11, 10.0), (2e11, 20.0), (4e11, 30.0), (8e11, 35.0), (16e11, 40.0), (1e9, 0.1), (1e15, 40.0)]
        {
            let got = interpolate(&speeds, flops) / 1e9;
            assert!((got - tokens_per_s).abs() < 1e-9, "{flops:e}: {got}");
        }
    }

    #[test]
    fn every_shipped_measurement_is_read() {
        let read: Vec<Speed> = MEASURED.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(read.len() >= 7 && read.iter().all(|s| s.flops_per_s() > 1e13 && s.flops_per_s() < 1e15));
    }

    /// 101.7M at 4x1024 is a measured case: the forecast is the measurement.
    #[test]
    fn a_measured_config_is_met() {
        let config = r#"
            [data]
            paths = ["none.txt"]
            [tokenizer]
            vocab_size = 32004
            [model]
            hidden_size = 768
            intermediate_size = 1408
            num_hidden_layers = 16
            num_attention_heads = 12
            num_key_value_heads = 4
            max_position_embeddings = 1024
            tie_word_embeddings = true
            [train]
            max_steps = 515605
            seq_len = 1024
            per_device_train_batch_size = 4
        "#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, config).unwrap();
        let config = crate::config::load(&path, &[]).unwrap();
        let shape = "\"batch_size\": 4, \"seq_len\": 1024, \"tokens_per_s\": ";
        let tokens_per_s =
            MEASURED.lines().find_map(|line| Some(line.split_once(shape)?.1.trim_end_matches('}')));
        let tokens_per_s: f64 = tokens_per_s.unwrap().parse().unwrap();
        let minutes = 515_605.0 * 4096.0 / tokens_per_s / 60.0;
        let question = Question {
            card: "H200".into(),
            measured: None,
            tokens_per_s: None,
            hours: None,
            money: Some(8.0),
            price: Some(4.0),
        };
        let table = forecast(config, 101_700_000, &question).unwrap().table();
        for part in [
            "2,111,918,080 (515,605 steps of 4,096)".to_string(),
            "20.77 (about 20".to_string(),
            "not known: ".to_string(),
            format!("about {} tokens/s", crate::observe::grouped(tokens_per_s as u64)),
            format!("{minutes:.1} min, {:.2} at 4 an hour", minutes / 15.0),
            format!("train.max_steps={:.0} in 2.0 h", (7200.0 * tokens_per_s / 4096.0).floor()),
        ] {
            assert!(table.contains(&part), "no `{part}` in\n{table}");
        }
    }
}
