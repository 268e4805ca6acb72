//! What a stream looks like to a model that is trained on it: is each token a target once, and is the order a mixed
//! one.
//!
//! | Statistic | Of a mixed stream | Flagged |
//! | --- | --- | --- |
//! | rank correlation of document lengths with their places | about 0 | beyond 0.5, from 50 documents on |
//! | neighbours in ascending order of their first tokens | about one half | outside 0.1 to 0.9, from 50 documents on |
//! | difference of the token counts of the two halves, over that of odd and even sequences | about 1 | above 4 |
//! | share of tokens in documents that have come before | 0 | above 1 % |
//! | share of sequences that have come before | 0 | above 1 % |
//! | rank correlation of the order of an epoch with that of the file | about 0 | 1 where it should be shuffled |
//!
//! The first three are of the order of training: where sequences are shuffled, a sorted file is harmless and only
//! noted.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde::Serialize;

use crate::error::Result;
use crate::loader::{Coverage, Loader, LoaderConfig};
use crate::token_file::TokenData;

const FEWEST_DOCUMENTS: u64 = 50;
const FEWEST_SEQUENCES: u64 = 20;
const CORRELATED: f64 = 0.5;
const ASCENDING: f64 = 0.9;
const DRIFT: f64 = 4.0;
/// A difference below this many bits is none, whatever it is compared with.
const DRIFT_BITS: f64 = 0.005;
const REPEATED: f64 = 0.01;
/// Tokens by which documents are put in order.
const FIRST_TOKENS: u64 = 4;

/// Order statistics of a stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OrderStatistics {
    /// Documents.
    pub documents: u64,
    /// Sequences an epoch.
    pub sequences: u64,
    /// Rank correlation of document lengths with their places in the file.
    pub length_correlation: f64,
    /// Share of neighbouring documents in the file that are in ascending order of their first tokens.
    pub ascending: f64,
    /// Difference between the token counts of the two halves of the file, in bits (Jensen-Shannon), over that of its
    /// odd and even sequences.
    pub file_drift: f64,
    /// The same for the halves of an epoch in the order of training.
    pub epoch_drift: f64,
    /// Rank correlation of the order of the first epoch with that of the file.
    pub epoch_correlation: f64,
    /// Whether the second epoch has the order of the first.
    pub epochs_alike: bool,
    /// Share of tokens in documents that have come before.
    pub repeated_documents: f64,
    /// Share of sequences whose tokens have come before.
    pub repeated_sequences: f64,
}

/// Result of [`examine`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Examination {
    /// Targets of an epoch.
    pub coverage: Coverage,
    /// The order.
    pub order: OrderStatistics,
    /// What a run should not be started with.
    pub flags: Vec<String>,
    /// What may be meant.
    pub notes: Vec<String>,
}

/// Runs through one epoch. `expected_repeats` says that documents are repeated on purpose, by a mixture.
///
/// # Errors
/// As [`Loader::new`] and [`Loader::check`].
pub fn examine(data: Arc<TokenData>, config: &LoaderConfig, expected_repeats: bool) -> Result<Examination> {
    let mut loader = Loader::new(data.clone(), config.clone())?;
    let coverage = loader.check()?;
    let order = statistics(&data, &mut loader);
    let (mut flags, mut notes) = (Vec::new(), Vec::new());
    let many = order.documents >= FEWEST_DOCUMENTS;
    let mut sorted = Vec::new();
    if many && order.length_correlation.abs() > CORRELATED {
        sorted.push(format!(
            "documents are sorted by length (rank correlation {:.2})",
            order.length_correlation
        ));
    }
    if many && !(1.0 - ASCENDING..=ASCENDING).contains(&order.ascending) {
        sorted.push(format!(
            "documents are sorted by their beginning ({:.0} % of neighbours ascend)",
            100.0 * order.ascending
        ));
    }
    let enough = order.sequences >= FEWEST_SEQUENCES;
    if enough && order.file_drift > DRIFT {
        sorted.push(format!(
            "the second half of the file is of another kind than the first ({:.1} times as different as odd and even \
             sequences): it is sorted by language or source",
            order.file_drift
        ));
    }
    if config.shuffle {
        notes.extend(sorted.into_iter().map(|s| format!("{s}; harmless, as sequences are shuffled")));
        if enough && order.epoch_correlation.abs() > CORRELATED {
            flags.push(format!(
                "sequences come in the order of the file (rank correlation {:.2}) though they should be shuffled",
                order.epoch_correlation
            ));
        }
        if enough && order.epochs_alike {
            flags.push("the second epoch has the order of the first".into());
        }
        if enough && order.epoch_drift > DRIFT {
            flags.push(format!(
                "the second half of an epoch is of another kind than the first ({:.1} times as different as odd and \
                 even sequences)",
                order.epoch_drift
            ));
        }
    } else {
        flags.extend(
            sorted.into_iter().map(|s| format!("{s}, and sequences are not shuffled; set data.shuffle=true")),
        );
    }
    if order.repeated_documents > REPEATED {
        let share = format!(
            "{:.1} % of tokens are in documents that have come before",
            100.0 * order.repeated_documents
        );
        match expected_repeats {
            true => notes.push(format!("{share}; the mixture repeats them")),
            false => flags.push(format!("{share}; prepare the text again with de-duplication")),
        }
    }
    if order.repeated_sequences > REPEATED && !expected_repeats {
        flags.push(format!(
            "{:.1} % of sequences have come before; the stream repeats itself",
            100.0 * order.repeated_sequences
        ));
    }
    Ok(Examination { coverage, order, flags, notes })
}

