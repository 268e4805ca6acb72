//! Held-out text: what its tokens cost a model, beside what they must cost less than.

use std::collections::BTreeMap;

use rb_data::{TokenData, Tokenizer};
use rb_verify::{Figure, RunGate};

use crate::{EvalError, Judge, Request, Result};

/// A document and the language it counts for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Any name: the text's file, language or script.
    pub language: String,
    /// The document.
    pub text: String,
}

/// Probabilities of single tokens: the loss of a model that learned nothing but how often each token occurs.
#[derive(Clone, Debug)]
pub struct Unigram {
    costs: Vec<f64>,
    /// Where the counts are from, for a person.
    pub source: String,
}

impl Unigram {
    /// From the tokens of a training set, with one occurrence added to each of `vocab_size` entries.
    pub fn of_training(data: &TokenData, vocab_size: usize) -> Unigram {
        let mut counts = vec![1u64; vocab_size];
        let mut buffer = vec![0i32; 1 << 16];
        let mut start = 0;
        loop {
            let read = data.copy_to(start, &mut buffer);
            if read == 0 {
                break;
            }
            buffer[..read].iter().for_each(|&id| {
                if let Some(count) = counts.get_mut(id as usize) {
                    *count += 1;
                }
            });
            start += read as u64;
        }
        Unigram::from_counts(&counts, "the training tokens, one occurrence of each token added".into())
    }

    /// From the very tokens that are judged: the least that any such model can reach.
    pub fn of_judged<'a>(documents: impl IntoIterator<Item = &'a [u32]>, vocab_size: usize) -> Unigram {
        let mut counts = vec![0u64; vocab_size];
        for &id in documents.into_iter().flatten() {
            if let Some(count) = counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        Unigram::from_counts(
            &counts,
            "the judged tokens themselves, the best that token counts can do".into(),
        )
    }

    fn from_counts(counts: &[u64], source: String) -> Unigram {
        let total = counts.iter().sum::<u64>() as f64;
        let costs = counts.iter().map(|&count| (total / count as f64).ln()).collect();
        Unigram { costs, source }
    }

    fn cost(&self, ids: &[u32]) -> f64 {
        ids.iter().map(|&id| self.costs.get(id as usize).copied().unwrap_or(f64::INFINITY)).sum()
    }
}

/// What a model must beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Every token is as likely as any other.
    Uniform,
    /// Tokens have their frequencies.
    Unigram,
    /// The same architecture with the weights that training starts from.
    Twin,
}

/// The cost of a text, per unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Nats a token.
    pub nats_per_token: Figure,
    /// `exp(nats_per_token)`.
    pub perplexity: Figure,
    /// Bits a byte of UTF-8: comparable between tokenizers.
    pub bits_per_byte: Figure,
}

/// The costs of one language.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageReport {
    /// Its name, or `all`.
    pub language: String,
    /// Documents.
    pub documents: usize,
    /// Tokens judged: all of every document, the end token not counted.
    pub tokens: usize,
    /// Bytes of UTF-8.
    pub bytes: usize,
    /// Pieces between white space, as `lm-eval` counts words.
    pub words: usize,
    /// The sum over all tokens, in nats.
    pub nats: Figure,
    /// The model.
    pub model: Cost,
    /// Uniform, unigram and twin.
    pub baselines: [(Baseline, Cost); 3],
}

impl LanguageReport {
    /// The baselines that the model does not beat.
    pub fn not_beaten(&self) -> Vec<Baseline> {
        let model = self.model.nats_per_token.get();
        let worse = self.baselines.iter().filter(|(_, cost)| model >= cost.nats_per_token.get());
        worse.map(|(baseline, _)| *baseline).collect()
    }
}

