//! Decoding one id at a time, for text that is shown while it is generated.

use super::Tokenizer;
use crate::error::Result;

/// Takes ids and gives out text as soon as its characters are whole.
///
/// All text given out, [`DecodeStream::finish`] included, is [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct DecodeStream<'t> {
    tokenizer: &'t Tokenizer,
    /// Start of a character whose last bytes are still to come.
    pending: Vec<u8>,
    /// Not byte-level: the ids of the last text given out and those after it, and that text.
    window: Vec<u32>,
    given: String,
}

impl<'t> DecodeStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new(), window: Vec::new(), given: String::new() }
    }

    /// Takes one id and returns the characters it completes, often none. Special tokens give nothing.
    ///
    /// # Errors
    /// [`DataError::UnknownToken`](crate::DataError::UnknownToken); the stream stays usable.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let piece = self.tokenizer.piece(id)?;
        if self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        if !self.tokenizer.byte_level {
            return self.push_window(id);
        }
        self.pending.extend_from_slice(piece);
        let mut text = String::new();
        loop {
            let (valid, bad) = match std::str::from_utf8(&self.pending) {
                Ok(rest) => (rest.len(), None),
                Err(e) => (e.valid_up_to(), e.error_len()),
            };
            text.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
            let Some(bad) = bad else {
                self.pending.drain(..valid);
                return Ok(text);
            };
            // Bytes that no continuation can make valid.
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.drain(..valid + bad);
        }
    }

    /// Ends the stream: what is left of an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        if self.window.is_empty() {
            return text;
        }
        let whole = self.tokenizer.decode(&self.window).unwrap_or_default();
        self.window.clear();
        let given = std::mem::take(&mut self.given);
        whole.strip_prefix(given.as_str()).unwrap_or_default().to_owned()
    }

    /// Decoders that look at neighbours: decode a short window, give out what is new.
    fn push_window(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let whole = self.tokenizer.decode(&self.window)?;
        if whole.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let Some(new) = whole.strip_prefix(self.given.as_str()).filter(|new| !new.is_empty()) else {
            return Ok(String::new());
        };
        let new = new.to_owned();
        // One id of context is enough for decoders that treat the first token apart.
        self.window.drain(..self.window.len() - 1);
        self.given = self.tokenizer.decode(&self.window)?;
        Ok(new)
    }
}
