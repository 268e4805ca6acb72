//! Results in the JSON of lm-evaluation-harness, which its tools and leaderboards read.

use serde_json::{Map, Value, json};

use crate::{Accuracy, Baseline, ChoiceReport, Cost, LanguageReport, TaskKind, Verdict};

/// What was judged, and how.
#[derive(Clone, Debug)]
pub struct Run {
    /// Folder of the model.
    pub model: String,
    /// `cpu` or the GPU.
    pub device: String,
    /// Elements of the model's parameters.
    pub parameters: usize,
    /// Most questions of a task that were taken.
    pub limit: Option<usize>,
    /// Seconds since 1970.
    pub date: u64,
    /// Seconds that it took.
    pub seconds: f64,
}

/// Collects results under the harness's keys.
#[derive(Clone, Debug, Default)]
pub struct Results {
    results: Map<String, Value>,
    configs: Map<String, Value>,
    higher_is_better: Map<String, Value>,
    samples: Map<String, Value>,
}

/// The version of the harness's tasks whose prompts are used.
const TASK_VERSION: f64 = 1.0;

impl Results {
    /// Adds a task with `all` questions in its file.
    pub fn add_choices(&mut self, name: &str, kind: TaskKind, report: &ChoiceReport, all: usize) {
        let mut values = Map::from_iter([
            ("alias".to_string(), json!(name)),
            ("chance,none".into(), json!(report.chance)),
        ]);
        let mut better = Map::new();
        let rules = [
            ("acc", Some(&report.acc)),
            ("acc_norm", report.acc_norm.as_ref()),
            ("acc_bytes", report.acc_bytes.as_ref()),
        ];
        for (rule, accuracy) in rules {
            let Some(accuracy) = accuracy else { continue };
            add_accuracy(&mut values, rule, accuracy);
            better.insert(rule.into(), json!(true));
        }
        self.results.insert(name.into(), Value::Object(values));
        self.higher_is_better.insert(name.into(), Value::Object(better));
        self.configs.insert(
            name.into(),
            json!({ "task": name, "kind": kind.name(), "output_type": "multiple_choice", "num_fewshot": 0 }),
        );
        self.samples.insert(name.into(), json!({ "original": all, "effective": report.questions.len() }));
    }

    /// Adds the held-out text of a language.
    pub fn add_language(&mut self, report: &LanguageReport, unigram: &str) {
        let name = format!("heldout_{}", report.language);
        let nats = report.nats.get();
        let mut values = Map::from_iter([
            ("alias".to_string(), json!(name)),
            ("word_perplexity,none".into(), json!((nats / report.words as f64).exp())),
            ("byte_perplexity,none".into(), json!((nats / report.bytes as f64).exp())),
            ("bits_per_byte,none".into(), json!(report.model.bits_per_byte)),
            ("tokens".into(), json!(report.tokens)),
            ("bytes".into(), json!(report.bytes)),
            ("words".into(), json!(report.words)),
        ]);
        add_cost(&mut values, "", &report.model);
        for (baseline, cost) in &report.baselines {
            let name = match baseline {
                Baseline::Uniform => "uniform_",
                Baseline::Unigram => "unigram_",
                Baseline::Twin => "random_twin_",
            };
            add_cost(&mut values, name, cost);
        }
        values.insert("unigram_from".into(), json!(unigram));
        let better = ["word_perplexity", "byte_perplexity", "bits_per_byte", "nats_per_token"];
        let better = better.iter().map(|key| (key.to_string(), json!(false))).collect();
        self.higher_is_better.insert(name.clone(), Value::Object(better));
        let config = json!({ "task": name, "output_type": "loglikelihood_rolling", "num_fewshot": 0 });
        self.configs.insert(name.clone(), config);
        self.samples
            .insert(name.clone(), json!({ "original": report.documents, "effective": report.documents }));
        self.results.insert(name, Value::Object(values));
    }

    /// The whole document.
    pub fn to_json(&self, run: &Run) -> Value {
        let each = |value: Value| -> Map<String, Value> {
            self.results.keys().map(|name| (name.clone(), value.clone())).collect()
        };
        json!({
            "results": self.results,
            "group_subtasks": each(json!([])),
            "configs": self.configs,
            "versions": each(json!(TASK_VERSION)),
            "n-shot": each(json!(0)),
            "higher_is_better": self.higher_is_better,
            "n-samples": self.samples,
            "config": {
                "model": "rusting_brain",
                "model_args": run.model,
                "model_num_parameters": run.parameters,
                "device": run.device,
                "limit": run.limit,
            },
            "model_name": run.model,
            "model_source": "rusting_brain",
            "date": run.date,
            "total_evaluation_time_seconds": format!("{:.3}", run.seconds),
        })
    }
}

fn add_accuracy(values: &mut Map<String, Value>, rule: &str, accuracy: &Accuracy) {
    values.insert(format!("{rule},none"), json!(accuracy.value));
    let stderr = accuracy.stderr.map_or(json!("N/A"), |stderr| json!(stderr));
    values.insert(format!("{rule}_stderr,none"), stderr);
    let (verdict, p) = match accuracy.verdict {
        Verdict::Above(p) => ("above", p),
        Verdict::Below(p) => ("below", p),
        Verdict::NotDifferent(p) => ("not different", p),
    };
    values.insert(format!("{rule}_against_chance,none"), json!({ "verdict": verdict, "p": p }));
}

fn add_cost(values: &mut Map<String, Value>, name: &str, cost: &Cost) {
    values.insert(format!("{name}nats_per_token,none"), json!(cost.nats_per_token));
    values.insert(format!("{name}token_perplexity,none"), json!(cost.perplexity));
    values.insert(format!("{name}bits_per_byte,none"), json!(cost.bits_per_byte));
}