/// Sums of one language.
#[derive(Clone, Default)]
struct Sums {
    documents: usize,
    tokens: usize,
    bytes: usize,
    words: usize,
    model: f64,
    twin: f64,
    unigram: f64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.documents += other.documents;
        self.tokens += other.tokens;
        self.bytes += other.bytes;
        self.words += other.words;
        self.model += other.model;
        self.twin += other.twin;
        self.unigram += other.unigram;
    }

    fn report(&self, language: &str, vocab_size: usize) -> Result<LanguageReport> {
        let uniform = self.tokens as f64 * (vocab_size as f64).ln();
        let pass = RunGate::evaluated(&[self.model, self.twin, self.unigram, uniform])?;
        let figure = |name: &str, value: f64| Figure::new(&pass, &format!("{name} of {language}"), value);
        let cost = |nats: f64| -> Result<Cost> {
            let per_token = nats / self.tokens as f64;
            Ok(Cost {
                nats_per_token: figure("nats a token", per_token)?,
                perplexity: figure("perplexity", per_token.exp())?,
                bits_per_byte: figure("bits a byte", nats / std::f64::consts::LN_2 / self.bytes as f64)?,
            })
        };
        Ok(LanguageReport {
            language: language.to_string(),
            documents: self.documents,
            tokens: self.tokens,
            bytes: self.bytes,
            words: self.words,
            nats: figure("nats", self.model)?,
            model: cost(self.model)?,
            baselines: [
                (Baseline::Uniform, cost(uniform)?),
                (Baseline::Unigram, cost(self.unigram)?),
                (Baseline::Twin, cost(self.twin)?),
            ],
        })
    }
}

/// Runs of white space and one more, as the harness counts words.
fn words(text: &str) -> usize {
    let spaces: Vec<bool> = text.chars().map(char::is_whitespace).collect();
    1 + spaces.iter().enumerate().filter(|&(i, &space)| space && (i == 0 || !spaces[i - 1])).count()
}

