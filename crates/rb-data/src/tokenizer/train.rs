//! Training: count words in parallel, learn merges, write the vocabulary down as a `tokenizer.json`.

use std::collections::HashMap;

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use tokenizers::utils::SysRegex;
use tokenizers::{NormalizedString, Normalizer, normalizers::unicode::NFC};

use super::learn::{LearnConfig, Learned, learn};
use super::splitter::{self, byte_chars};
use super::{CHUNK_BYTES, MAX_VOCAB_SIZE, ModelKind, Normalization, Tokenizer, TokenizerConfig, unigram};
use crate::error::{DataError, Result};

/// Text counted in one parallel batch.
const BATCH_BYTES: usize = 32 << 20;
/// Longer words are counted in parts: they occur once, and a merge would walk along all of each.
const MAX_WORD_BYTES: usize = 1024;

/// Weighted counts are kept in this many parts of one occurrence.
const PARTS: f64 = 64.0;

/// What training saw and made.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainReport {
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// Different words found.
    pub distinct_words: u64,
    /// Vocabulary size asked for.
    pub requested_vocab_size: usize,
    /// Vocabulary size reached: smaller if the text has no more pairs that occur `min_frequency` times.
    pub vocab_size: usize,
    /// What each group of documents gave, in the order of the weights; the last is that of documents without a group.
    pub groups: Vec<GroupShare>,
}

/// The part of one group of documents in what a tokenizer was trained on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GroupShare {
    /// Documents.
    pub documents: u64,
    /// Characters of text.
    pub chars: u64,
    /// How often each occurrence of a word counted.
    pub factor: f64,
}

impl TrainReport {
    /// Whether the vocabulary has the size asked for.
    pub fn is_full(&self) -> bool {
        self.vocab_size == self.requested_vocab_size
    }
}

/// Documents come with the number of their group in `weights`; any other number is a document without a group.
pub(super) fn train<S: AsRef<str>>(
    documents: impl Iterator<Item = Result<(S, usize)>>,
    weights: &[f64],
    config: &TokenizerConfig,
) -> Result<(Tokenizer, TrainReport)> {
    check(config)?;
    let counter = Counter { regex: config.splitter.regex()?, normalization: config.normalization };
    let mut groups = vec![(Counts::new(), GroupShare::default()); weights.len() + 1];
    let (mut documents_read, mut text_bytes) = (0, 0);
    let (mut batch, mut batch_bytes): (Vec<(S, usize)>, usize) = (Vec::new(), 0);
    for document in documents {
        let (text, group) = document?;
        documents_read += 1;
        text_bytes += text.as_ref().len() as u64;
        batch_bytes += text.as_ref().len();
        let group = group.min(weights.len());
        groups[group].1.documents += 1;
        groups[group].1.chars += text.as_ref().chars().count() as u64;
        batch.push((text, group));
        if batch_bytes >= BATCH_BYTES {
            counter.count(&batch, &mut groups)?;
            batch.clear();
            batch_bytes = 0;
        }
    }
    counter.count(&batch, &mut groups)?;
    let (words, shares, scale) = weighted(groups, weights)?;
    if words.is_empty() {
        return Err(DataError::NoTrainingText);
    }

    let distinct_words = words.len() as u64;
    let min_frequency = config.min_frequency.saturating_mul(scale);
    let json = match config.model {
        ModelKind::Bpe => {
            let learned = learn(
                words,
                &LearnConfig {
                    vocab_size: config.vocab_size,
                    special_tokens: &config.special_tokens,
                    min_frequency,
                },
            );
            to_json(bpe_json(&learned), config)
        }
        ModelKind::Unigram => to_json(unigram::learn(words, min_frequency, config)?, config),
    };
    let eos = config.special_tokens.first().map(String::as_str);
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes(), eos)
        .map_err(|reason| DataError::TokenizerLibrary { action: "build the trained tokenizer", reason })?;
    let report = TrainReport {
        documents: documents_read,
        text_bytes,
        distinct_words,
        requested_vocab_size: config.vocab_size,
        vocab_size: tokenizer.vocab_size(),
        groups: shares,
    };
    if !report.is_full() {
        tracing::warn!(
            requested = report.requested_vocab_size,
            reached = report.vocab_size,
            text_bytes,
            "the text is too small for the requested vocabulary: lower vocab_size or min_frequency, or add text"
        );
    }
    Ok((tokenizer, report))
}

type Words = Vec<(Vec<u8>, u64)>;

