//! How well a tokenizer serves each language: characters a token, and what stands in the way where they are few.
//!
//! A *pre-token* is what the splitter leaves whole; no token reaches over its ends. So characters a pre-token are the
//! most that characters a token can be, whatever the vocabulary.

mod verdict;

use rayon::prelude::*;
use serde::Serialize;

pub use verdict::{Cause, Refusal};

use crate::corpus::Document;
use crate::error::Result;
use crate::language::{Languages, script_name};
use crate::split::{Side, side_of};
use crate::tokenizer::{Splitter, Tokenizer};

/// Pre-tokens of this many characters and more are counted together.
pub const LONGEST: usize = 24;
/// Held-out text of fewer characters says too little: the language is then measured on what was trained on.
const LEAST_HELD_OUT_CHARS: u64 = 1000;
/// Text measured in one parallel batch.
const BATCH_BYTES: usize = 4 << 20;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FertilityOptions {
    /// Share of documents that are held out by the hash of their text; where it is above 0, only those are measured,
    /// but for languages with fewer than 1,000 characters of them.
    pub held_out: f64,
    /// Characters of a language after which no more of it is measured.
    pub max_chars: u64,
}

impl Default for FertilityOptions {
    /// Every document, up to 4 million characters of each language.
    fn default() -> Self {
        Self { held_out: 0.0, max_chars: 4_000_000 }
    }
}

/// Counts over the documents of one language.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Tally {
    /// Documents.
    pub documents: u64,
    /// Characters (Unicode scalar values).
    pub chars: u64,
    /// Bytes of UTF-8.
    pub bytes: u64,
    /// Words between white space.
    pub words: u64,
    /// Tokens, end-of-document tokens not counted.
    pub tokens: u64,
    /// Pre-tokens of the tokenizer's own splitter; 0 where it has none.
    pub pretokens: u64,
    /// Pre-tokens that the splitter `rb` would make.
    pub rb_pretokens: u64,
    /// Pre-tokens by length: of 1 character, of 2, up to [`LONGEST`] and more.
    pub pretoken_lengths: Vec<u64>,
}

/// What one language gets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LanguageReport {
    /// Its name: the declared one, or of a script where none is declared.
    pub name: String,
    /// Its floor, in characters a token.
    pub floor: Option<f64>,
    /// Whether this is held-out text.
    pub held_out: bool,
    /// The counts.
    #[serde(flatten)]
    pub tally: Tally,
    /// Characters a token.
    pub chars_per_token: f64,
    /// Bytes a token.
    pub bytes_per_token: f64,
    /// Tokens a word.
    pub tokens_per_word: f64,
    /// Words a token.
    pub words_per_token: f64,
    /// Characters a pre-token; 0 where there are none.
    pub chars_per_pretoken: f64,
    /// Characters a pre-token of the splitter `rb`.
    pub rb_chars_per_pretoken: f64,
    /// Different tokens in its text.
    pub distinct_tokens: u64,
    /// Share of the used vocabulary that is its own: tokens that are more frequent in its text than in any other
    /// language's.
    pub vocab_share: f64,
}

/// Report on a tokenizer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FertilityReport {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// `bpe`, `unigram` or the name in the file.
    pub model: String,
    /// Name of the splitter, or `other`.
    pub splitter: String,
    /// Fingerprint of the tokenizer.
    pub tokenizer_sha256: String,
    /// Whether every document came back byte for byte.
    pub round_trip: bool,
    /// Documents that did not.
    pub round_trip_failures: u64,
    /// Vocabulary entries by the script of their letters; `none` for bytes, digits and signs.
    pub scripts: Vec<(String, u64)>,
    /// Each language with text, in the order declared.
    pub languages: Vec<LanguageReport>,
    /// Names of declared languages without any text.
    pub without_text: Vec<String>,
    /// Why the gate refuses this tokenizer; empty if it does not.
    pub refusals: Vec<Refusal>,
}

/// Encodes documents and counts, by declared language or, where none is declared, by script.
///
/// # Errors
/// The first error of `documents` or of encoding.
pub fn measure(
    documents: impl Iterator<Item = Result<Document>>,
    tokenizer: &Tokenizer,
    languages: &Languages,
    options: FertilityOptions,
) -> Result<FertilityReport> {
    let mut meter = Meter::new(tokenizer, languages, options)?;
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for document in documents {
        let document = document?;
        let Some(group) = meter.group_of(&document) else { continue };
        bytes += document.text.len();
        batch.push((document.text, group));
        if bytes >= BATCH_BYTES {
            meter.add(&batch)?;
            (bytes, batch) = (0, Vec::new());
            if meter.is_full() {
                break;
            }
        }
    }
    meter.add(&batch)?;
    Ok(meter.finish())
}

