//! A tokenizer as llama.cpp keeps it: names of tokens, their kinds, merges, and the name of a splitter.

use rb_data::Tokenizer;
use serde_json::Value;

use super::ExportError;

/// Kinds of tokens in GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Splitters that llama.cpp has under a name, by their regular expression: GPT-2's, that of Llama 3 and cl100k,
/// Qwen 2's and o200k's.
const KNOWN: [(&str, &str); 4] = [
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "gpt-2"),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "gpt-4o",
    ),
];

/// The name written for a splitter that llama.cpp does not have. It refuses the file by this name, where a wrong splitter
/// would give other tokens without a word.
const OTHER: &str = "rusting-brain";

/// What goes into the file.
#[derive(Debug)]
pub struct Vocabulary {
    /// Name of each token, in the order of ids.
    pub tokens: Vec<String>,
    /// Kind of each token.
    pub kinds: Vec<i32>,
    /// Pairs that are merged, in order, each with a space between.
    pub merges: Vec<String>,
    /// llama.cpp's name of the splitter.
    pub splitter: &'static str,
    /// Whether the tokenizer puts the token that begins a text before it.
    pub adds_bos: bool,
    /// The whole `tokenizer.json`, for programs that read it.
    pub json: String,
}

impl Vocabulary {
    /// Of a byte-level BPE tokenizer, with unused tokens up to `vocab_size`.
    ///
    /// # Errors
    /// [`ExportError::Unsupported`] for another kind of tokenizer.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Vocabulary, ExportError> {
        let text = tokenizer.to_json()?;
        let unsupported = |reason: String| ExportError::Unsupported { what: "the tokenizer", reason };
        let json: Value = serde_json::from_str(&text).map_err(|e| unsupported(e.to_string()))?;
        let kind = json["model"]["type"].as_str().unwrap_or("of no kind");
        if kind != "BPE" || json["decoder"]["type"] != "ByteLevel" {
            let reason =
                format!("it is {kind}; only byte-level BPE is written, export a Hugging Face folder instead");
            return Err(unsupported(reason));
        }
        let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![UNUSED; vocab_size];
        let mut set = |id: &Value, name: &str, kind: i32| {
            let place = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab_size);
            if let Some(place) = place {
                tokens[place] = name.to_string();
                kinds[place] = kind;
            }
        };
        for (name, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            set(id, name, NORMAL);
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let kind = if added["special"] == true { CONTROL } else { USER_DEFINED };
            set(&added["id"], added["content"].as_str().unwrap_or_default(), kind);
        }
        let merges = json["model"]["merges"].as_array().into_iter().flatten().filter_map(merge).collect();
        let splitter = splitter(&json);
        let adds_bos = adds_bos(&json["post_processor"]);
        Ok(Vocabulary { tokens, kinds, merges, splitter, adds_bos, json: text })
    }

    /// What a user should know.
    pub fn note(&self) -> Option<String> {
        (self.splitter == OTHER).then(|| {
            format!(
                "llama.cpp has no splitter like this tokenizer's and refuses the file by its name `{OTHER}`; \
                 --override-kv tokenizer.ggml.pre=str:gpt-4o takes one that keeps marks with their letters but gives \
                 other tokens in places. The exact tokenizer is in the file as tokenizer.huggingface.json"
            )
        })
    }
}

/// `"a b"` or `["a", "b"]`.
fn merge(value: &Value) -> Option<String> {
    match value {
        Value::String(pair) => Some(pair.clone()),
        pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
    }
}

/// The name of the only regular expression in a tokenizer's `pre_tokenizer`, or of GPT-2's where it is built in.
fn splitter(tokenizer: &Value) -> &'static str {
    let pre_tokenizer = &tokenizer["pre_tokenizer"];
    if !tokenizer["normalizer"].is_null() {
        return OTHER;
    }
    let by_pattern = by_pattern(pre_tokenizer);
    // Words that are tokens are not taken apart under one of the names, and must be under the others.
    match (by_pattern, tokenizer["model"]["ignore_merges"] == true) {
        ("llama-bpe", false) => "dbrx",
        ("llama-bpe", true) => by_pattern,
        (_, true) => OTHER,
        (_, false) => by_pattern,
    }
}

