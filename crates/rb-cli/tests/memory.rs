//! A long run needs no more memory than a short one.

mod common;

use common::Place;
use rb_train::observe::Record;

/// Pages that the allocator may still take up after the first hundred steps. A lost graph of this model would be
/// tens of kilobytes a step, and a lost gradient arena as much: 50 MiB and more over the run.
const SLACK_BYTES: u64 = 8 << 20;

#[test]
fn resident_memory_is_flat_over_2000_steps() {
    let place = Place::new();
    let mut words = vec!["train", "tiny.toml", "--out", "run"];
    for set in
        ["train.max_steps=2000", "train.save_steps=1000", "train.eval_steps=500", "train.logging_steps=100"]
    {
        words.extend(["--set", set]);
    }
    place.good(&words);
    let records = rb_train::observe::read(&place.path("run/metrics.jsonl")).unwrap();
    let memory: Vec<(u64, u64)> = records
        .iter()
        .filter_map(|record| match record {
            Record::Train(train) => Some((train.step, train.mem_rss_bytes?)),
            _ => None,
        })
        .collect();
    let early = memory.iter().filter(|(step, _)| *step <= 100).map(|m| m.1).max();
    let late = memory.iter().filter(|(step, _)| *step > 1000).map(|m| m.1).max();
    let (Some(early), Some(late)) = (early, late) else {
        println!("skipped: this system does not say how much memory a process has");
        return;
    };
    assert!(late <= early + SLACK_BYTES, "{early} bytes at the start, {late} at the end: {memory:?}");
}
