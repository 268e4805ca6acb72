use std::path::{Path, PathBuf};

use super::*;
use crate::TokenizerConfig;
use crate::corpus::{self, CorpusOptions};
use crate::language::Language;

fn declared(list: &[&str]) -> Languages {
    Languages::new(list.iter().map(|text| text.parse::<Language>().unwrap()).collect()).unwrap()
}

fn document(text: &str) -> Document {
    Document { text: text.into(), file: Path::new("a.txt").into(), line: 1, fields: Vec::new() }
}

/// The two parallel files, or `None` with the reason printed.
fn parallel() -> Option<Vec<Document>> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data"));
    let paths = [folder.join("parallel.bn.jsonl"), folder.join("parallel.en.jsonl")];
    if !paths[0].exists() {
        println!("skipped: {} does not exist", paths[0].display());
        return None;
    }
    let corpus = corpus::Corpus::open_with(&paths, CorpusOptions::default()).unwrap();
    Some(corpus.documents().collect::<Result<_>>().unwrap())
}

/// Trains on the documents that are not held out.
fn train(
    documents: &[Document],
    languages: &Languages,
    held_out: f64,
    config: &TokenizerConfig,
) -> Tokenizer {
    let side = |d: &&Document| held_out == 0.0 || side_of(&d.text, held_out) == Side::Train;
    let texts = documents.iter().filter(side).map(|d| Ok((&d.text, languages.of(d).unwrap_or(usize::MAX))));
    Tokenizer::train_weighted(texts, &languages.weights(), config).unwrap().0
}

fn report(
    documents: &[Document],
    tokenizer: &Tokenizer,
    languages: &Languages,
    held_out: f64,
) -> FertilityReport {
    let options = FertilityOptions { held_out, ..FertilityOptions::default() };
    measure(documents.iter().cloned().map(Ok), tokenizer, languages, options).unwrap()
}

#[test]
fn counts_are_exact() {
    let config = TokenizerConfig { vocab_size: 257, ..TokenizerConfig::default() };
    let tokenizer = Tokenizer::train(["x"].iter().map(Ok), &config).unwrap().0;
    let documents = [document("ab c\n1234"), document("\u{9AC}\u{9BE} \u{995}")];
    let report = report(&documents, &tokenizer, &Languages::default(), 0.0);
    assert_eq!((report.vocab_size, report.model.as_str(), report.splitter.as_str()), (257, "bpe", "rb"));
    assert!(report.round_trip && report.refusals.is_empty());
    let [latin, bengali] = &report.languages[..] else { panic!("{report:?}") };
    assert_eq!((latin.name.as_str(), bengali.name.as_str()), ("Latin", "Bengali"));
    let t = &latin.tally;
    assert_eq!((t.documents, t.chars, t.bytes, t.words, t.tokens), (1, 9, 9, 3, 9));
    // ab | c | line end | 123 | 4
    assert_eq!((t.pretokens, t.rb_pretokens), (5, 5));
    assert_eq!(t.pretoken_lengths[..3], [2, 2, 1]);
    assert_eq!(latin.distinct_tokens, 9);
    let t = &bengali.tally;
    assert_eq!((t.chars, t.bytes, t.words, t.tokens, t.pretokens), (4, 10, 2, 10, 2));
    assert!((bengali.chars_per_token - 0.4).abs() < 1e-12 && (bengali.bytes_per_token - 1.0).abs() < 1e-12);
    assert!(
        (bengali.chars_per_pretoken - 2.0).abs() < 1e-12 && (bengali.tokens_per_word - 5.0).abs() < 1e-12
    );
    // No byte is in both texts but the space, which is as frequent in one as in the other.
    assert!((latin.vocab_share + bengali.vocab_share - 1.0).abs() < 1e-12);
}

#[test]
fn text_without_a_language_is_left_out_and_a_language_without_text_is_named() {
    let config = TokenizerConfig { vocab_size: 257, ..TokenizerConfig::default() };
    let tokenizer = Tokenizer::train(["x"].iter().map(Ok), &config).unwrap().0;
    let languages = declared(&["en,script=Latin", "bn,script=Bengali"]);
    let report = report(&[document("ab"), document("\u{431}")], &tokenizer, &languages, 0.0);
    assert_eq!(report.languages.len(), 1);
    assert_eq!((report.languages[0].tally.documents, &report.without_text[..]), (1, &["bn".to_owned()][..]));
}