fn statistics(data: &TokenData, loader: &mut Loader) -> OrderStatistics {
    let n = loader.sequences_per_epoch();
    let first: Vec<u64> = (0..n).map(|k| loader.sequence_of(k)).collect();
    let epochs_alike = n > 1 && (0..n).all(|k| loader.sequence_of(n + k) == first[k as usize]);
    let seq_len = loader.config().seq_len;
    let mut tokens = vec![0i32; seq_len];
    let mut seen = HashSet::new();
    let mut repeated = 0u64;
    let vocab = data.vocab_size() as usize;
    // Halves of the file, halves of the epoch, odd and even sequences of the file.
    let mut counts: [[Vec<u64>; 2]; 3] = std::array::from_fn(|_| [vec![0; vocab], vec![0; vocab]]);
    for (k, sequence) in first.iter().enumerate() {
        let got = data.copy_to(sequence * seq_len as u64, &mut tokens);
        let tokens = &tokens[..got];
        repeated += u64::from(!seen.insert(hash(tokens)));
        let sides = [u64::from(2 * sequence >= n), u64::from(2 * k as u64 >= n), sequence % 2];
        for (pair, side) in counts.iter_mut().zip(sides) {
            let side = &mut pair[side as usize];
            tokens.iter().for_each(|t| side[*t as usize] += 1);
        }
    }
    let [file, epoch, parity] = counts.map(|[a, b]| divergence(&a, &b));
    // Below what is worth speaking of, a small difference over a smaller one says nothing.
    let drift = |bits: f64| {
        if bits < DRIFT_BITS { 1.0_f64.min(bits / parity.max(1e-9)) } else { bits / parity.max(1e-9) }
    };
    let (length_correlation, ascending, repeated_documents) = documents(data);
    OrderStatistics {
        documents: data.num_documents(),
        sequences: n,
        length_correlation,
        ascending,
        file_drift: drift(file),
        epoch_drift: drift(epoch),
        epoch_correlation: rank_correlation(&first),
        epochs_alike,
        repeated_documents,
        repeated_sequences: repeated as f64 / n as f64,
    }
}

/// Rank correlation of lengths with places, share of ascending neighbours, share of tokens in repeated documents.
fn documents(data: &TokenData) -> (f64, f64, f64) {
    let n = data.num_documents();
    let mut lengths = Vec::with_capacity(n as usize);
    let mut seen = HashSet::new();
    let (mut ascending, mut unequal, mut repeated) = (0u64, 0u64, 0u64);
    let mut before: Option<Vec<u32>> = None;
    let mut tokens = Vec::new();
    for document in 0..n {
        let start = data.document_start(document).unwrap_or_default();
        let end = data.document_start(document + 1).unwrap_or(data.len());
        lengths.push(end - start);
        tokens.resize((end - start) as usize, 0);
        data.copy_to(start, &mut tokens);
        if !seen.insert(hash(&tokens)) {
            repeated += end - start;
        }
        let beginning: Vec<u32> =
            (start..end.min(start + FIRST_TOKENS)).filter_map(|i| data.get(i)).collect();
        if let Some(before) = &before
            && *before != beginning
        {
            unequal += 1;
            ascending += u64::from(*before < beginning);
        }
        before = Some(beginning);
    }
    let mut order: Vec<u64> = (0..n).collect();
    // Equal lengths keep their order, which would look like a correlation: half of them is turned around.
    let tie = |place: u64| if hash(&place) & 1 == 0 { place } else { u64::MAX - place };
    order.sort_by_key(|place| (lengths[*place as usize], tie(*place)));
    let share = |part: u64, of: u64| if of == 0 { 0.5 } else { part as f64 / of as f64 };
    (rank_correlation(&order), share(ascending, unequal), repeated as f64 / data.len().max(1) as f64)
}