/// Joins the counts of the groups so that their characters stand in the ratio of `weights`, sorted by word, and says in
/// how many parts an occurrence is counted. No count is lowered: the group with the most text for its weight counts as
/// it is, and so do documents without a group.
fn weighted(mut groups: Vec<(Counts, GroupShare)>, weights: &[f64]) -> Result<(Words, Vec<GroupShare>, u64)> {
    let amount = |group: usize| groups[group].1.chars as f64 / weights[group];
    let largest = (0..weights.len()).map(amount).fold(0.0, f64::max);
    for (group, weight) in weights.iter().enumerate() {
        let share = &mut groups[group].1;
        share.factor = if share.chars == 0 { 1.0 } else { largest * weight / share.chars as f64 };
    }
    if let Some((_, rest)) = groups.last_mut() {
        rest.factor = 1.0;
    }
    let scale = if groups.iter().all(|(_, share)| share.factor == 1.0) { 1.0 } else { PARTS };
    let mut counts = Counts::new();
    let mut shares = Vec::new();
    for (words, share) in groups {
        let times = (share.factor * scale).round().max(1.0) as u64;
        if counts.is_empty() && times == 1 {
            counts = words;
        } else {
            words.iter().for_each(|(word, count)| add(&mut counts, word, count.saturating_mul(times)));
        }
        shares.push(share);
    }
    let mut words: Words = counts.into_iter().collect();
    words.sort_unstable();
    Ok((words, shares, scale as u64))
}

fn check(config: &TokenizerConfig) -> Result<()> {
    let special_tokens = config.special_tokens.len();
    if special_tokens == 0 {
        return Err(DataError::BadSetting {
            what: "tokenizer",
            name: "special_tokens",
            got: "an empty list".into(),
            expected: "at least one token, the first of which ends a document",
        });
    }
    let chars = byte_chars();
    for (i, token) in config.special_tokens.iter().enumerate() {
        let refuse = |reason| Err(DataError::BadSpecialToken { token: token.clone(), reason });
        if token.is_empty() {
            return refuse("is empty");
        }
        if config.special_tokens[..i].contains(token) {
            return refuse("is listed twice");
        }
        let mut letters = token.chars();
        if let (Some(c), None) = (letters.next(), letters.next())
            && chars.contains(&c)
        {
            return refuse("is a single character that stands for a byte in the vocabulary");
        }
    }
    let (got, least) = (config.vocab_size, 256 + special_tokens);
    if got < least {
        return Err(DataError::VocabTooSmall { got, least, special_tokens });
    }
    if got > MAX_VOCAB_SIZE {
        return Err(DataError::VocabTooLarge { got, most: MAX_VOCAB_SIZE });
    }
    Ok(())
}

type Counts = HashMap<Vec<u8>, u64>;

struct Counter {
    regex: SysRegex,
    normalization: Normalization,
}

impl Counter {
    /// Adds the words of `documents` to the counts of their groups. Sums do not depend on the order of the threads.
    fn count<S: AsRef<str>>(
        &self,
        documents: &[(S, usize)],
        groups: &mut [(Counts, GroupShare)],
    ) -> Result<()> {
        for (group, (counts, _)) in groups.iter_mut().enumerate() {
            let mine = documents.iter().filter(|(_, of)| *of == group);
            let chunks: Vec<&str> =
                mine.flat_map(|(text, _)| splitter::chunks(text.as_ref(), CHUNK_BYTES)).collect();
            let parts: Vec<Counts> = chunks
                .par_chunks(16)
                .map(|chunks| {
                    let mut part = Counts::new();
                    chunks.iter().try_for_each(|chunk| self.count_chunk(chunk, &mut part)).map(|()| part)
                })
                .collect::<Result<_>>()?;
            for (word, count) in parts.into_iter().flatten() {
                add(counts, &word, count);
            }
        }
        Ok(())
    }

    fn count_chunk(&self, chunk: &str, counts: &mut Counts) -> Result<()> {
        let mut each = |word: &str| word.as_bytes().chunks(MAX_WORD_BYTES).for_each(|w| add(counts, w, 1));
        match self.normalization {
            Normalization::None => splitter::words(&self.regex, chunk, &mut each),
            Normalization::Nfc => {
                let mut text = NormalizedString::from(chunk);
                NFC.normalize(&mut text).map_err(|e| DataError::TokenizerLibrary {
                    action: "normalise text",
                    reason: e.to_string(),
                })?;
                splitter::words(&self.regex, text.get(), &mut each);
            }
        }
        Ok(())
    }
}

fn add(counts: &mut Counts, word: &[u8], count: u64) {
    match counts.get_mut(word) {
        Some(c) => *c = c.saturating_add(count),
        None => {
            counts.insert(word.to_vec(), count);
        }
    }
}

/// The `model` entry of a `tokenizer.json` with learned merges.
fn bpe_json(learned: &Learned) -> Value {
    let token = |id: u32| learned.tokens[id as usize].as_str();
    let vocab: Map<String, Value> = learned.tokens.iter().cloned().zip((0u32..).map(Value::from)).collect();
    let merges: Vec<[&str; 2]> = learned.merges.iter().map(|(a, b)| [token(*a), token(*b)]).collect();
    json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab,
        "merges": merges,
    })
}

/// The `tokenizer.json` of a learned model.
fn to_json(model: Value, config: &TokenizerConfig) -> Value {
    let added: Vec<Value> = config
        .special_tokens
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": match config.normalization {
            Normalization::None => Value::Null,
            Normalization::Nfc => json!({"type": "NFC"}),
        },
        "pre_tokenizer": config.splitter.to_json(),
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": model,
    })
}
