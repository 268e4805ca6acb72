//! What a continuation costs after a context.

use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::{CausalLm, ModelInput};
use rb_tensor::Tensor;

use crate::{EvalError, Result};

/// Labels that count for nothing.
const IGNORED: i32 = -100;
/// Lengths of batches are multiples of this, so that there are few of them.
const LENGTH_STEP: usize = 16;

/// Tokens whose cost is asked for, and the tokens before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// At least one token. What does not fit into the model's positions is left out at its beginning.
    pub context: Vec<u32>,
    /// The tokens that are judged.
    pub continuation: Vec<u32>,
}

impl Request {
    /// A pair of texts. They are encoded together and then parted after as many tokens as the context has alone; spaces
    /// at the end of the context belong to the continuation. Before the context stands what the tokenizer's template
    /// puts there; an empty context is the token that begins texts.
    ///
    /// **Source** `TemplateLM._encode_pair` of lm-evaluation-harness.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn encode(tokenizer: &Tokenizer, context: &str, continuation: &str) -> Result<Request> {
        if context.is_empty() {
            let continuation = tokenizer.encode(continuation)?;
            return Ok(Request { context: vec![tokenizer.bos_id()], continuation });
        }
        let trimmed = tokenizer.encode(context.trim_end())?;
        let whole = tokenizer.encode(&format!("{context}{continuation}"))?;
        let continuation = whole.get(trimmed.len()..).unwrap_or_default().to_vec();
        let mut context = [tokenizer.template(), &trimmed].concat();
        if context.is_empty() {
            context.push(tokenizer.bos_id());
        }
        Ok(Request { context, continuation })
    }

    /// A document as requests in which each of its tokens is judged once, the first one after `prefix`. A document longer
    /// than the model's positions is cut into windows of that length; each begins where the one before ended, but the
    /// last one ends with the document and has the more context.
    ///
    /// **Source** `get_rolling_token_windows` and `make_disjoint_window` of lm-evaluation-harness.
    pub fn rolling(ids: &[u32], prefix: u32, positions: usize) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut done = 0;
        while done < ids.len() {
            let end = ids.len().min(done + positions);
            let context = match end.checked_sub(positions + 1) {
                Some(start) if done > 0 => ids[start..done].to_vec(),
                _ => vec![prefix],
            };
            requests.push(Request { context, continuation: ids[done..end].to_vec() });
            done = end;
        }
        requests
    }
}

/// A model that judges.
pub struct Judge<'a> {
    model: &'a CausalLm,
    params: &'a ParamStore,
    batch_tokens: usize,
}

impl<'a> Judge<'a> {
    /// A judge that reads about `batch_tokens` tokens at once; results depend on it only by rounding.
    pub fn new(model: &'a CausalLm, params: &'a ParamStore, batch_tokens: usize) -> Judge<'a> {
        Judge { model, params, batch_tokens }
    }

    /// Positions of the model.
    pub fn positions(&self) -> usize {
        self.model.config().max_position_embeddings
    }

    /// Entries of the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    /// The sum of `-ln p` over the continuation of each request, in nats. `progress` gets the number of requests done.
    ///
    /// # Errors
    /// A continuation longer than the model's positions; a token that the model does not know.
    pub fn costs(&self, requests: &[Request], progress: &mut dyn FnMut(usize)) -> Result<Vec<f64>> {
        let rows: Vec<Row> = requests.iter().map(|r| Row::new(r, self.positions())).collect::<Result<_>>()?;
        // The longest first: batches of alike rows, and a machine too small for the work says so at once.
        let mut order: Vec<usize> = (0..rows.len()).filter(|&i| !rows[i].ids.is_empty()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(rows[i].ids.len()));
        let mut costs = vec![0.0; rows.len()];
        let mut rest = &order[..];
        while let Some(&longest) = rest.first() {
            let len = rows[longest].ids.len().next_multiple_of(LENGTH_STEP).min(self.positions());
            let count = (self.batch_tokens / len).clamp(1, rest.len());
            let (batch, later) = rest.split_at(count);
            let rows: Vec<&Row> = batch.iter().map(|&i| &rows[i]).collect();
            let got = self.batch(&rows, len)?;
            batch.iter().zip(got).for_each(|(&i, cost)| costs[i] = cost);
            rest = later;
            progress(requests.len() - rest.len());
        }
        Ok(costs)
    }

    /// Rows end early where they are shorter: a causal model does not see what comes after.
    fn batch(&self, rows: &[&Row], len: usize) -> Result<Vec<f64>> {
        let padded = |values: fn(&Row) -> &[i32], filler: i32| {
            let row = |row: &&Row| {
                let values = values(row);
                values
                    .iter()
                    .copied()
                    .chain(std::iter::repeat_n(filler, len - values.len()))
                    .collect::<Vec<_>>()
            };
            Tensor::from_vec(rows.iter().flat_map(row).collect(), [rows.len(), len])
        };
        let input = ModelInput::causal(padded(|row| &row.ids, 0)?);
        Ok(self.model.row_losses(self.params, &input, &padded(|row| &row.labels, IGNORED)?)?)
    }
}