/// Spearman's correlation of a permutation of `0..n` with its places.
fn rank_correlation(order: &[u64]) -> f64 {
    let n = order.len() as f64;
    if n < 2.0 {
        return 0.0;
    }
    let squares: f64 = order.iter().enumerate().map(|(k, r)| (k as f64 - *r as f64).powi(2)).sum();
    1.0 - 6.0 * squares / (n * (n * n - 1.0))
}

/// Jensen-Shannon divergence of two counts, in bits: 0 for equal parts, 1 for parts without a common token.
fn divergence(a: &[u64], b: &[u64]) -> f64 {
    let (sum_a, sum_b) = (a.iter().sum::<u64>() as f64, b.iter().sum::<u64>() as f64);
    if sum_a == 0.0 || sum_b == 0.0 {
        return 0.0;
    }
    let part = |p: f64, m: f64| if p > 0.0 { p * (p / m).log2() } else { 0.0 };
    let sum: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| {
            let (p, q) = (*a as f64 / sum_a, *b as f64 / sum_b);
            let m = (p + q) / 2.0;
            (part(p, m) + part(q, m)) / 2.0
        })
        .sum();
    sum.max(0.0)
}

fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    // Its keys are fixed, so that a report repeats.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents of two kinds and many lengths, mixed by a fixed rule.
    fn mixed() -> Vec<Vec<u32>> {
        let token =
            |d: u64, i: u64| 1 + (hash(&(d, i)) % 200) as u32 + if hash(&d) & 4 == 0 { 200 } else { 0 };
        (0..300).map(|d| (0..5 + hash(&(d, "length")) % 40).map(|i| token(d, i)).collect()).collect()
    }

    fn flags(documents: &[Vec<u32>], shuffle: bool) -> (Vec<String>, Vec<String>) {
        let data = Arc::new(TokenData::from_documents(documents, 500, 0).unwrap());
        let config = LoaderConfig { seq_len: 16, shuffle, ..LoaderConfig::default() };
        let found = examine(data.clone(), &config, false).unwrap();
        assert_eq!(found.coverage.valid + found.coverage.dropped, data.len() - 1);
        (found.flags, found.notes)
    }

    #[test]
    fn a_mixed_stream_passes() {
        for shuffle in [false, true] {
            assert_eq!(flags(&mixed(), shuffle), (vec![], vec![]), "shuffle {shuffle}");
        }
    }

    #[test]
    fn sorted_streams_are_flagged_or_noted() {
        type Key = fn(&Vec<u32>) -> (usize, u32);
        let cases: [(&str, Key); 3] = [
            ("sorted by length", |d| (d.len(), 0)),
            ("of another kind", |d| (usize::from(d[0] > 200), 0)),
            ("sorted by their beginning", |d| (d[0] as usize, d[1])),
        ];
        for (part, key) in cases {
            let mut documents = mixed();
            documents.sort_by_key(key);
            let (found, notes) = flags(&documents, false);
            assert!(found.iter().any(|f| f.contains(part)) && notes.is_empty(), "{part}: {found:?}");
            let (found, notes) = flags(&documents, true);
            assert!(
                notes.iter().any(|f| f.contains(part)) && found.is_empty(),
                "{part}: {found:?} {notes:?}"
            );
        }
    }

    #[test]
    fn repeated_streams_are_flagged() {
        let documents = mixed();
        let twice = [documents.clone(), documents.clone()].concat();
        for shuffle in [false, true] {
            let (found, _) = flags(&twice, shuffle);
            assert!(
                found.iter().any(|f| f.starts_with("50.0 % of tokens are in documents that")),
                "{found:?}"
            );
        }
        // One document that repeats itself: no document has come before, but its sequences have.
        let cycle: Vec<u32> = (0..4096).map(|i| 1 + i % 64).collect();
        let (found, _) = flags(&[cycle], true);
        assert!(found.iter().any(|f| f.contains("of sequences have come before")), "{found:?}");
    }

    #[test]
    fn correlations_and_divergences() {
        let rising: Vec<u64> = (0..100).collect();
        let falling: Vec<u64> = (0..100).rev().collect();
        assert_eq!((rank_correlation(&rising), rank_correlation(&falling)), (1.0, -1.0));
        assert_eq!((divergence(&[1, 1], &[5, 5]), divergence(&[1, 0], &[0, 7])), (0.0, 1.0));
        assert_eq!(divergence(&[0, 0], &[1, 1]), 0.0);
    }
}
