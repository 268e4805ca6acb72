//! Learning BPE merges from counted words.
//!
//! The pair with the highest count is merged, ties going to the smaller ids, until the vocabulary is full: the rule
//! of Hugging Face's trainer, and a test compares the two. This one exists because that one counts pairs in 32 bits
//! (on large corpora the most frequent pairs wrap around and are never merged) and can merge text into a special
//! token's id. Here counts have 64 bits and saturate, and a merge that would spell a special token is left out.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::splitter::byte_chars;

type Pair = (u32, u32);

/// What is to be learned.
pub(super) struct LearnConfig<'a> {
    pub(super) vocab_size: usize,
    pub(super) special_tokens: &'a [String],
    pub(super) min_frequency: u64,
}

/// A vocabulary (id = index) and its merges in order.
pub(super) struct Learned {
    pub(super) tokens: Vec<String>,
    pub(super) merges: Vec<Pair>,
}

struct Word {
    symbols: Vec<u32>,
    count: u64,
}

/// Learns from `words` with their counts. Ids: special tokens, then bytes in the order of their characters, then
/// merges.
pub(super) fn learn(words: Vec<(Vec<u8>, u64)>, config: &LearnConfig) -> Learned {
    let chars = byte_chars();
    let mut by_char: Vec<usize> = (0..256).collect();
    by_char.sort_by_key(|b| chars[*b]);
    let mut tokens: Vec<String> = config.special_tokens.to_vec();
    let mut byte_ids = [0u32; 256];
    for byte in by_char {
        byte_ids[byte] = tokens.len() as u32;
        tokens.push(chars[byte].to_string());
    }
    let special: HashSet<&str> = config.special_tokens.iter().map(String::as_str).collect();
    let mut ids: HashMap<String, u32> = tokens.iter().cloned().zip(0..).collect();

    let mut words: Vec<Word> = words
        .into_iter()
        .map(|(bytes, count)| Word { symbols: bytes.iter().map(|b| byte_ids[*b as usize]).collect(), count })
        .collect();
    let mut pairs = Pairs::count(&words);
    let mut merges = Vec::new();
    while tokens.len() < config.vocab_size {
        let Some((pair, count)) = pairs.pop() else { break };
        if count < config.min_frequency.max(1) {
            break;
        }
        let token = format!("{}{}", tokens[pair.0 as usize], tokens[pair.1 as usize]);
        if special.contains(token.as_str()) {
            continue;
        }
        // The same string may arise from another pair; it keeps its id.
        let id = *ids.entry(token).or_insert_with_key(|token| {
            tokens.push(token.clone());
            tokens.len() as u32 - 1
        });
        merges.push(pair);
        pairs.merge(&mut words, pair, id);
    }
    Learned { tokens, merges }
}

/// Counts of neighbouring symbols, with the words they occur in and a queue by count.
#[derive(Default)]
struct Pairs {
    counts: HashMap<Pair, u64>,
    /// Words in which a pair occurs or has occurred.
    places: HashMap<Pair, Vec<usize>>,
    /// May hold counts that are out of date: `pop` checks.
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
}

impl Pairs {
    fn count(words: &[Word]) -> Self {
        let mut pairs = Self::default();
        for (index, word) in words.iter().enumerate() {
            for two in word.symbols.windows(2) {
                let pair = (two[0], two[1]);
                let count = pairs.counts.entry(pair).or_default();
                *count = count.saturating_add(word.count);
                let places = pairs.places.entry(pair).or_default();
                if places.last() != Some(&index) {
                    places.push(index);
                }
            }
        }
        pairs.queue = pairs.counts.iter().map(|(pair, count)| (*count, Reverse(*pair))).collect();
        pairs
    }

    /// Takes out the most frequent pair.
    fn pop(&mut self) -> Option<(Pair, u64)> {
        while let Some((queued, Reverse(pair))) = self.queue.pop() {
            let count = self.counts.get(&pair).copied().unwrap_or(0);
            if count == queued {
                return Some((pair, count));
            }
            // A count that grew was queued anew when it did.
            if count > 0 && count < queued {
                self.queue.push((count, Reverse(pair)));
            }
        }
        None
    }

    /// Replaces `pair` by `id` in all words and updates the counts around it.
    fn merge(&mut self, words: &mut [Word], pair: Pair, id: u32) {
        self.counts.remove(&pair);
        let mut places = self.places.remove(&pair).unwrap_or_default();
        places.sort_unstable();
        places.dedup();
        let mut grown: HashSet<Pair> = HashSet::new();
        for index in places {
            let Word { symbols, count } = &mut words[index];
            merge_symbols(symbols, pair, id, |neighbour, added| {
                if !added {
                    if let Some(c) = self.counts.get_mut(&neighbour) {
                        *c = c.saturating_sub(*count);
                    }
                    return;
                }
                let c = self.counts.entry(neighbour).or_default();
                *c = c.saturating_add(*count);
                grown.insert(neighbour);
                let places = self.places.entry(neighbour).or_default();
                if places.last() != Some(&index) {
                    places.push(index);
                }
            });
        }
        // Within a word a new pair may come and go again: only final counts are queued.
        for neighbour in grown {
            let count = self.counts.get(&neighbour).copied().unwrap_or(0);
            if count > 0 {
                self.queue.push((count, Reverse(neighbour)));
            }
        }
    }
}