fn by_pattern(pre_tokenizer: &Value) -> &'static str {
    let parts = match pre_tokenizer["pretokenizers"].as_array() {
        Some(parts) => parts.clone(),
        None => vec![pre_tokenizer.clone()],
    };
    let patterns: Vec<&str> = parts.iter().filter_map(|part| part["pattern"]["Regex"].as_str()).collect();
    let built_in = parts.iter().any(|p| p["type"] == "ByteLevel" && p["use_regex"] != false);
    let others = parts.iter().any(|p| p["type"] != "ByteLevel" && p["type"] != "Split");
    let prefixed = parts.iter().any(|p| p["add_prefix_space"] == true);
    match (&patterns[..], built_in, others || prefixed) {
        ([], true, false) => "gpt-2",
        ([pattern], false, false) => {
            KNOWN.iter().find(|(known, _)| known == pattern).map_or(OTHER, |(_, name)| name)
        }
        _ => OTHER,
    }
}

/// Whether a template begins with a special token.
fn adds_bos(post_processor: &Value) -> bool {
    let parts = post_processor["processors"].as_array();
    let mut all = parts.into_iter().flatten().chain([post_processor]);
    all.any(|part| part["type"] == "TemplateProcessing" && part["single"][0].get("SpecialToken").is_some())
}

#[cfg(test)]
mod tests {
    use super::super::tests::tokenizer;
    use super::*;
    use rb_data::{Splitter, TokenizerConfig};
    use serde_json::json;

    #[test]
    fn every_id_has_its_name() {
        let tokenizer = tokenizer();
        let size = tokenizer.vocab_size() + 3;
        let vocabulary = Vocabulary::new(&tokenizer, size).unwrap();
        assert_eq!((vocabulary.tokens.len(), vocabulary.kinds.len()), (size, size));
        for id in 0..tokenizer.vocab_size() as u32 {
            assert_eq!(tokenizer.token_to_id(&vocabulary.tokens[id as usize]), Some(id));
        }
        assert_eq!(vocabulary.kinds[tokenizer.eos_id() as usize], CONTROL);
        assert_eq!(vocabulary.kinds.iter().filter(|k| **k == UNUSED).count(), 3);
        // Bytes, the end token and merges make up the vocabulary.
        assert_eq!(vocabulary.merges.len(), tokenizer.vocab_size() - 257);
        assert!(vocabulary.merges.iter().all(|m| m.matches(' ').count() == 1));
        assert_eq!(vocabulary.splitter, OTHER);
        assert!(vocabulary.note().unwrap().contains("rusting-brain") && !vocabulary.adds_bos);
    }

    #[test]
    fn splitters_are_known_by_their_pattern() {
        let text = || std::iter::once(Ok("one two three one two one".repeat(4)));
        let config =
            TokenizerConfig { vocab_size: 262, splitter: Splitter::Gpt2, ..TokenizerConfig::default() };
        let gpt2 = Vocabulary::new(&Tokenizer::train(text(), &config).unwrap().0, 262).unwrap();
        assert_eq!((gpt2.splitter, gpt2.note()), ("gpt-2", None));
        let named = |pre_tokenizer: &Value| splitter(&json!({ "pre_tokenizer": pre_tokenizer }));
        let bytes =
            |prefix: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix, "use_regex": true });
        assert_eq!((named(&bytes(false)), named(&bytes(true))), ("gpt-2", OTHER));
        let split = json!({ "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": KNOWN[1].0 } },
            { "type": "ByteLevel", "use_regex": false },
        ]});
        assert_eq!(named(&split), "dbrx");
        let with = |key: &str, value: Value| splitter(&json!({ "pre_tokenizer": split, key: value }));
        assert_eq!(with("model", json!({ "ignore_merges": true })), "llama-bpe");
        assert_eq!(with("normalizer", json!({ "type": "NFC" })), OTHER);
        assert_eq!(named(&json!({ "pretokenizers": [{ "type": "Digits" }, bytes(false)] })), OTHER);
        let template =
            json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>" } }] });
        assert!(
            adds_bos(&template) && adds_bos(&json!({ "processors": [template] })) && !adds_bos(&Value::Null)
        );
    }
}
