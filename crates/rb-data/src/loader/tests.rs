use std::collections::BTreeMap;

use super::*;

/// Documents 5 6 7 | 8 | 9 10 with end token 0: the stream 5 6 7 0 8 0 9 10 0.
fn three_documents() -> Arc<TokenData> {
    Arc::new(TokenData::from_documents(&[vec![5, 6, 7], vec![8], vec![9, 10]], 11, 0).unwrap())
}

/// One document of `tokens - 1` distinct tokens and its end.
fn counting(tokens: u32) -> Arc<TokenData> {
    Arc::new(TokenData::from_documents(&[(1..tokens).collect()], tokens.max(1), 0).unwrap())
}

fn config(seq_len: usize, batch_size: usize) -> LoaderConfig {
    LoaderConfig { seq_len, batch_size, shuffle: false, ..LoaderConfig::default() }
}

/// First input of each row: names the sequence in `counting` data.
fn firsts(batch: &Batch) -> Vec<i32> {
    batch.input_ids.chunks(batch.seq_len).map(|row| row[0]).collect()
}

#[test]
fn exact_arrays_of_three_documents() {
    let plain = Loader::new(three_documents(), config(5, 2)).unwrap().next_batch();
    assert_eq!(plain.input_ids, [5, 6, 7, 0, 8, /**/ 0, 9, 10, 0, 0]);
    assert_eq!(plain.labels, [6, 7, 0, 8, 0, /**/ 9, 10, 0, IGNORE, IGNORE]);
    assert_eq!(plain.position_ids, [0, 1, 2, 3, 4, /**/ 0, 1, 2, 3, 4]);
    assert_eq!(plain.doc_start, [0; 10]);
    assert_eq!((plain.valid_tokens, plain.dropped_targets, plain.epoch), (8, 0, 0));

    let masked = LoaderConfig { document_mask: true, ..config(5, 2) };
    let masked = Loader::new(three_documents(), masked).unwrap().next_batch();
    assert_eq!(masked.input_ids, plain.input_ids);
    assert_eq!(masked.labels, [6, 7, 0, IGNORE, 0, /**/ IGNORE, 10, 0, IGNORE, IGNORE]);
    assert_eq!(masked.position_ids, [0, 1, 2, 3, 0, /**/ 0, 0, 1, 2, 0]);
    assert_eq!(masked.doc_start, [0, 0, 0, 0, 4, /**/ 0, 1, 1, 1, 4]);
    assert_eq!((masked.valid_tokens, masked.dropped_targets), (6, 2));
}

#[test]
fn a_document_that_ends_exactly_with_the_row() {
    let masked = LoaderConfig { document_mask: true, ..config(4, 2) };
    let batch = Loader::new(three_documents(), masked).unwrap().next_batch();
    assert_eq!(batch.input_ids, [5, 6, 7, 0, /**/ 8, 0, 9, 10]);
    assert_eq!(batch.labels, [6, 7, 0, IGNORE, /**/ 0, IGNORE, 10, 0]);
    assert_eq!(batch.doc_start, [0, 0, 0, 0, /**/ 0, 0, 2, 2]);
    assert_eq!(batch.position_ids, [0, 1, 2, 3, /**/ 0, 1, 0, 1]);
}

#[test]
fn every_token_is_a_target_once() {
    for seq_len in 1..12 {
        for (document_mask, shuffle) in [(false, false), (true, false), (false, true), (true, true)] {
            let config = LoaderConfig { document_mask, shuffle, ..config(seq_len, 1) };
            let mut loader = Loader::new(three_documents(), config).unwrap();
            let coverage = loader.check().unwrap();
            let dropped = if document_mask { 2 } else { 0 };
            assert_eq!((coverage.valid, coverage.dropped), (8 - dropped, dropped), "T = {seq_len}");
            assert_eq!(coverage.sequences, 8u64.div_ceil(seq_len as u64));
            assert_eq!(coverage.sequences * seq_len as u64, 8 + coverage.padded);
            // The same counts from the batches themselves.
            let (mut valid, mut given_up) = (0, 0);
            for _ in 0..coverage.sequences {
                let batch = loader.next_batch();
                assert_eq!(batch.valid_tokens, batch.labels.iter().filter(|l| **l != IGNORE).count());
                valid += batch.valid_tokens as u64;
                given_up += batch.dropped_targets as u64;
            }
            assert_eq!((valid, given_up), (coverage.valid, coverage.dropped));
        }
    }
}

