//! Learning a Unigram model from counted words, by the `tokenizers` library.
//!
//! Words are given to it as characters that stand for bytes, as BPE has them, so that every text has an encoding.
//! Three things are ours: whole words are among the pieces that it starts with; it runs on one thread, because the library adds in an order that depends on how many there
//! are; and scores of bytes that the model has lost are given in the order of the bytes, where the library takes them
//! in the order of a hash table with a random key.

use serde_json::{Value, json};
use tokenizers::AddedToken;
use tokenizers::models::unigram::{Unigram, UnigramTrainer};

use super::TokenizerConfig;
use super::splitter::byte_chars;
use crate::error::{DataError, Result};

/// Longest piece, in bytes: a word of sixteen Bengali letters. The library's 16 would be five of them.
const MAX_PIECE_BYTES: usize = 48;
/// Longer words are learned from in parts: the lattice of a word grows with its length.
const MAX_WORD_BYTES: usize = 256;
/// The library counts in 32 bits; all counts together stay below this.
const MAX_TOTAL: u64 = 1 << 31;
/// A character of no byte. The library starts with what occurs twice, before two different characters, in a list of
/// different words: a frequent word that is in no other would never be a piece. With this mark after a second, rare
/// copy, it may be one.
const MARK: char = '\u{E000}';
/// How often an occurrence counts beside that copy.
const PARTS: u64 = 64;
/// Score of special tokens, so low that no text is ever cut into one.
const NEVER: f64 = -1e6;
/// The distance of two scores of lost bytes.
const STEP: f64 = 1e-4;

/// The `model` entry of a `tokenizer.json`, learned from sorted `words` with their counts. A word that counts at least
/// `min_count` may be a piece as a whole.
pub(super) fn learn(words: Vec<(Vec<u8>, u64)>, min_count: u64, config: &TokenizerConfig) -> Result<Value> {
    let chars = byte_chars();
    let total = words.iter().fold(0u64, |t, (w, c)| t.saturating_add(c.saturating_mul(w.len() as u64)));
    let divisor = total.saturating_mul(PARTS).div_ceil(MAX_TOTAL).max(1);
    let spelled = |part: &[u8]| part.iter().map(|b| chars[*b as usize]).collect::<String>();
    let mut sentences: Vec<(String, u32)> = Vec::with_capacity(2 * words.len());
    for (word, count) in &words {
        let times = u32::try_from((count.saturating_mul(PARTS) / divisor).max(1)).unwrap_or(u32::MAX);
        sentences.extend(word.chunks(MAX_WORD_BYTES).map(|part| (spelled(part), times)));
        if *count >= min_count && word.len() <= MAX_PIECE_BYTES {
            sentences.push((spelled(word) + MARK.encode_utf8(&mut [0; 4]), 1));
        }
    }
    drop(words);

    let fail = |reason: String| DataError::TokenizerLibrary { action: "train a Unigram model", reason };
    let special = config.special_tokens.iter().map(|token| AddedToken::from(token.clone(), true));
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size(u32::try_from(config.vocab_size).unwrap_or(u32::MAX))
        .special_tokens(special.collect())
        .initial_alphabet(chars.into_iter().collect())
        .max_piece_length(MAX_PIECE_BYTES)
        .build()
        .map_err(|e| fail(e.to_string()))?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(|e| fail(e.to_string()))?;
    let mut model = Unigram::default();
    pool.install(|| trainer.do_train(sentences, &mut model)).map_err(|e| fail(e.to_string()))?;

    let mut pieces: Vec<(String, f64)> = model.iter().cloned().collect();
    let special = config.special_tokens.len();
    pieces[..special].iter_mut().for_each(|piece| piece.1 = NEVER);
    settle_lost_bytes(&mut pieces[special..]);
    // Pieces of the mark, and one spelled as a special token, which text would be encoded to.
    let mut index = 0;
    pieces.retain(|(piece, _)| {
        index += 1;
        index <= special || !(piece.contains(MARK) || config.special_tokens.contains(piece))
    });
    // The library keeps all pieces where the size asked for leaves room for the bytes alone.
    let mut surplus = pieces.len().saturating_sub(config.vocab_size);
    let mut from_the_end = pieces.len();
    while surplus > 0 && from_the_end > special {
        from_the_end -= 1;
        if pieces[from_the_end].0.chars().count() > 1 {
            pieces.remove(from_the_end);
            surplus -= 1;
        }
    }
    Ok(json!({"type": "Unigram", "unk_id": null, "byte_fallback": false, "vocab": pieces}))
}

/// Puts pieces in the order of their scores, equal ones by spelling, with the scores at the lower end, where lost
/// bytes are, shared out among the single bytes there in the order of the bytes.
fn settle_lost_bytes(pieces: &mut [(String, f64)]) {
    // The mark too, which has a score of that ladder, whichever it is.
    let single = |piece: &str| piece.chars().count() == 1;
    let lowest = pieces.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
    // All single bytes whose score may come from the library's ladder.
    let top = lowest + 256.0 * STEP;
    let mut lost: Vec<usize> =
        (0..pieces.len()).filter(|i| single(&pieces[*i].0) && pieces[*i].1 <= top).collect();
    let mut scores: Vec<f64> = lost.iter().map(|i| pieces[*i].1).collect();
    scores.sort_by(f64::total_cmp);
    lost.sort_by(|a, b| pieces[*a].0.cmp(&pieces[*b].0));
    for (index, score) in lost.into_iter().zip(scores) {
        pieces[index].1 = score;
    }
    pieces.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
}