/// Replaces `pair` by `id` from left to right; reports each neighbouring pair that is lost (`false`) or made
/// (`true`), those of `pair` itself left out.
fn merge_symbols(symbols: &mut Vec<u32>, pair: Pair, id: u32, mut change: impl FnMut(Pair, bool)) {
    let mut report = |neighbour: Pair, added: bool| {
        if neighbour != pair {
            change(neighbour, added);
        }
    };
    let (mut read, mut write) = (0, 0);
    while read < symbols.len() {
        if read + 1 < symbols.len() && (symbols[read], symbols[read + 1]) == pair {
            if write > 0 {
                report((symbols[write - 1], pair.0), false);
                report((symbols[write - 1], id), true);
            }
            if let Some(&next) = symbols.get(read + 2) {
                report((pair.1, next), false);
                report((id, next), true);
            }
            symbols[write] = id;
            read += 2;
        } else {
            symbols[write] = symbols[read];
            read += 1;
        }
        write += 1;
    }
    symbols.truncate(write);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[(&str, u64)], vocab_size: usize, special: &[&str]) -> Vec<String> {
        let special_tokens: Vec<String> = special.iter().map(|s| s.to_string()).collect();
        let config = LearnConfig { vocab_size, special_tokens: &special_tokens, min_frequency: 1 };
        let words = words.iter().map(|(w, c)| (w.as_bytes().to_vec(), *c)).collect();
        learn(words, &config).tokens.split_off(256 + special.len())
    }

    #[test]
    fn counts_above_32_bits() {
        // In 32 bits "ab" would count 1 (or a negative number) and "cd" would win.
        for count in [(1 << 31) + 1, (1 << 32) + 1, u64::MAX - 1] {
            assert_eq!(run(&[("ab", count), ("cd", 5)], 257, &[]), ["ab"], "{count}");
        }
        assert_eq!(run(&[("ab", u64::MAX), ("abx", u64::MAX), ("cd", 5)], 258, &[]), ["ab", "abx"]);
    }

    #[test]
    fn runs_of_one_symbol() {
        assert_eq!(run(&[("aaaaa", 3), ("aa", 1)], 259, &[]), ["aa", "aaa", "aaaaa"]);
    }

    #[test]
    fn special_tokens_are_never_learned() {
        assert_eq!(run(&[("###", 9), ("##", 9)], 260, &["###"]), ["##"]);
    }

    /// The slow truth: count all pairs anew before each merge.
    fn reference(words: &[(&str, u64)], vocab_size: usize) -> Vec<String> {
        let chars = byte_chars();
        let mut words: Vec<(Vec<String>, u64)> = words
            .iter()
            .map(|(w, c)| (w.bytes().map(|b| chars[b as usize].to_string()).collect(), *c))
            .collect();
        let mut sorted = chars;
        sorted.sort();
        let mut tokens: Vec<String> = sorted.iter().map(|c| c.to_string()).collect();
        while tokens.len() < vocab_size {
            let mut counts: HashMap<Pair, u64> = HashMap::new();
            let id = |s: &String, tokens: &[String]| tokens.iter().position(|t| t == s).unwrap() as u32;
            for (word, count) in &words {
                for two in word.windows(2) {
                    *counts.entry((id(&two[0], &tokens), id(&two[1], &tokens))).or_default() += count;
                }
            }
            let Some((pair, _)) = counts.into_iter().max_by_key(|(p, c)| (*c, Reverse(*p))) else { break };
            let (a, b) = (tokens[pair.0 as usize].clone(), tokens[pair.1 as usize].clone());
            let new = format!("{a}{b}");
            for (word, _) in &mut words {
                let mut i = 0;
                while i + 1 < word.len() {
                    if word[i] == a && word[i + 1] == b {
                        word[i] = new.clone();
                        word.remove(i + 1);
                    }
                    i += 1;
                }
            }
            if !tokens.contains(&new) {
                tokens.push(new);
            }
        }
        tokens.split_off(256)
    }

    proptest::proptest! {
        #[test]
        fn matches_reference(words in proptest::collection::btree_map("[abc]{1,9}", 1u64..20, 1..12)) {
            let words: Vec<(&str, u64)> = words.iter().map(|(w, c)| (w.as_str(), *c)).collect();
            let expected = reference(&words, 280);
            proptest::prop_assert_eq!(run(&words, 280, &[]), expected);
        }
    }
}