#[test]
fn smaller_than_a_row_and_smaller_than_the_run() {
    let mut loader = Loader::new(counting(3), config(8, 2)).unwrap();
    let batch = loader.next_batch();
    assert_eq!(&batch.input_ids[..8], [1, 2, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&batch.labels[..3], [2, 0, IGNORE]);
    assert_eq!(&batch.input_ids[8..], &batch.input_ids[..8], "the only row comes again");

    // Three sequences, batches of two: the epoch turns in the middle of a batch, for ever.
    let mut loader = Loader::new(counting(7), config(2, 2)).unwrap();
    let seen: Vec<(Vec<i32>, u64)> =
        (0..4).map(|_| loader.next_batch()).map(|b| (firsts(&b), b.epoch)).collect();
    assert_eq!(seen, [(vec![1, 3], 0), (vec![5, 1], 0), (vec![3, 5], 1), (vec![1, 3], 2)]);
    assert_eq!(loader.epoch(), 2);
}

#[test]
fn ranks_are_disjoint_and_complete() {
    let data = counting(4 * 37 + 1);
    for (world_size, batch_size) in [(1, 3), (2, 1), (2, 3), (3, 2), (5, 4)] {
        let mut seen: BTreeMap<i32, usize> = BTreeMap::new();
        let mut loaders: Vec<Loader> = (0..world_size)
            .map(|rank| {
                let config =
                    LoaderConfig { shuffle: true, seed: 9, rank, world_size, ..config(4, batch_size) };
                Loader::new(data.clone(), config).unwrap()
            })
            .collect();
        // As many steps as an epoch has sequences end an epoch exactly.
        for _ in 0..37 {
            for loader in &mut loaders {
                for first in firsts(&loader.next_batch()) {
                    *seen.entry(first).or_default() += 1;
                }
            }
        }
        assert_eq!(seen.len(), 37);
        assert!(seen.values().all(|count| *count == world_size * batch_size), "{seen:?}");
        let states: Vec<LoaderState> = loaders.iter().map(Loader::state).collect();
        assert!(states.windows(2).all(|s| s[0] == s[1]), "all ranks must store one state");
    }
}

#[test]
fn more_ranks_keep_the_global_order() {
    let data = counting(4 * 10 + 1);
    let run = |world_size: usize, batch_size: usize| -> Vec<i32> {
        let mut steps = Vec::new();
        for rank in 0..world_size {
            let config = LoaderConfig { shuffle: true, seed: 1, rank, world_size, ..config(4, batch_size) };
            let mut loader = Loader::new(data.clone(), config).unwrap();
            let mine: Vec<i32> =
                (0..24 / world_size / batch_size).flat_map(|_| firsts(&loader.next_batch())).collect();
            steps.push(mine);
        }
        (0..24).map(|k| steps[k % world_size][k / world_size]).collect()
    };
    let one = run(1, 1);
    assert_eq!(run(2, 3), one);
    assert_eq!(run(3, 2), one);
    assert_eq!(run(4, 6), one);
}

#[test]
fn seeds() {
    let order = |seed, shuffle| -> Vec<i32> {
        let config = LoaderConfig { seed, shuffle, ..config(4, 1) };
        let mut loader = Loader::new(counting(4 * 50 + 1), config).unwrap();
        (0..100).flat_map(|_| firsts(&loader.next_batch())).collect()
    };
    assert_eq!(order(1, true), order(1, true));
    assert_ne!(order(1, true), order(2, true));
    let one = order(1, true);
    assert_ne!(one[..50], one[50..], "each epoch has its own order");
    let mut sorted = one[50..].to_vec();
    sorted.sort_unstable();
    assert_eq!(sorted, order(0, false)[..50]);
    assert_eq!(order(1, false), order(2, false));
}

#[test]
fn resume_anywhere_twice() {
    // 10 samples, 3 epochs, stopped at 9 and everywhere else, over epochs, then stopped again.
    let data = counting(4 * 10 + 1);
    let config = LoaderConfig { shuffle: true, seed: 3, document_mask: true, ..config(4, 3) };
    let mut straight = Loader::new(data.clone(), config.clone()).unwrap();
    let expected: Vec<Batch> = (0..10).map(|_| straight.next_batch()).collect();
    for first in 0..10 {
        for second in first..10 {
            let mut got = Vec::new();
            let mut state = Loader::new(data.clone(), config.clone()).unwrap().state();
            for stop in [first, second, 10] {
                let mut loader = Loader::new(data.clone(), config.clone()).unwrap();
                let stored = serde_json::to_string(&state).unwrap();
                loader.set_state(&serde_json::from_str(&stored).unwrap()).unwrap();
                while got.len() < stop {
                    got.push(loader.next_batch());
                }
                state = loader.state();
            }
            assert_eq!(got, expected, "stopped at {first} and {second}");
            assert_eq!(state.samples_seen, 30);
        }
    }
    let mut counts: BTreeMap<i32, usize> = BTreeMap::new();
    expected.iter().flat_map(firsts).for_each(|f| *counts.entry(f).or_default() += 1);
    assert!(counts.len() == 10 && counts.values().all(|c| *c == 3), "each epoch is complete: {counts:?}");
}

#[test]
fn batches_made_ahead_are_the_same() {
    let data = counting(4 * 10 + 1);
    let config =
        |prefetch| LoaderConfig { seed: 3, shuffle: true, rank: 1, world_size: 2, prefetch, ..config(4, 3) };
    let mut plain = Loader::new(data.clone(), config(0)).unwrap();
    let expected: Vec<(Batch, LoaderState)> = (0..12).map(|_| (plain.next_batch(), plain.state())).collect();
    for prefetch in [1, 2, 5] {
        let mut loader = Loader::new(data.clone(), config(prefetch)).unwrap();
        for (batch, state) in &expected[..7] {
            assert_eq!(
                (&loader.next_batch(), &loader.state()),
                (batch, state),
                "what was made ahead is not seen"
            );
        }
        // Back to an earlier place: nothing of what was made ahead is given out.
        loader.set_state(&expected[2].1).unwrap();
        for (batch, state) in &expected[3..] {
            assert_eq!((&loader.next_batch(), &loader.state()), (batch, state));
        }
    }
}

#[test]
fn resume_with_another_batch_size_goes_on_in_order() {
    let data = counting(4 * 10 + 1);
    let config = LoaderConfig { shuffle: true, seed: 3, ..config(4, 1) };
    let mut straight = Loader::new(data.clone(), config.clone()).unwrap();
    let expected: Vec<i32> = (0..15).flat_map(|_| firsts(&straight.next_batch())).collect();
    let mut small = Loader::new(data.clone(), LoaderConfig { batch_size: 3, ..config.clone() }).unwrap();
    let mut got: Vec<i32> = (0..3).flat_map(|_| firsts(&small.next_batch())).collect();
    let mut large = Loader::new(data, LoaderConfig { batch_size: 6, ..config }).unwrap();
    large.set_state(&small.state()).unwrap();
    got.extend(firsts(&large.next_batch()));
    assert_eq!(got, expected);
}

#[test]
fn resume_refuses_another_run() {
    let config = LoaderConfig { seed: 1, ..config(4, 1) };
    let state = Loader::new(counting(41), config.clone()).unwrap().state();
    let refusal = |data: Arc<TokenData>, config: LoaderConfig| {
        Loader::new(data, config).unwrap().set_state(&state).unwrap_err().to_string()
    };
    let e = refusal(counting(41), LoaderConfig { seed: 2, ..config.clone() });
    assert_eq!(
        e,
        "loader: cannot resume: seed was 1 when the state was saved and is 2 now; use the same value, or start a new run"
    );
    assert!(refusal(counting(41), LoaderConfig { seq_len: 5, ..config.clone() }).contains("seq_len was 4"));
    assert!(
        refusal(counting(41), LoaderConfig { shuffle: true, ..config.clone() }).contains("shuffle was false")
    );
    assert!(
        refusal(counting(41), LoaderConfig { document_mask: true, ..config.clone() })
            .contains("document_mask")
    );
    assert!(refusal(counting(42), config.clone()).contains("tokens was 41"));
    let other = Arc::new(TokenData::from_documents(&[(1..41).rev().collect()], 41, 0).unwrap());
    assert!(refusal(other, config.clone()).contains("data_sha256 was"));
    let mut damaged = state.clone();
    damaged.samples_seen = u64::MAX;
    let e = Loader::new(counting(41), config).unwrap().set_state(&damaged).unwrap_err().to_string();
    assert!(e.contains("samples_seen is 18446744073709551615"), "{e}");
}

#[test]
fn bad_settings() {
    let refusal =
        |tokens: u32, config: LoaderConfig| Loader::new(counting(tokens), config).unwrap_err().to_string();
    assert!(refusal(9, config(0, 1)).contains("loader: seq_len is 0, expected at least 1"));
    assert!(refusal(9, config(1, 0)).contains("loader: batch_size is 0, expected at least 1"));
    assert!(refusal(9, config(1 << 20, 1 << 20)).contains("1048576 x 1048576 positions"));
    assert!(refusal(9, config(usize::MAX, 1)).contains("seq_len is 18446744073709551615"));
    assert!(refusal(9, LoaderConfig { world_size: 0, ..config(1, 1) }).contains("world_size is 0"));
    let e = refusal(9, LoaderConfig { rank: 2, world_size: 2, ..config(1, 1) });
    assert!(e.contains("rank is 2 with world_size 2, expected a rank below world_size"), "{e}");
    let e = refusal(1, config(1, 1));
    assert_eq!(e, "<memory>: 1 tokens, expected at least 2 (an input and its next token); add text");
}

#[test]
fn sequential_covers_once_on_all_ranks() {
    let data = counting(4 * 9 + 1);
    let eval = |batch_size, rank, world_size| {
        let config = EvalConfig { seq_len: 4, batch_size, document_mask: false, rank, world_size };
        sequential(data.clone(), config).unwrap()
    };
    let batches: Vec<Batch> = eval(4, 0, 1).collect();
    assert_eq!(batches.iter().map(|b| b.batch_size).collect::<Vec<_>>(), [4, 4, 1]);
    assert_eq!(
        batches.iter().flat_map(firsts).collect::<Vec<_>>(),
        (0..9).map(|i| 1 + 4 * i).collect::<Vec<_>>()
    );
    assert_eq!(batches.iter().map(|b| b.valid_tokens).sum::<usize>(), 36);
    for (batch_size, world_size) in [(1, 2), (2, 2), (4, 2), (4, 5), (3, 16)] {
        let mut all = Vec::new();
        for rank in 0..world_size {
            let iter = eval(batch_size, rank, world_size);
            let expected = iter.num_batches();
            let batches: Vec<Batch> = iter.collect();
            assert_eq!(batches.len() as u64, expected, "every rank has as many batches");
            assert_eq!(expected, eval(batch_size, 0, world_size).num_batches());
            for batch in &batches {
                assert_eq!(batch.input_ids.len(), batch.batch_size * 4);
            }
            all.extend(batches.iter().flat_map(firsts));
        }
        all.sort_unstable();
        assert_eq!(all, (0..9).map(|i| 1 + 4 * i).collect::<Vec<_>>());
    }
    let masked = EvalConfig { seq_len: 5, batch_size: 9, document_mask: true, rank: 0, world_size: 1 };
    let batch = sequential(three_documents(), masked).unwrap().next().unwrap();
    assert_eq!((batch.batch_size, batch.valid_tokens, batch.dropped_targets), (2, 6, 2));
}

proptest::proptest! {
    #[test]
    fn any_documents_are_covered(
        lengths in proptest::collection::vec(0usize..7, 1..9),
        seq_len in 1usize..11,
        document_mask: bool,
        seed: u64,
    ) {
        let documents: Vec<Vec<u32>> = lengths.iter().map(|n| vec![3; *n]).collect();
        let data = Arc::new(TokenData::from_documents(&documents, 4, 0).unwrap());
        proptest::prop_assume!(data.len() >= 2);
        let config = LoaderConfig { shuffle: true, seed, document_mask, ..config(seq_len, 1) };
        let mut loader = Loader::new(data.clone(), config).unwrap();
        let coverage = loader.check().unwrap();
        proptest::prop_assert_eq!(coverage.valid + coverage.dropped, data.len() - 1);
        proptest::prop_assert_eq!(coverage.dropped, if document_mask { documents.len() as u64 - 1 } else { 0 });
        for _ in 0..coverage.sequences {
            let batch = loader.next_batch();
            for t in 0..seq_len {
                let start = batch.doc_start[t];
                proptest::prop_assert!(0 <= start && start <= t as i32);
                proptest::prop_assert!(t == 0 || start >= batch.doc_start[t - 1]);
                proptest::prop_assert_eq!(batch.position_ids[t], t as i32 - start);
                // A document begins after an end token, and with the mask only there.
                let after_end = t > 0 && batch.input_ids[t - 1] == 0;
                proptest::prop_assert!(!document_mask || (start == t as i32) == (t == 0 || after_end) || batch.labels[t] == IGNORE);
            }
        }
    }
}
