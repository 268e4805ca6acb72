//! The fast way to encode: words by the splitter, each different word of a chunk through BPE once.
//!
//! Its reference is `Tokenizer::encode_reference`, which also tracks offsets of every byte; the ids are equal.

use std::collections::HashMap;
use std::ops::Range;

use tokenizers::utils::SysRegex;
use tokenizers::{Model, ModelWrapper};

use super::splitter::{self, Splitter, byte_chars};
use crate::error::{DataError, Result};

/// What encoding needs beside the model.
#[derive(Debug)]
pub(super) struct FastEncoder {
    regex: SysRegex,
    chars: [char; 256],
}

impl FastEncoder {
    pub(super) fn new(splitter: Splitter) -> Result<Self> {
        Ok(Self { regex: splitter.regex()?, chars: byte_chars() })
    }

    /// Ids of `text`.
    pub(super) fn encode(&self, model: &ModelWrapper, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        // Where in `ids` the ids of a word are already.
        let mut known: HashMap<&str, Range<usize>> = HashMap::new();
        let mut spelling = String::new();
        let mut failed = None;
        splitter::words(&self.regex, text, |word| {
            if let Some(range) = known.get(word) {
                ids.extend_from_within(range.clone());
                return;
            }
            spelling.clear();
            spelling.extend(word.bytes().map(|b| self.chars[b as usize]));
            let start = ids.len();
            match model.tokenize(&spelling) {
                Ok(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                Err(e) => failed = Some(e),
            }
            known.insert(word, start..ids.len());
        });
        match failed {
            None => Ok(ids),
            Some(e) => Err(DataError::TokenizerLibrary { action: "encode text", reason: e.to_string() }),
        }
    }
}