/// Judges `texts` by language, in the order of names, and all of them together last. Each document is judged on its own,
/// after the token that begins a text, usually the one that ends a document. Tokens of a template are not judged:
/// `lm-eval` judges a template's first token after itself, which `add_bos_token=False` takes from it. Without a `unigram` the judged tokens give one, which is returned.
///
/// # Errors
/// No text; a cost that is not finite; a token that the model does not know.
pub fn judge_texts(
    (model, twin): (&Judge<'_>, &Judge<'_>),
    tokenizer: &Tokenizer,
    texts: &[Text],
    unigram: Option<Unigram>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Vec<LanguageReport>, Unigram)> {
    let ids: Vec<Vec<u32>> = texts.iter().map(|t| tokenizer.encode(&t.text)).collect::<Result<_, _>>()?;
    let unigram =
        unigram.unwrap_or_else(|| Unigram::of_judged(ids.iter().map(Vec::as_slice), model.vocab_size()));
    let mut owners = Vec::new();
    let mut requests = Vec::new();
    for (document, ids) in ids.iter().enumerate() {
        let windows = Request::rolling(ids, tokenizer.bos_id(), model.positions());
        owners.extend(std::iter::repeat_n(document, windows.len()));
        requests.extend(windows);
    }
    if requests.is_empty() {
        return Err(EvalError::Empty { what: "the held-out text".into() });
    }
    let total = 2 * requests.len();
    let own = model.costs(&requests, &mut |done| progress(done, total))?;
    let random = twin.costs(&requests, &mut |done| progress(requests.len() + done, total))?;
    let mut documents: Vec<Sums> = Vec::with_capacity(texts.len());
    for (text, ids) in texts.iter().zip(&ids) {
        documents.push(Sums {
            documents: 1,
            tokens: ids.len(),
            bytes: text.text.len(),
            words: words(&text.text),
            unigram: unigram.cost(ids),
            ..Sums::default()
        });
    }
    for ((&document, own), random) in owners.iter().zip(own).zip(random) {
        documents[document].model += own;
        documents[document].twin += random;
    }
    let mut languages: BTreeMap<&str, Sums> = BTreeMap::new();
    let mut all = Sums::default();
    for (text, sums) in texts.iter().zip(&documents).filter(|(_, sums)| sums.tokens > 0) {
        languages.entry(&text.language).or_default().add(sums);
        all.add(sums);
    }
    let mut reports: Vec<LanguageReport> = languages
        .iter()
        .map(|(language, sums)| sums.report(language, model.vocab_size()))
        .collect::<Result<_>>()?;
    if reports.len() > 1 {
        reports.push(all.report("all", model.vocab_size())?);
    }
    Ok((reports, unigram))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::tests::{model, tokenizer};

    fn text(language: &str, text: &str) -> Text {
        Text { language: language.into(), text: text.into() }
    }

    #[test]
    fn languages_are_judged_apart_and_together() {
        let tokenizer = tokenizer();
        let vocab = tokenizer.vocab_size();
        let ((own, own_params), (twin, twin_params)) = (model(vocab, 12, 1), model(vocab, 12, 2));
        let (own, twin) = (Judge::new(&own, &own_params, 64), Judge::new(&twin, &twin_params, 64));
        let texts = [
            text("b", "the river and the boat on the river"),
            text("a", "a house"),
            text("b", "by  the \u{9a8}"),
        ];
        let mut last = (0, 0);
        let (reports, unigram) =
            judge_texts((&own, &twin), &tokenizer, &texts, None, &mut |done, all| last = (done, all))
                .unwrap();
        assert_eq!(last.0, last.1);
        assert!(unigram.source.starts_with("the judged tokens"));
        let names: Vec<&str> = reports.iter().map(|r| r.language.as_str()).collect();
        assert_eq!(names, ["a", "b", "all"]);
        let [a, b, all] = &reports[..] else { panic!("three") };
        assert_eq!((b.documents, b.bytes), (2, 35 + 11));
        assert_eq!(b.words, 8 + 3);
        assert_eq!(all.tokens, a.tokens + b.tokens);
        assert!((all.nats.get() - a.nats.get() - b.nats.get()).abs() < 1e-6);
        for report in &reports {
            let per_token = report.nats.get() / report.tokens as f64;
            assert_eq!(report.model.nats_per_token.get(), per_token);
            assert!((report.model.perplexity.get().ln() - per_token).abs() < 1e-9);
            let bits = per_token * report.tokens as f64 / report.bytes as f64 / 2f64.ln();
            assert!((report.model.bits_per_byte.get() - bits).abs() < 1e-9);
            let [uniform, unigram, random] = &report.baselines;
            assert_eq!(uniform.1.nats_per_token.get(), (vocab as f64).ln());
            assert!(unigram.1.nats_per_token.get() < uniform.1.nats_per_token.get());
            assert!(random.1.nats_per_token.get() > 1.0);
            // Random weights beat no frequencies.
            assert!(report.not_beaten().contains(&Baseline::Unigram));
        }
    }

    #[test]
    fn unigrams_are_frequencies() {
        let own = Unigram::of_judged([&[0u32, 0, 1, 2][..], &[0]], 4);
        assert!((own.cost(&[0, 1]) - ((5.0f64 / 3.0).ln() + 5f64.ln())).abs() < 1e-12);
        assert_eq!(own.cost(&[3]), f64::INFINITY, "a token without an occurrence");
        let data = TokenData::from_documents(&[vec![0, 0, 1], vec![2]], 4, 3).unwrap();
        let trained = Unigram::of_training(&data, 4);
        // Two documents: 0 twice, 1, 2, the end token twice, and one more of each.
        let total = (data.len() + 4) as f64;
        assert!((trained.cost(&[0]) - (total / 3.0).ln()).abs() < 1e-12);
        assert!(trained.cost(&[3]).is_finite());
    }

    #[test]
    fn nothing_and_nan_give_no_figure() {
        let tokenizer = tokenizer();
        let (own, mut params) = model(tokenizer.vocab_size(), 12, 1);
        let run = |params: &rb_autograd::ParamStore, texts: &[Text]| {
            let judge = Judge::new(&own, params, 64);
            judge_texts((&judge, &judge), &tokenizer, texts, None, &mut |_, _| ()).unwrap_err().to_string()
        };
        assert!(run(&params, &[]).contains("nothing to judge"));
        let norm = rb_tensor::Tensor::from_vec(vec![f32::NAN; 16], [16]).unwrap();
        params.set_part("model.norm.weight", &norm).unwrap();
        let message = run(&params, &[text("a", "the river")]);
        assert!(message.starts_with("no figure is shown: ") && message.contains("NaN"), "{message}");
    }
}