#[test]
fn every_cause_is_told_from_the_others() {
    let Some(mut documents) = parallel() else { return };
    // The short ones are text enough to tell causes apart, and train in a moment.
    documents.retain(|d| d.text.chars().count() < 12_000);
    let measured = |languages: &[&str], config: &TokenizerConfig| {
        let languages = declared(languages);
        let tokenizer = train(&documents, &languages, 0.1, config);
        report(&documents, &tokenizer, &languages, 0.1)
    };
    let with = |vocab_size, splitter| TokenizerConfig { vocab_size, splitter, ..TokenizerConfig::default() };
    let plain = ["bn,file=*.bn.jsonl", "en,file=*.en.jsonl"];

    let good = measured(&plain, &with(6000, Splitter::Rb));
    assert!(
        good.refusals.is_empty() && good.round_trip && good.languages.iter().all(|l| l.held_out),
        "{good:#?}"
    );

    // The one falls below half of the best language's, the other only below a floor.
    let floor = ["bn,file=*.bn.jsonl,floor=3", "en,file=*.en.jsonl"];
    for (splitter, languages, begins, below) in [
        (Splitter::Gpt2, plain, "bn has 1.", "below half of the"),
        (Splitter::Cl100k, floor, "bn has 2.", "below its floor of 3.00"),
    ] {
        let bad = measured(&languages, &with(6000, splitter));
        assert_eq!(bad.refusals.len(), 1, "{bad:#?}");
        assert_eq!((bad.refusals[0].language.as_str(), bad.refusals[0].cause), ("bn", Cause::Splitter));
        let message = &bad.refusals[0].message;
        assert!(message.starts_with(begins) && message.contains(below), "{message}");
        assert!(message.contains("cause: splitter") && message.contains("with the splitter rb"), "{message}");
    }
    let starved = ["bn,file=*.bn.jsonl,weight=0.002,floor=3", "en,file=*.en.jsonl"];
    let bad = measured(&starved, &with(6000, Splitter::Rb));
    assert_eq!(
        (bad.refusals[0].language.as_str(), bad.refusals[0].cause),
        ("bn", Cause::Sampling),
        "{bad:#?}"
    );
    assert!(bad.refusals[0].message.contains("raise its weight"));
    let floors = ["bn,file=*.bn.jsonl,floor=3", "en,file=*.en.jsonl,floor=3"];
    let bad = measured(&floors, &with(900, Splitter::Rb));
    assert!(
        bad.refusals.len() == 2 && bad.refusals.iter().all(|r| r.cause == Cause::VocabularySize),
        "{bad:#?}"
    );
    let bad = measured(&["bn,file=*.bn.jsonl,floor=30", "en,file=*.en.jsonl"], &with(900, Splitter::Rb));
    assert_eq!(bad.refusals[0].cause, Cause::Floor, "{bad:#?}");
}

/// The numbers of a 32k vocabulary are in docs/benchmarks; a smaller one is enough to see a splitter that cuts.
#[test]
fn bangla_and_english_reach_like_rates() {
    let Some(documents) = parallel() else { return };
    let languages = declared(&["bn,script=Bengali,floor=3.3", "en,script=Latin,floor=3.4"]);
    let config = TokenizerConfig { vocab_size: 10_000, ..TokenizerConfig::default() };
    let tokenizer = train(&documents, &languages, 0.1, &config);
    let report = report(&documents, &tokenizer, &languages, 0.1);
    let rates: Vec<f64> = report.languages.iter().map(|l| l.chars_per_token).collect();
    println!("characters a token (bn, en), 10,000 entries: {rates:.2?}");
    assert!(report.refusals.is_empty(), "{:#?}", report.refusals);
    assert!(report.scripts.iter().any(|(script, entries)| script == "Bengali" && *entries > 2000));
}
