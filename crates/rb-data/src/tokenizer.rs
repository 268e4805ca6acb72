//! Byte-level BPE and Unigram: training, loading and saving Hugging Face `tokenizer.json` files, encoding, decoding.
//!
//! Every text has an encoding (all 256 bytes are tokens), and without normalisation decoding gives back exactly the
//! same bytes.
//!
//! **Special tokens are never made from text.** A document that contains the characters `<|endoftext|>` is encoded
//! as those characters; the special token's id comes only from [`Tokenizer::eos_id`]. Hugging Face's Python
//! tokenizer does the opposite unless `split_special_tokens=True` is passed to it; on texts without such characters
//! the ids are equal.

mod bpe;
mod encode;
mod folder;
mod learn;
mod splitter;
mod stream;
mod train;
mod unigram;

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer as HfTokenizer};

use encode::FastEncoder;
pub(crate) use encode::WordCache;
pub(crate) use splitter::words;
pub use splitter::{CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN, RB_PATTERN, Splitter};
pub use stream::DecodeStream;
pub use train::{GroupShare, TrainReport};

use crate::error::{DataError, Result};

/// Largest vocabulary that is loaded or trained: a guard against damaged files, far above any in use.
pub const MAX_VOCAB_SIZE: usize = 1 << 24;
/// The special token used unless another is asked for.
pub const DEFAULT_EOS: &str = "<|endoftext|>";
/// Names under which well-known tokenizers keep their end-of-document token.
const KNOWN_EOS: [&str; 8] = [
    DEFAULT_EOS,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<|return|>",
];
/// Text is encoded in pieces of about this size; the ids do not depend on it.
const CHUNK_BYTES: usize = 64 << 10;

/// Unicode normalisation of text before it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Normalization {
    /// None: decoding gives back the text byte for byte.
    #[default]
    None,
    /// NFC: texts that differ only in their composed and decomposed characters get equal ids.
    Nfc,
}

/// How a vocabulary is learned and text is encoded with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Merges of the most frequent pairs of bytes.
    #[default]
    Bpe,
    /// The likeliest cut of each word under a unigram model of pieces, over bytes too, so that every text has an
    /// encoding. Trained by the `tokenizers` library on one thread, so that the result does not depend on how many
    /// there are.
    Unigram,
}

/// How a tokenizer is trained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokenizerConfig {
    /// Number of tokens: special tokens, 256 bytes and merges.
    pub vocab_size: usize,
    /// BPE or Unigram.
    pub model: ModelKind,
    /// How text is cut into words, over whose ends nothing is merged.
    pub splitter: Splitter,
    /// Special tokens; they get the first ids. The first one ends a document.
    pub special_tokens: Vec<String>,
    /// Normalisation of the text.
    pub normalization: Normalization,
    /// How often a pair must occur to become a token.
    pub min_frequency: u64,
}

impl Default for TokenizerConfig {
    /// 32,768 tokens, BPE, splitter `rb`, `<|endoftext|>`, no normalisation, pairs that occur at least twice.
    fn default() -> Self {
        Self {
            vocab_size: 32_768,
            model: ModelKind::Bpe,
            splitter: Splitter::Rb,
            special_tokens: vec![DEFAULT_EOS.to_owned()],
            normalization: Normalization::None,
            min_frequency: 2,
        }
    }
}

/// A tokenizer ready to encode and decode; cheap to share by reference between threads.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: HfTokenizer,
    /// Bytes of each token; `None` for an id without one.
    pieces: Vec<Option<Box<[u8]>>>,
    special: Vec<bool>,
    eos_id: u32,
    /// The token before a text without another beginning, where it is not `eos_id`.
    bos_id: Option<u32>,
    /// What the file's template puts before a text.
    template: Vec<u32>,
    /// Whether decoding is joining the bytes of the tokens.
    byte_level: bool,
    /// Whether text may be cut at the boundaries that `splitter.rs` defines.
    chunked: bool,
    /// The splitter, if it is one of ours.
    splitter: Option<Splitter>,
    /// Name of the model in the file, in small letters.
    model: String,
    /// Encodes words without the library's bookkeeping of offsets; `None` where that could change the ids.
    fast: Option<Arc<FastEncoder>>,
    sha256: [u8; 32],
}