/// Inputs and labels of a request.
struct Row {
    ids: Vec<i32>,
    labels: Vec<i32>,
}

impl Row {
    fn new(request: &Request, positions: usize) -> Result<Row> {
        let judged = request.continuation.len();
        if judged > positions {
            return Err(EvalError::TooLong { len: judged, limit: positions });
        }
        let all: Vec<i32> =
            request.context.iter().chain(&request.continuation).map(|&id| id as i32).collect();
        let all = &all[all.len().saturating_sub(positions + 1)..];
        let (ids, next) = (&all[..all.len().saturating_sub(1)], all.get(1..).unwrap_or_default());
        let context = next.len().saturating_sub(judged);
        let mut labels = next.to_vec();
        labels[..context].fill(IGNORED);
        Ok(Row { ids: ids.to_vec(), labels })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rb_autograd::ParamBuilder;
    use rb_data::TokenizerConfig;
    use rb_nn::LlamaConfig;
    use rb_tensor::{Device, Rng};

    pub(crate) fn model(vocab_size: usize, positions: usize, seed: u64) -> (CausalLm, ParamStore) {
        let config = LlamaConfig {
            max_position_embeddings: positions,
            initializer_range: 0.3,
            ..LlamaConfig::new(vocab_size, 16, 24, 1, 2)
        };
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(&config, &mut builder).unwrap();
        (model, builder.build(&Rng::new(seed), Device::Cpu).unwrap())
    }

    pub(crate) fn tokenizer() -> Tokenizer {
        let text = "the boat on the river and the house by the river ".repeat(8);
        let config = TokenizerConfig { vocab_size: 290, ..TokenizerConfig::default() };
        Tokenizer::train(std::iter::once(Ok(text)), &config).unwrap().0
    }

    /// The cost from the scores of the whole vocabulary, one token at a time.
    fn slow(model: &CausalLm, params: &ParamStore, request: &Request) -> f64 {
        let mut text = request.context.clone();
        let mut cost = 0.0;
        for &id in &request.continuation {
            let context: Vec<i32> = text.iter().map(|&id| id as i32).collect();
            let len = context.len();
            let input = ModelInput::causal(Tensor::from_vec(context, [1, len]).unwrap());
            let scores = model.next_token_logits(params, &input).unwrap().to_vec::<f32>().unwrap();
            let total: f64 = scores.iter().map(|&x| f64::from(x).exp()).sum();
            cost += total.ln() - f64::from(scores[id as usize]);
            text.push(id);
        }
        cost
    }

    #[test]
    fn costs_are_sums_over_the_continuation() {
        let (model, params) = model(50, 20, 1);
        let request = |context: std::ops::Range<u32>, len: u32| Request {
            context: context.collect(),
            continuation: (0..len).map(|i| i * 7 % 50).collect(),
        };
        let requests =
            [request(0..3, 2), request(4..5, 16), request(0..11, 1), request(9..10, 0), request(2..9, 4)];
        for batch_tokens in [1, 40, 10_000] {
            let mut seen = Vec::new();
            let judge = Judge::new(&model, &params, batch_tokens);
            let costs = judge.costs(&requests, &mut |done| seen.push(done)).unwrap();
            for (cost, request) in costs.iter().zip(&requests) {
                let want = slow(&model, &params, request);
                assert!((cost - want).abs() < 1e-4, "{request:?}: {cost}, expected {want}");
            }
            assert_eq!(seen.last(), Some(&requests.len()));
        }
        let long = Judge::new(&model, &params, 100).costs(&[request(0..1, 21)], &mut |_| ());
        assert!(long.unwrap_err().to_string().contains("21 tokens, more than the 20 positions"));
    }

    /// Only the end of a long context is read, as much as fits.
    #[test]
    fn a_long_context_loses_its_beginning() {
        let (model, params) = model(50, 8, 2);
        let judge = Judge::new(&model, &params, 100);
        let long = Request { context: (0..30).collect(), continuation: vec![3, 4, 5] };
        let cut = Request { context: (24..30).collect(), continuation: vec![3, 4, 5] };
        let costs = judge.costs(&[long, cut], &mut |_| ()).unwrap();
        assert_eq!(costs[0], costs[1]);
    }

    #[test]
    fn windows_judge_each_token_once() {
        let ids: Vec<u32> = (10..31).collect();
        let windows = Request::rolling(&ids, 1, 8);
        let shown: Vec<_> = windows.iter().map(|w| (w.context.clone(), w.continuation.len())).collect();
        // The last window holds five new tokens after four old ones: nine tokens are eight inputs.
        assert_eq!(shown, [(vec![1], 8), (vec![17], 8), (vec![22, 23, 24, 25], 5)]);
        let judged: Vec<u32> = windows.iter().flat_map(|w| w.continuation.clone()).collect();
        assert_eq!(judged, ids);
        assert_eq!(
            Request::rolling(&ids[..3], 1, 8),
            [Request { context: vec![1], continuation: vec![10, 11, 12] }]
        );
        assert!(Request::rolling(&[], 1, 8).is_empty());
    }

    #[test]
    fn spaces_go_to_the_continuation() {
        let tokenizer = tokenizer();
        let encode =
            |context: &str, continuation: &str| Request::encode(&tokenizer, context, continuation).unwrap();
        assert_eq!(encode("the boat", " on the river"), encode("the boat ", "on the river"));
        let request = encode("the boat", " on the river");
        assert_eq!(tokenizer.decode(&request.context).unwrap(), "the boat");
        assert_eq!(tokenizer.decode(&request.continuation).unwrap(), " on the river");
        let bare = encode("", "the river");
        assert_eq!(
            (bare.context, bare.continuation),
            (vec![tokenizer.eos_id()], tokenizer.encode("the river").unwrap())
        );
    }

    /// As Llama 3's tokenizer: a template with a token before each text, which is not the one that ends it.
    #[test]
    fn a_template_begins_every_context() {
        let dir = tempfile::tempdir().unwrap();
        let text = "the boat on the river and the house by the river ".repeat(8);
        let special_tokens = vec!["<end>".to_string(), "<begin>".to_string()];
        let config = TokenizerConfig { vocab_size: 290, special_tokens, ..TokenizerConfig::default() };
        let plain = Tokenizer::train(std::iter::once(Ok(text)), &config).unwrap().0;
        let mut json: serde_json::Value = serde_json::from_str(&plain.to_json().unwrap()).unwrap();
        json["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<begin>": {"id": "<begin>", "ids": [1], "tokens": ["<begin>"]}}
        });
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        let tokenizer = Tokenizer::load(&path).unwrap();
        assert_eq!((tokenizer.template(), tokenizer.bos_id(), tokenizer.eos_id()), (&[1][..], 1, 0));
        let ids = |text: &str| plain.encode(text).unwrap();
        assert_eq!(tokenizer.encode("the boat").unwrap(), ids("the boat"), "encoding adds nothing");
        let pair = Request::encode(&tokenizer, "the boat ", "on the river").unwrap();
        assert_eq!(pair.context, [&[1], &ids("the boat")[..]].concat());
        assert_eq!(pair.continuation, ids(" on the river"));
        for blank in ["", " "] {
            let pair = Request::encode(&tokenizer, blank, "the river").unwrap();
            let text = if blank.is_empty() { "the river" } else { " the river" };
            assert_eq!((pair.context, pair.continuation), (vec![1], ids(text)), "{blank:?}");
        }
        // What the folder says comes first, and both are written again.
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"bos_token": "<end>"}"#).unwrap();
        let configured = Tokenizer::load(&path).unwrap();
        assert_eq!((configured.template(), configured.bos_id()), (&[1][..], 0));
        tokenizer.save_folder(dir.path(), None).unwrap();
        let read = Tokenizer::load(&path).unwrap();
        assert_eq!((read.template(), read.bos_id(), read.eos_id()), (&[1][..], 1, 0));
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"bos_token": "<no>"}"#).unwrap();
        let message = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(
            message.contains("bos_token \"<no>\" of tokenizer_config.json is not in the vocabulary"),
            "{message}"
        );
    }
}