/// One side of one language.
#[derive(Default)]
struct Measured {
    tally: Tally,
    /// Occurrences of each token.
    used: Vec<u64>,
}

struct Meter<'t> {
    tokenizer: &'t Tokenizer,
    languages: &'t Languages,
    options: FertilityOptions,
    rb: Pretokens<'t>,
    own: Pretokens<'t>,
    names: Vec<String>,
    /// Two for each language: for training, held out.
    sides: Vec<[Measured; 2]>,
    failures: u64,
}

impl<'t> Meter<'t> {
    fn new(tokenizer: &'t Tokenizer, languages: &'t Languages, options: FertilityOptions) -> Result<Self> {
        let names: Vec<String> = languages.list().iter().map(|l| l.name.clone()).collect();
        let sides = names.iter().map(|_| Default::default()).collect();
        let rb = Pretokens::Splitter(Box::new(Splitter::Rb.regex()?));
        let own = match tokenizer.splitter() {
            Some(splitter) => Pretokens::Splitter(Box::new(splitter.regex()?)),
            None => Pretokens::Other(tokenizer),
        };
        Ok(Self { tokenizer, languages, options, rb, own, names, sides, failures: 0 })
    }

    /// Language and side of a document that is still to be measured.
    fn group_of(&mut self, document: &Document) -> Option<(usize, usize)> {
        let language = if self.languages.is_empty() {
            let script = script_name(&document.text);
            let known = self.names.iter().position(|name| name == script);
            known.unwrap_or_else(|| {
                self.names.push(script.to_owned());
                self.sides.push(Default::default());
                self.names.len() - 1
            })
        } else {
            self.languages.of(document)?
        };
        let held_out =
            self.options.held_out > 0.0 && side_of(&document.text, self.options.held_out) == Side::Val;
        let side = usize::from(held_out);
        let tally = &mut self.sides[language][side].tally;
        if tally.chars >= self.options.max_chars {
            return None;
        }
        // Counted here, so that the limit holds within a batch too.
        tally.documents += 1;
        tally.chars += document.text.chars().count() as u64;
        Some((language, side))
    }

    /// Whether no more text can change the report: every declared language has its fill of the side that counts.
    fn is_full(&self) -> bool {
        let side = usize::from(self.options.held_out > 0.0);
        let full = |sides: &[Measured; 2]| sides[side].tally.chars >= self.options.max_chars;
        !self.languages.is_empty() && self.sides.iter().all(full)
    }

    fn add(&mut self, batch: &[(String, (usize, usize))]) -> Result<()> {
        let measured: Vec<(Tally, Vec<u32>, bool)> =
            batch.par_iter().map(|(text, _)| self.measure_one(text)).collect::<Result<_>>()?;
        for ((_, (language, side)), (tally, ids, same)) in batch.iter().zip(measured) {
            let Measured { tally: sum, used } = &mut self.sides[*language][*side];
            sum.bytes += tally.bytes;
            sum.words += tally.words;
            sum.tokens += tally.tokens;
            sum.pretokens += tally.pretokens;
            sum.rb_pretokens += tally.rb_pretokens;
            sum.pretoken_lengths.resize(LONGEST, 0);
            sum.pretoken_lengths.iter_mut().zip(&tally.pretoken_lengths).for_each(|(a, b)| *a += b);
            used.resize(self.tokenizer.vocab_size(), 0);
            ids.iter().for_each(|id| used[*id as usize] += 1);
            self.failures += u64::from(!same);
        }
        Ok(())
    }

    fn measure_one(&self, text: &str) -> Result<(Tally, Vec<u32>, bool)> {
        let ids = self.tokenizer.encode(text)?;
        let mut tally = Tally {
            bytes: text.len() as u64,
            words: text.split_whitespace().count() as u64,
            tokens: ids.len() as u64,
            pretoken_lengths: vec![0; LONGEST],
            ..Tally::default()
        };
        self.own.each(text, |word| {
            tally.pretokens += 1;
            tally.pretoken_lengths[word.chars().count().clamp(1, LONGEST) - 1] += 1;
        })?;
        self.rb.each(text, |_| tally.rb_pretokens += 1)?;
        let same = self.tokenizer.decode(&ids)? == text;
        Ok((tally, ids, same))
    }

