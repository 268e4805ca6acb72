//! The fast way to encode: words by the splitter, each different word once.
//!
//! Its reference is `Tokenizer::encode_reference`, which also tracks offsets of every byte; the ids are equal.

use ahash::AHashMap;
use serde_json::Value;
use tokenizers::utils::SysRegex;
use tokenizers::{Model, ModelWrapper};

use super::bpe::Bpe;
use super::splitter::{self, Splitter, byte_chars};
use crate::error::{DataError, Result};

/// Different words kept; then the cache begins anew.
const MAX_WORDS: usize = 1 << 16;
/// Longer words are not kept: they hardly come again.
const MAX_WORD_BYTES: usize = 64;

/// Words with their ids, kept from text to text by one thread. What is in it changes no result.
#[derive(Debug, Default)]
pub(crate) struct WordCache {
    words: AHashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
}

impl WordCache {
    fn get(&self, word: &str) -> Option<&[u32]> {
        let (start, end) = self.words.get(word)?;
        Some(&self.ids[*start as usize..*end as usize])
    }

    fn keep(&mut self, word: &str, ids: &[u32]) {
        if word.len() > MAX_WORD_BYTES {
            return;
        }
        if self.words.len() >= MAX_WORDS {
            self.words.clear();
            self.ids.clear();
        }
        let start = self.ids.len() as u32;
        self.ids.extend_from_slice(ids);
        self.words.insert(word.into(), (start, self.ids.len() as u32));
    }
}

/// What encoding needs beside the model.
#[derive(Debug)]
pub(super) struct FastEncoder {
    regex: SysRegex,
    chars: [char; 256],
    /// Merges, where the model is nothing but them.
    bpe: Option<Bpe>,
}

impl FastEncoder {
    /// For the `model` entry of a `tokenizer.json`.
    pub(super) fn new(splitter: Splitter, model: &Value) -> Result<Self> {
        Ok(Self { regex: splitter.regex()?, chars: byte_chars(), bpe: Bpe::new(model) })
    }

    /// Ids of `text`.
    pub(super) fn encode(&self, model: &ModelWrapper, text: &str, cache: &mut WordCache) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut failed = None;
        splitter::words(&self.regex, text, |word| {
            if let Some(known) = cache.get(word) {
                ids.extend_from_slice(known);
                return;
            }
            let start = ids.len();
            if !self.bpe.as_ref().is_some_and(|bpe| bpe.encode(word.as_bytes(), &mut ids)) {
                let spelling: String = word.bytes().map(|b| self.chars[b as usize]).collect();
                match model.tokenize(&spelling) {
                    Ok(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                    Err(e) => failed = Some(e),
                }
            }
            cache.keep(word, &ids[start..]);
        });
        match failed {
            None => Ok(ids),
            Some(e) => Err(DataError::TokenizerLibrary { action: "encode text", reason: e.to_string() }),
        }
    }
}