impl Tokenizer {
    /// Trains a tokenizer on `documents`. The result depends only on the multiset of documents and on `config`.
    ///
    /// # Errors
    /// A `vocab_size` below 256 + special tokens, an unusable special token, no text, or the first error of
    /// `documents`. A vocabulary that the text is too small for is not an error: see [`TrainReport::vocab_size`].
    pub fn train<S: AsRef<str>>(
        documents: impl Iterator<Item = Result<S>>,
        config: &TokenizerConfig,
    ) -> Result<(Self, TrainReport)> {
        train::train(documents.map(|d| d.map(|text| (text, usize::MAX))), &[], config)
    }

    /// As [`Tokenizer::train`], with groups of documents (languages) that count in the ratio of `weights`: each
    /// document comes with the number of its group, and the words of a group with little text count more often, so
    /// that the characters of all groups stand in that ratio. A number outside `weights` is a document without a
    /// group, which counts as it is. A pair must occur `min_frequency` times after weighting.
    ///
    /// # Errors
    /// As [`Tokenizer::train`]; a weight that is not a finite number above 0.
    pub fn train_weighted<S: AsRef<str>>(
        documents: impl Iterator<Item = Result<(S, usize)>>,
        weights: &[f64],
        config: &TokenizerConfig,
    ) -> Result<(Self, TrainReport)> {
        if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
            return Err(DataError::BadSetting {
                what: "tokenizer",
                name: "weight",
                got: bad.to_string(),
                expected: "a finite number above 0",
            });
        }
        train::train(documents, weights, config)
    }

    /// Loads a `tokenizer.json`, ours or another byte-level or SentencePiece-style one.
    ///
    /// The end-of-document token is `eos_token` of the `tokenizer_config.json` beside it; without that file, the
    /// only special token, or the one with a well-known name, or (in files that this crate wrote) the first one.
    /// [`Tokenizer::bos_id`] is `bos_token` of that file, or what the template of `tokenizer.json` begins with.
    /// Truncation and padding set in the file are ignored, so no text is cut.
    ///
    /// # Errors
    /// [`DataError::NotFound`], or [`DataError::BadTokenizerFile`] with the reason.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| DataError::io("read", path, e))?;
        let folder::Configured { eos, bos } = folder::configured(path)?;
        let refuse = |reason| DataError::BadTokenizerFile { path: path.to_path_buf(), reason };
        let mut tokenizer = Self::from_json(&bytes, eos.as_deref()).map_err(refuse)?;
        if let Some(name) = bos {
            tokenizer.bos_id = Some(tokenizer.configured_id("bos_token", &name).map_err(refuse)?);
        }
        Ok(tokenizer)
    }

    /// Writes `tokenizer.json` to `path`: temporary name, fsync, rename.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(crate::atomic::write(path.as_ref(), self.to_json()?.as_bytes())?)
    }

    /// Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into `folder`, as
    /// `transformers.AutoTokenizer` expects them. `model_max_length` is the longest context, in tokens.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn save_folder(&self, folder: impl AsRef<Path>, model_max_length: Option<usize>) -> Result<()> {
        folder::save(self, folder.as_ref(), model_max_length)
    }

    /// The content of `tokenizer.json`.
    ///
    /// # Errors
    /// [`DataError::TokenizerLibrary`] if the library cannot serialise it.
    pub fn to_json(&self) -> Result<String> {
        self.inner
            .to_string(true)
            .map_err(|e| DataError::TokenizerLibrary { action: "serialise", reason: e.to_string() })
    }

    /// Encodes `text`. No special token is added, and none is made from the text. Long texts are encoded on all
    /// threads of the current rayon pool.
    ///
    /// # Errors
    /// [`DataError::TokenizerLibrary`]; does not occur with byte-level tokenizers.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_cached(text, &mut WordCache::default())
    }

    /// As [`Tokenizer::encode`], with words that earlier texts had.
    pub(crate) fn encode_cached(&self, text: &str, cache: &mut WordCache) -> Result<Vec<u32>> {
        let encode = |chunk: &str, cache: &mut WordCache| match &self.fast {
            Some(fast) => fast.encode(self.inner.get_model(), chunk, cache),
            None => self.encode_reference(chunk),
        };
        if !self.chunked || text.len() <= CHUNK_BYTES {
            return encode(text, cache);
        }
        let chunks: Vec<&str> = splitter::chunks(text, CHUNK_BYTES).collect();
        let encoded: Vec<Vec<u32>> = chunks
            .par_iter()
            .map_init(WordCache::default, |cache, chunk| encode(chunk, cache))
            .collect::<Result<_>>()?;
        Ok(encoded.concat())
    }

    /// The whole text at once through the library's own steps: the truth that chunks and [`FastEncoder`] must equal.
    fn encode_reference(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|e| DataError::TokenizerLibrary { action: "encode text", reason: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids` without the special tokens. Bytes that are not UTF-8 (a character cut in two) become U+FFFD.
    ///
    /// # Errors
    /// [`DataError::UnknownToken`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_filtered(ids, |id| !self.is_special(id))
    }

    /// As [`Tokenizer::decode`], but special tokens are shown by their names.
    ///
    /// # Errors
    /// [`DataError::UnknownToken`].
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        self.decode_filtered(ids, |_| true)
    }

    fn decode_filtered(&self, ids: &[u32], keep: impl Fn(u32) -> bool) -> Result<String> {
        let mut bytes = Vec::new();
        let mut kept = Vec::new();
        for &id in ids {
            let piece = self.piece(id)?;
            if keep(id) {
                bytes.extend_from_slice(piece);
                kept.push(id);
            }
        }
        if self.byte_level {
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        self.inner
            .decode(&kept, false)
            .map_err(|e| DataError::TokenizerLibrary { action: "decode ids", reason: e.to_string() })
    }

    /// A decoder that takes one id at a time and gives out whole characters.
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// Largest id + 1, added tokens included: the number of rows of an embedding.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Id of the token that ends a document.
    pub fn eos_id(&self) -> u32 {
        self.eos_id
    }

    /// Id of the token that stands before a text without another beginning: the one that ends documents, unless the file
    /// has one that begins them.
    pub fn bos_id(&self) -> u32 {
        self.bos_id.unwrap_or(self.eos_id)
    }

    /// Special tokens that the file's template puts before a text, as Llama 3's does and files of this crate do not.
    /// `transformers` adds them when it encodes a text; [`Tokenizer::encode`] leaves that to whoever begins one. What a
    /// template puts after a text is not for models that continue it.
    pub fn template(&self) -> &[u32] {
        &self.template
    }

    /// Bytes that `id` stands for: of a special token its name, `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id as usize)?.as_deref()
    }

    /// Whether `id` is a special token, which no text is encoded to.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Id of the token named `token`, which for ordinary tokens is its byte-level spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Names of the special tokens with their ids, in the order of ids.
    pub fn special_tokens(&self) -> Vec<(u32, String)> {
        let mut tokens: Vec<(u32, String)> = self
            .inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        tokens.sort();
        tokens
    }

    /// The splitter, or `None` for a tokenizer that cuts text in another way.
    pub fn splitter(&self) -> Option<Splitter> {
        self.splitter
    }

    /// Name of the model: `bpe`, `unigram`, or what the file says.
    pub fn model_name(&self) -> &str {
        &self.model
    }

    /// Gives the pre-tokens of `text` to `each`: what the file's own splitter leaves whole, the whole text where it
    /// has none. Slower than [`words`] with [`Tokenizer::splitter`].
    pub(crate) fn pretokens(&self, text: &str, each: &mut dyn FnMut(&str)) -> Result<()> {
        let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() else {
            each(text);
            return Ok(());
        };
        let mut parts = PreTokenizedString::from(text);
        pre_tokenizer
            .pre_tokenize(&mut parts)
            .map_err(|e| DataError::TokenizerLibrary { action: "split text", reason: e.to_string() })?;
        for (_, (start, end), _) in parts.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            each(text.get(start..end).unwrap_or_default());
        }
        Ok(())
    }

    /// Fingerprint: sha256 of the compact `tokenizer.json` and of the end-of-document id.
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    fn piece(&self, id: u32) -> Result<&[u8]> {
        self.token_bytes(id).ok_or(DataError::UnknownToken { id, vocab_size: self.vocab_size() })
    }

    /// Builds a tokenizer from the content of a `tokenizer.json`; an error is a reason for a person.
    fn from_json(bytes: &[u8], eos: Option<&str>) -> std::result::Result<Self, String> {
        let json: Value =
            serde_json::from_slice(bytes).map_err(|e| format!("not JSON: {e}; copy the file again"))?;
        folder::check_shape(&json)?;
        let mut inner = HfTokenizer::from_bytes(bytes)
            .map_err(|e| format!("not a Hugging Face tokenizer ({e}); expected a tokenizer.json file"))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| e.to_string())?;
        inner.set_encode_special_tokens(true);

        let byte_level = json["decoder"]["type"] == "ByteLevel";
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |id| *id as usize + 1);
        if size > MAX_VOCAB_SIZE {
            return Err(format!("the largest token id is {}, expected less than {MAX_VOCAB_SIZE}", size - 1));
        }
        let mut pieces = vec![None; size];
        for (token, id) in &vocab {
            pieces[*id as usize] = Some(splitter::piece_bytes(token, byte_level).into_boxed_slice());
        }
        let mut special = vec![false; size];
        for (id, token) in inner.get_added_tokens_decoder() {
            let Some(piece) = pieces.get_mut(id as usize) else { continue };
            *piece = Some(token.content.as_bytes().into());
            special[id as usize] = token.special;
        }

        let mut tokenizer = Self {
            inner,
            pieces,
            special,
            eos_id: 0,
            bos_id: None,
            template: Vec::new(),
            byte_level,
            chunked: false,
            splitter: splitter::own(&json["pre_tokenizer"]),
            model: json["model"]["type"].as_str().unwrap_or("bpe").to_lowercase(),
            fast: None,
            sha256: [0; 32],
        };
        let own = tokenizer.splitter;
        if let Some(splitter) = own.filter(|_| tokenizer.only_special_added()) {
            let normalizer = &json["normalizer"];
            tokenizer.chunked = normalizer.is_null() || normalizer["type"] == "NFC";
            if normalizer.is_null() {
                tokenizer.fast =
                    Some(Arc::new(FastEncoder::new(splitter, &json["model"]).map_err(|e| e.to_string())?));
            }
        }
        tokenizer.eos_id = tokenizer.find_eos(eos, own.is_some())?;
        tokenizer.template = tokenizer.find_template()?;
        tokenizer.bos_id = tokenizer.template.first().copied();
        let compact = tokenizer.inner.to_string(false).map_err(|e| e.to_string())?;
        let hash = Sha256::new().chain_update(compact).chain_update(tokenizer.eos_id.to_le_bytes());
        tokenizer.sha256 = hash.finalize().into();
        Ok(tokenizer)
    }

    /// Whether every added token is special: others match anywhere in a text, over a chunk's end too.
    fn only_special_added(&self) -> bool {
        self.inner.get_added_tokens_decoder().values().all(|token| token.special)
    }

    fn configured_id(&self, key: &str, name: &str) -> std::result::Result<u32, String> {
        self.inner.token_to_id(name).ok_or_else(|| {
            format!("{key} {name:?} of tokenizer_config.json is not in the vocabulary; correct that file")
        })
    }

    /// What stands before the ids of a text once the template is applied to it.
    fn find_template(&self) -> std::result::Result<Vec<u32>, String> {
        let ids = |special| self.inner.encode_fast("a", special).map(|e| e.get_ids().to_vec());
        let (plain, whole) = (ids(false).map_err(|e| e.to_string())?, ids(true).map_err(|e| e.to_string())?);
        let start = whole.windows(plain.len().max(1)).position(|part| part == plain);
        Ok(whole[..start.unwrap_or(0)].to_vec())
    }

    fn find_eos(&self, configured: Option<&str>, own: bool) -> std::result::Result<u32, String> {
        if let Some(name) = configured {
            return self.configured_id("eos_token", name);
        }
        let special = self.special_tokens();
        let known =
            || KNOWN_EOS.iter().find_map(|name| special.iter().find(|(_, s)| s == name).map(|(id, _)| *id));
        let only = (special.len() == 1).then(|| special[0].0);
        let first = own.then(|| special.first().map(|(id, _)| *id)).flatten();
        only.or_else(known).or(first).ok_or_else(|| {
            let names: Vec<_> = special.iter().take(10).map(|(_, name)| name.as_str()).collect();
            format!(
                "cannot tell which token ends a document (special tokens: {names:?}); put a tokenizer_config.json \
                 with an \"eos_token\" beside it"
            )
        })
    }
}

#[cfg(test)]
mod tests;
