//! Clean code raises no alarm: every check passes on 50 random models, whatever their sizes and options.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rb_autograd::ParamBuilder;
use rb_nn::{CausalLm, LlamaConfig, RopeScaling};
use rb_tensor::{DType, Device, Rng};

/// Models of each test; the two tests run side by side.
const CASES: u32 = 25;

/// Sizes are small and odd where a model allows it; heads in every ratio.
fn config() -> impl Strategy<Value = LlamaConfig> {
    let heads = (1usize..=3, 1usize..=3, 1usize..=4);
    let sizes = (5usize..=80, 9usize..=41, 1usize..=2, 2usize..=12);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let numbers = (0.03f64..0.1, 100.0f64..20_000.0, 0usize..3, 1usize..=3, 0usize..3);
    (heads, sizes, flags, numbers).prop_map(|(heads, sizes, flags, numbers)| {
        let (kv_heads, group, half_head) = heads;
        let (vocab, inner, layers, positions) = sizes;
        let (tied, bias, qk_norm, own_width) = flags;
        let (range, theta, scaling, wider, cap) = numbers;
        let (num_heads, head_dim) = (kv_heads * group, 2 * half_head);
        // Often not the width of all heads together, and never too narrow to memorise a batch.
        let share = if own_width { head_dim + wider } else { head_dim };
        let hidden = num_heads * share.max(24usize.div_ceil(num_heads));
        LlamaConfig {
            num_key_value_heads: Some(kv_heads),
            head_dim: Some(head_dim),
            max_position_embeddings: positions,
            initializer_range: range,
            rope_theta: theta,
            rope_scaling: match scaling {
                1 => Some(RopeScaling::Linear { factor: 1.0 + wider as f64 }),
                2 => Some(RopeScaling::Llama3 {
                    factor: 4.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_position_embeddings: 8,
                }),
                _ => None,
            },
            attn_logit_softcapping: (cap == 1).then_some(2.0 + wider as f64),
            attention_bias: bias,
            use_qk_norm: qk_norm,
            tie_word_embeddings: tied,
            ..LlamaConfig::new(vocab, hidden, inner, layers, num_heads)
        }
    })
}

/// Runs every check on random models with weights of `dtype`.
fn no_alarm(dtype: DType, seed: u8) {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let settings =
        Config { cases: CASES, failure_persistence: None, max_shrink_iters: 20, ..Config::default() };
    let ran = TestRunner::new_with_rng(settings, rng).run(&(config(), 0u64..1000), |(config, seed)| {
        let fail = |e: String| TestCaseError::fail(format!("{config:?}, seed {seed}: {e}"));
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(&config, &mut builder).map_err(|e| fail(e.to_string()))?;
        let params = builder.build(&Rng::new(seed), Device::Cpu).map_err(|e| fail(e.to_string()))?;
        let mut params = params.to_dtype(dtype).map_err(|e| fail(e.to_string()))?;
        let report = rb_verify::verify_model(&model, &mut params, seed).map_err(|e| fail(e.to_string()))?;
        match report.refusal() {
            None => Ok(()),
            Some(refusal) => Err(fail(refusal)),
        }
    });
    if let Err(alarm) = ran {
        panic!("{alarm}");
    }
}

#[test]
fn no_alarm_in_f32() {
    no_alarm(DType::F32, 1);
}

#[test]
fn no_alarm_in_f64() {
    no_alarm(DType::F64, 2);
}
