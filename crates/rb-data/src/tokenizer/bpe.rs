//! BPE of one word without the library's bookkeeping: ids by ranks of pairs.
//!
//! Its reference is the library's model, which the tests compare with.

use ahash::AHashMap;
use serde_json::Value;

use super::splitter::byte_chars;

/// Longer words go to the library, whose queue does not slow down with their length.
const MAX_WORD_BYTES: usize = 96;

/// Merges by pair.
#[derive(Debug)]
pub(super) struct Bpe {
    bytes: [u32; 256],
    /// Rank and result of each pair.
    merges: AHashMap<(u32, u32), (u32, u32)>,
}

impl Bpe {
    /// The `model` entry of a `tokenizer.json`; `None` for one with anything beside bytes and merges.
    pub(super) fn new(model: &Value) -> Option<Self> {
        let absent =
            |key: &str| matches!(model.get(key), None | Some(Value::Null) | Some(Value::Bool(false)));
        let plain =
            ["dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"].iter().all(|k| absent(k));
        let empty = |key: &str| absent(key) || model[key] == "";
        let affixes = empty("continuing_subword_prefix") && empty("end_of_word_suffix");
        if model["type"] != "BPE" || !plain || !affixes {
            return None;
        }
        let vocab = model["vocab"].as_object()?;
        let id = |token: &str| vocab.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut bytes = [0; 256];
        for (byte, c) in byte_chars().iter().enumerate() {
            bytes[byte] = id(c.encode_utf8(&mut [0; 4]))?;
        }
        let mut merges = AHashMap::new();
        for (rank, merge) in (0..).zip(model["merges"].as_array()?) {
            let (a, b) = match merge {
                Value::String(both) => both.split_once(' ')?,
                _ => (merge[0].as_str()?, merge[1].as_str()?),
            };
            merges.insert((id(a)?, id(b)?), (rank, id(&format!("{a}{b}"))?));
        }
        Some(Self { bytes, merges })
    }

    /// Appends the ids of `word`, or returns `false` for a word that is too long for this way.
    pub(super) fn encode(&self, word: &[u8], out: &mut Vec<u32>) -> bool {
        if word.len() > MAX_WORD_BYTES {
            return false;
        }
        const NONE: (u32, u32) = (u32::MAX, 0);
        let mut ids = [0u32; MAX_WORD_BYTES];
        let mut pairs = [NONE; MAX_WORD_BYTES];
        let mut n = word.len();
        let merge = |a, b| self.merges.get(&(a, b)).copied().unwrap_or(NONE);
        for (id, byte) in ids.iter_mut().zip(word) {
            *id = self.bytes[usize::from(*byte)];
        }
        for i in 1..n {
            pairs[i - 1] = merge(ids[i - 1], ids[i]);
        }
        // The pair of lowest rank is merged, the first of several, until there is none.
        while n > 1 {
            let (mut at, mut best) = (0, NONE.0);
            for (i, pair) in pairs[..n - 1].iter().enumerate() {
                if pair.0 < best {
                    (at, best) = (i, pair.0);
                }
            }
            if best == NONE.0 {
                break;
            }
            ids[at] = pairs[at].1;
            ids.copy_within(at + 2..n, at + 1);
            pairs.copy_within(at + 1..n - 1, at);
            n -= 1;
            if at + 1 < n {
                pairs[at] = merge(ids[at], ids[at + 1]);
            }
            if at > 0 {
                pairs[at - 1] = merge(ids[at - 1], ids[at]);
            }
        }
        out.extend_from_slice(&ids[..n]);
        true
    }
}
