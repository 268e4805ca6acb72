//! Reading, overriding and writing configs, with errors that point at the line and guess what was meant.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use toml::{Table, Value};

use super::Config;
use crate::observe::remedy;
use crate::{Result, TrainError};

/// One `key=value` from the command line; the key is dotted (`train.max_steps`).
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    key: Vec<String>,
    value: Value,
}

impl Override {
    /// An override from a key and a value that is already typed.
    pub fn new(key: &str, value: impl Into<Value>) -> Override {
        Override { key: key.split('.').map(str::to_string).collect(), value: value.into() }
    }

    fn name(&self) -> String {
        format!("--set {}={}", self.key.join("."), self.value)
    }
}

impl FromStr for Override {
    type Err = String;

    /// Parses `section.key=value`. The value is TOML; a bare word is taken as a string.
    fn from_str(text: &str) -> Result<Override, String> {
        let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}` is not key=value"))?;
        let key = key.trim();
        if key.is_empty() || key.split('.').any(str::is_empty) {
            return Err(format!("`{text}` has no key before `=`; write for example train.max_steps=100"));
        }
        let parsed = format!("v = {value}").parse::<Table>().ok().and_then(|mut t| t.remove("v"));
        Ok(Override::new(key, parsed.unwrap_or_else(|| Value::String(value.trim().to_string()))))
    }
}

/// Reads `path`, applies `overrides` in order, checks the result and makes its paths absolute (those in the
/// file are relative to the file, those in overrides to the working directory).
///
/// # Errors
/// [`TrainError::Config`] with file, line and the nearest known key, or with why the file cannot be read.
pub fn load(path: &Path, overrides: &[Override]) -> Result<Config> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| TrainError::Config {
        origin: origin.clone(),
        reason: format!("cannot be read: {e}; {}", remedy(&e)),
    })?;
    let mut config: Config = toml::from_str(&text).map_err(|e| {
        let line = e.span().map(|s| text.bytes().take(s.start).filter(|b| *b == b'\n').count());
        let origin = line.map_or(origin.clone(), |line| format!("{origin}:{}", line + 1));
        // A value of the wrong kind is reported without its key, which stands before it.
        let key = line.and_then(|line| text.lines().nth(line)?.split_once('=')).map(|(key, _)| key.trim());
        let reason = match (key, explain(e.message())) {
            (Some(key), reason) if reason.starts_with("invalid ") => format!("{key}: {reason}"),
            (_, reason) => reason,
        };
        TrainError::Config { origin, reason }
    })?;
    let base = path.parent().unwrap_or(Path::new(""));
    // An empty path would become the folder of the file; it stays what it is, to be refused.
    let absolute = |p: &mut PathBuf| {
        if !p.as_os_str().is_empty() {
            *p = absolute(&base.join(&*p));
        }
    };
    config.data.paths.iter_mut().for_each(absolute);
    config.tokenizer.path.iter_mut().for_each(absolute);
    config.run.init_from.iter_mut().for_each(absolute);
    config.take_model()?;
    if !overrides.is_empty() {
        config = apply_to(&config, overrides, format!("{origin} with overrides"))?;
    }
    config.take_model()?;
    config.validate().map_err(|reason| TrainError::Config { origin, reason })?;
    Ok(config)
}

/// Applies overrides to a config that was already read.
pub(crate) fn apply(config: &Config, overrides: &[Override]) -> Result<Config> {
    apply_to(config, overrides, "config with overrides".into())
}

fn apply_to(config: &Config, overrides: &[Override], origin: String) -> Result<Config> {
    let mut table = to_table(config)?;
    for item in overrides {
        let fail = |reason: String| TrainError::Config { origin: item.name(), reason };
        set(&mut table, &item.key, item.value.clone()).map_err(fail)?;
        // Deserialised after each one, so that an error is put down to the override that caused it.
        let parsed: Result<Config, _> = Value::Table(table.clone()).try_into();
        parsed.map_err(|e: toml::de::Error| fail(explain(e.message())))?;
    }
    let mut config: Config = Value::Table(table).try_into().map_err(|e: toml::de::Error| {
        TrainError::Config { origin: "overrides".into(), reason: explain(e.message()) }
    })?;
    let paths = config.data.paths.iter_mut().chain(config.tokenizer.path.iter_mut());
    paths.chain(config.run.init_from.iter_mut()).for_each(|p| *p = absolute(p));
    config.take_model()?;
    config.validate().map_err(|reason| TrainError::Config { origin, reason })?;
    Ok(config)
}

impl Config {
    /// Takes the model, and the tokenizer, of `run.init_from` where the config has none of its own.
    fn take_model(&mut self) -> Result<()> {
        let Some(path) = &self.run.init_from else { return Ok(()) };
        let has_model = self.model != super::model_of_folder();
        if has_model && self.tokenizer.path.is_some() {
            return Ok(());
        }
        let folder = crate::start::folder(path)?;
        if !has_model {
            self.model = crate::start::model(&folder)?;
        }
        let tokenizer = folder.join("tokenizer.json");
        if self.tokenizer.path.is_none() && tokenizer.is_file() {
            self.tokenizer.path = Some(tokenizer);
        }
        Ok(())
    }

    /// The config as TOML text.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string_pretty(self).map_err(|e| TrainError::Config {
            origin: "config".into(),
            reason: format!("cannot be written as TOML: {e}"),
        })
    }

    /// Keys whose values differ, as `(key, self, other)`, in file order.
    pub fn differences(&self, other: &Config) -> Result<Vec<(String, String, String)>> {
        let (a, b) = (flatten(&to_table(self)?), flatten(&to_table(other)?));
        let value = |list: &[(String, String)], key: &str| {
            list.iter().find(|(k, _)| k == key).map_or("(default)".to_string(), |(_, v)| v.clone())
        };
        let mut keys: Vec<&String> = a.iter().chain(&b).map(|(k, _)| k).collect();
        keys.sort();
        keys.dedup();
        let rows = keys.into_iter().map(|k| (k.clone(), value(&a, k), value(&b, k)));
        Ok(rows.filter(|(_, a, b)| a != b).collect())
    }
}

fn to_table(config: &Config) -> Result<Table> {
    Table::try_from(config).map_err(|e| TrainError::Config {
        origin: "config".into(),
        reason: format!("cannot be written: {e}"),
    })
}

fn flatten(table: &Table) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => {
                rows.extend(flatten(inner).into_iter().map(|(k, v)| (format!("{key}.{k}"), v)))
            }
            other => rows.push((key.clone(), other.to_string())),
        }
    }
    rows
}

fn set(table: &mut Table, key: &[String], value: Value) -> Result<(), String> {
    match key {
        [] => Ok(()),
        [last] => {
            // An integer where the key holds a float is what a user means by `learning_rate=1`.
            let value = match (table.get(last), value) {
                (Some(Value::Float(_)), Value::Integer(i)) => Value::Float(i as f64),
                (_, value) => value,
            };
            table.insert(last.clone(), value);
            Ok(())
        }
        [first, rest @ ..] => {
            let inner = table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new()));
            match inner {
                Value::Table(inner) => set(inner, rest, value),
                other => Err(format!("`{first}` is {other}, not a section")),
            }
        }
    }
}

/// Makes a path absolute without asking that it exists.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Rewrites serde's message for an unknown key or value into one that names the nearest known one.
fn explain(message: &str) -> String {
    let message = message.trim();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let (Some((given, known)), true) = (
        quoted.split_first(),
        message.starts_with("unknown field") || message.starts_with("unknown variant"),
    ) else {
        return message.to_string();
    };
    let what = if message.starts_with("unknown field") { "key" } else { "value" };
    let nearest = known
        .iter()
        .map(|k| (strsim::jaro_winkler(given, k), k))
        .filter(|(score, _)| *score > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = nearest.map_or(String::new(), |(_, k)| format!("; did you mean `{k}`?"));
    let hint = if hint.is_empty() { ";" } else { &hint };
    format!("unknown {what} `{given}`{hint} known here: {}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "[model]\nhidden_size = 64\nintermediate_size = 96\nnum_hidden_layers = 1\n\
                        num_attention_heads = 2\n[data]\npaths = [\"text\"]\n";

    fn load_text(text: &str, overrides: &[&str]) -> Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<Override> = overrides.iter().map(|o| o.parse().unwrap()).collect();
        load(&path, &overrides)
    }

    #[test]
    fn unknown_keys_name_line_and_nearest() {
        let message = load_text(&format!("{BASE}[train]\nmax_step = 3\n"), &[]).unwrap_err().to_string();
        assert!(message.contains("c.toml:9: unknown key `max_step`; did you mean `max_steps`?"), "{message}");
        let message = load_text(&BASE.replace("hidden_size", "hiden_size"), &[]).unwrap_err().to_string();
        assert!(message.contains("did you mean `hidden_size`?"), "{message}");
        let message = load_text(&format!("{BASE}[train]\noptim = \"adam\"\n"), &[]).unwrap_err().to_string();
        assert!(message.contains("unknown value `adam`; did you mean `adamw`?"), "{message}");
    }

    #[test]
    fn wrong_types_and_syntax_name_the_line() {
        let message = load_text(&format!("{BASE}[train]\nmax_steps = \"x\"\n"), &[]).unwrap_err().to_string();
        assert!(message.contains("c.toml:9:") && message.contains("expected u64"), "{message}");
        assert!(load_text("[model\n", &[]).unwrap_err().to_string().contains("c.toml:1:"));
        let message = load(Path::new("/nowhere/c.toml"), &[]).unwrap_err().to_string();
        assert!(message.starts_with("/nowhere/c.toml: cannot be read"), "{message}");
    }

    #[test]
    fn overrides_are_typed_and_blamed() {
        let c = load_text(BASE, &["train.max_steps=7", "train.learning_rate=1", "run.device=cpu"]).unwrap();
        assert_eq!((c.train.max_steps, c.train.learning_rate), (7, 1.0));
        let message = load_text(BASE, &["train.max_stepz=7"]).unwrap_err().to_string();
        assert!(message.starts_with("--set train.max_stepz=7: unknown key"), "{message}");
        assert!("no_equals".parse::<Override>().is_err());
    }

    #[test]
    fn toml_round_trip_and_differences() {
        let a = load_text(BASE, &[]).unwrap();
        let b: Config = toml::from_str(&a.to_toml().unwrap()).unwrap();
        assert_eq!(a, b);
        let c = apply(&a, &["train.max_steps=3".parse().unwrap()]).unwrap();
        assert_eq!(a.differences(&c).unwrap(), [("train.max_steps".into(), "1000".into(), "3".into())]);
    }
}
