//! Operations that are registered without a backward: is the gradient there, and does anything say that it is not?

use candle::{D, Device, Result, Tensor, Var};
use candle_nn::attention::AttnMask;
use candle_nn::{Module, ops, rotary_emb};

use crate::common::{Numbers, exists, report};

const HEADS: usize = 2;
const LEN: usize = 6;
const WIDTH: usize = 8;

type Operation<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// Both forms of an operation on `[1, HEADS, LEN, WIDTH]`.
struct Pair<'a> {
    name: &'static str,
    fused: Operation<'a>,
    plain: Operation<'a>,
}

pub fn run() -> Result<()> {
    let device = &Device::Cpu;
    let mut numbers = Numbers(1);
    let weight = Tensor::ones(WIDTH, candle::DType::F32, device)?;
    let bias = Tensor::zeros(WIDTH, candle::DType::F32, device)?;
    let angles = Tensor::from_vec(numbers.many(LEN * WIDTH / 2), (LEN, WIDTH / 2), device)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let rms_norm = candle_nn::RmsNorm::new(weight.clone(), 1e-5);
    let layer_norm = candle_nn::LayerNorm::new(weight.clone(), bias.clone(), 1e-5);
    let transposed = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let attend = |x: &Tensor| -> Result<Tensor> {
        let x = transposed(x)?;
        candle_nn::attention::flash_attn::<f32>(&x, &x, &x, 0.5, AttnMask::causal(), None, None)
    };
    let attend_plainly = |x: &Tensor| -> Result<Tensor> {
        let scores = (x.matmul(&x.t()?)? * 0.5)?;
        let hidden: Vec<f32> =
            (0..LEN * LEN).map(|at| if at % LEN > at / LEN { f32::NEG_INFINITY } else { 0.0 }).collect();
        let scores = scores.broadcast_add(&Tensor::from_vec(hidden, (LEN, LEN), device)?)?;
        ops::softmax(&scores, D::Minus1)?.matmul(x)
    };
    let pairs = [
        Pair {
            name: "candle_nn::RmsNorm (#2168)",
            fused: &|x| rms_norm.forward(x),
            plain: &|x| rms_norm.forward_diff(x),
        },
        Pair {
            name: "candle_nn::LayerNorm (#3011)",
            fused: &|x| layer_norm.forward(x),
            plain: &|x| ops::layer_norm_slow(x, &weight, &bias, 1e-5),
        },
        Pair {
            name: "ops::softmax_last_dim (#3569)",
            fused: &|x| ops::softmax_last_dim(x),
            plain: &|x| ops::softmax(x, D::Minus1),
        },
        Pair {
            name: "rotary_emb::rope (#3568)",
            fused: &|x| rotary_emb::rope(x, &cos, &sin),
            plain: &|x| rotary_emb::rope_slow(x, &cos, &sin),
        },
        Pair {
            name: "rotary_emb::rope_i (#3568)",
            fused: &|x| rotary_emb::rope_i(x, &cos, &sin),
            plain: &|x| rotary_emb::rope_i_slow(x, &cos, &sin),
        },
        Pair {
            name: "rotary_emb::rope_thd (#3568)",
            fused: &|x| rotary_emb::rope_thd(&transposed(x)?, &cos, &sin)?.transpose(1, 2),
            plain: &|x| rotary_emb::rope_slow(x, &cos, &sin),
        },
        Pair { name: "attention::flash_attn on the CPU", fused: &attend, plain: &attend_plainly },
    ];
    for pair in &pairs {
        let (fused, plain) = (try_one(pair.fused)?, try_one(pair.plain)?);
        let difference = (&fused.output - &plain.output)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let seen = format!(
            "outputs differ by {difference:.0e}; gradient of the weight before it: {} (plain form: {})",
            fused.gradient, plain.gradient
        );
        let tried = "weight -> operation -> loss, backward, beside the plain form";
        report(
            &format!("fused operation without backward: {}", pair.name),
            tried,
            &seen,
            exists(fused.silent),
        );
    }
    contiguity(&rms_norm)
}

struct Tried {
    output: Tensor,
    gradient: String,
    /// No gradient, and no error either.
    silent: bool,
}

/// `loss = sum(operation(weight * input) * random)`, and the gradient of `weight`.
fn try_one(operation: Operation<'_>) -> Result<Tried> {
    let (mut numbers, shape) = (Numbers(2), (1, HEADS, LEN, WIDTH));
    let mut random = || Tensor::from_vec(numbers.many(HEADS * LEN * WIDTH), shape, &Device::Cpu);
    let weight = Var::from_tensor(&random()?)?;
    let output = operation(&(weight.as_tensor() * random()?)?)?;
    let loss = (&output * random()?)?.sum_all()?;
    let (gradient, silent) = match loss.backward() {
        Err(error) => (format!("error \"{error}\""), false),
        Ok(grads) => match grads.get(&weight) {
            None => ("none, and backward returned Ok".to_string(), true),
            Some(grad) => (format!("norm {:.3}", grad.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?), false),
        },
    };
    Ok(Tried { output, gradient, silent })
}

/// The same module on the same numbers, laid out in another order.
fn contiguity(norm: &candle_nn::RmsNorm) -> Result<()> {
    let whole = try_one(&|x| norm.forward(x))?;
    let strided = try_one(&|x| norm.forward(&x.transpose(1, 2)?)?.transpose(1, 2))?;
    let seen = format!("contiguous: {}; transposed: {}", whole.gradient, strided.gradient);
    report(
        "the layout of an input decides whether there is a gradient (#2168)",
        "candle_nn::RmsNorm on a contiguous input and on a transposed view",
        &seen,
        exists(whole.silent != strided.silent),
    );
    Ok(())
}