    fn finish(self) -> FertilityReport {
        let mut without_text = Vec::new();
        let mut chosen: Vec<(usize, bool, Measured)> = Vec::new();
        for (index, [train, held_out]) in self.sides.into_iter().enumerate() {
            let enough = held_out.tally.chars >= LEAST_HELD_OUT_CHARS;
            match (held_out.tally.documents > 0, train.tally.documents > 0) {
                (true, trained) if enough || !trained => chosen.push((index, true, held_out)),
                (_, true) => chosen.push((index, false, train)),
                _ => without_text.push(self.names[index].clone()),
            }
        }
        let owners = owners(&chosen, self.tokenizer.vocab_size());
        let used = owners.iter().flatten().count().max(1) as f64;
        let mut languages: Vec<LanguageReport> = Vec::new();
        for (place, (index, held_out, Measured { tally, used: counts })) in chosen.iter().enumerate() {
            let ratio = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
            let owned = owners.iter().filter(|owner| **owner == Some(place)).count();
            languages.push(LanguageReport {
                name: self.names[*index].clone(),
                floor: self.languages.list().get(*index).and_then(|l| l.floor),
                held_out: *held_out,
                chars_per_token: ratio(tally.chars, tally.tokens),
                bytes_per_token: ratio(tally.bytes, tally.tokens),
                tokens_per_word: ratio(tally.tokens, tally.words),
                words_per_token: ratio(tally.words, tally.tokens),
                chars_per_pretoken: ratio(tally.chars, tally.pretokens),
                rb_chars_per_pretoken: ratio(tally.chars, tally.rb_pretokens),
                distinct_tokens: counts.iter().filter(|count| **count > 0).count() as u64,
                vocab_share: owned as f64 / used,
                tally: tally.clone(),
            });
        }
        let refusals = if self.languages.is_empty() { Vec::new() } else { verdict::refusals(&languages) };
        FertilityReport {
            vocab_size: self.tokenizer.vocab_size(),
            model: self.tokenizer.model_name().to_owned(),
            splitter: self.tokenizer.splitter().map_or("other", Splitter::name).to_owned(),
            tokenizer_sha256: crate::token_file::hex(&self.tokenizer.sha256()),
            round_trip: self.failures == 0,
            round_trip_failures: self.failures,
            scripts: scripts(self.tokenizer),
            languages,
            without_text,
            refusals,
        }
    }
}

/// For each token, the language in whose text it is most frequent; `None` for one that is in no text.
fn owners(sides: &[(usize, bool, Measured)], vocab_size: usize) -> Vec<Option<usize>> {
    let rate = |place: usize, id: usize| {
        let Measured { tally, used } = &sides[place].2;
        used.get(id).copied().unwrap_or(0) as f64 / tally.tokens.max(1) as f64
    };
    let owner = |id: usize| {
        let best = (0..sides.len()).rev().max_by(|a, b| rate(*a, id).total_cmp(&rate(*b, id)))?;
        (rate(best, id) > 0.0).then_some(best)
    };
    (0..vocab_size).map(owner).collect()
}

/// Vocabulary entries by script, the most frequent first.
fn scripts(tokenizer: &Tokenizer) -> Vec<(String, u64)> {
    let mut counts: Vec<(String, u64)> = Vec::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        if tokenizer.is_special(id) {
            continue;
        }
        let Some(bytes) = tokenizer.token_bytes(id) else { continue };
        let name = script_name(&String::from_utf8_lossy(bytes));
        match counts.iter_mut().find(|(n, _)| n == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name.to_owned(), 1)),
        }
    }
    counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    counts
}

/// A way to cut text into pre-tokens.
enum Pretokens<'t> {
    Splitter(Box<tokenizers::utils::SysRegex>),
    Other(&'t Tokenizer),
}

impl Pretokens<'_> {
    fn each(&self, text: &str, mut each: impl FnMut(&str)) -> Result<()> {
        match self {
            Pretokens::Splitter(regex) => {
                crate::tokenizer::words(regex, text, each);
                Ok(())
            }
            Pretokens::Other(tokenizer) => tokenizer.pretokens(text, &mut each),
        }
    }
}

#[cfg(test)]
mod tests;
