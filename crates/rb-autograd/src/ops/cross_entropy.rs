//! Cross entropy of scores against labels, as one scalar.
//!
//! - **Computes** with `lse = log(sum(exp(logits)))` over the `K` classes and `s` the smoothing: for each row with a
//!   label, `(1-s) (lse - logits[label]) + s (lse - mean(logits)) + z lse^2`, times its weight; the sum over rows is
//!   divided by the denominator.
//! - **Shapes** `logits [.., V]`, `labels [..]` (i32), optional `row_weights [..]` -> scalar.
//! - **Dtypes** `logits` any float type; row losses are summed in f64 in row order. On a GPU the loss is f32 whatever
//!   the logits are, and row losses are summed in f32 in a fixed order.
//! - **Backward** with `p = softmax(logits)`, `t = (1-s) onehot + s/K`:
//!   `dlogits = dy * weight / denominator * (p - t + 2 z lse p)`; exactly zero in rows without a label and in columns
//!   that are not classes. `p[label] - 1` is minus the sum of the other `p`.
//! - **Saves** `logits` (shared), `max [..]` and `sum [..]`: the shift of each row and its sum of exponentials, which keep
//!   `p` exact where `lse` is too large for its own fraction.
//! - **Kernels** `cross_entropy_fwd`, `cross_entropy_bwd` (in place where nobody else holds the logits),
//!   `cross_entropy_sum`; [`cross_entropy_consuming`]: `cross_entropy_fwd_bwd`, `cross_entropy_scale`.
//! - **Errors** `IndexOutOfRange` for a label that is neither a class nor `ignore_index` (a NaN loss where the labels
//!   are on the GPU); `Argument` for options out of
//!   range, or for no label at all with [`Denominator::ValidTokens`]; `ShapeError` for `labels` of another shape.
//! - **Source** PyTorch `torch.nn.functional.cross_entropy`; arXiv:2204.02311, section 5, for the z-loss.

mod cuda;

use rb_cuda::Gpu;
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor};

use super::shared::softmax;
use crate::host;
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Var, apply, saved};

/// What the sum of row losses is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Denominator {
    /// The number of labels that are not ignored.
    ValidTokens,
    /// A given number: the count of valid tokens of a whole step that is split into micro-batches.
    Fixed(f64),
}

/// Attributes of [`cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions {
    /// Columns that are classes; the others are padding without probability. `None`: all columns.
    pub num_classes: Option<usize>,
    /// Rows with this label count for nothing.
    pub ignore_index: i32,
    /// Share of the target that is spread evenly over all classes, in [0, 1).
    pub label_smoothing: f64,
    /// Coefficient of `lse^2`.
    pub z_loss: f64,
    /// What the sum is divided by.
    pub denominator: Denominator,
    /// A factor for the loss of each row, of the labels' shape, any float type.
    pub row_weights: Option<Tensor>,
    /// A factor for the sum of row losses in place of `1 / denominator`: one f32 on the device of the logits, read when
    /// the work runs, so that it may change between launches of captured work.
    pub factor: Option<Tensor>,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions {
            num_classes: None,
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            denominator: Denominator::ValidTokens,
            row_weights: None,
            factor: None,
        }
    }
}

/// The cross entropy between `logits [.., V]` and `labels [..]` (i32), as a scalar.
pub fn cross_entropy<'t>(
    logits: &Var<'t>,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Var<'t>> {
    let op = CrossEntropy::new(logits.shape(), labels, options)?.on(logits.value.device())?;
    apply(op, &[logits])
}

/// As [`cross_entropy`], for scores that it may overwrite: on a GPU, where they are held by nobody else and a gradient
/// will be wanted, their gradient takes their place while the loss is computed, in one pass over them.
pub fn cross_entropy_consuming<'t>(
    logits: Var<'t>,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Var<'t>> {
    let device = logits.value.device();
    let mut op = CrossEntropy::new(logits.shape(), labels, options)?.on(device)?;
    op.consume = device != Device::Cpu && logits.requires_grad() && logits.value.is_unshared();
    apply(op, &[&logits])
}

struct CrossEntropy {
    labels: Tensor,
    /// f64 on the host, f32 on a GPU.
    weights: Option<Tensor>,
    classes: usize,
    ignore_index: i32,
    smoothing: f64,
    z_loss: f64,
    denominator: f64,
    /// In place of the denominator.
    factor: Option<Tensor>,
    /// Whether forward may write over the logits.
    consume: bool,
}

saved!(
    /// On a GPU `max` and `sum` are empty where `logits` holds their gradient, for a `dy` of 1.
    struct CrossEntropySaved { logits, max, sum }
);

impl CrossEntropy {
    fn new(logits: &Shape, labels: &Tensor, options: &CrossEntropyOptions) -> Result<CrossEntropy> {
        labels.expect_dtype(Self::NAME, "labels", DType::I32)?;
        let argument = |argument, got: String, expected: &str| {
            Err(AutogradError::Argument { op: Self::NAME, argument, got, expected: expected.into() })
        };
        let classes = options.num_classes.unwrap_or(logits.last());
        if classes == 0 || classes > logits.last() {
            let expected = format!("1 to {}, the columns of logits {logits}", logits.last());
            return argument("num_classes", classes.to_string(), &expected);
        }
        if !(0.0..1.0).contains(&options.label_smoothing) {
            return argument("label_smoothing", options.label_smoothing.to_string(), "0 to below 1");
        }
        if !(options.z_loss.is_finite() && options.z_loss >= 0.0) {
            return argument("z_loss", options.z_loss.to_string(), "a finite number of at least 0");
        }
        if labels.device() == Device::Cpu {
            let ids = labels.as_slice::<i32>()?;
            let bad =
                |&l: &i32| l != options.ignore_index && usize::try_from(l).map_or(true, |l| l >= classes);
            if let Some(position) = ids.iter().position(bad) {
                let index = i64::from(ids[position]);
                let (op, argument) = (Self::NAME, "labels");
                return Err(AutogradError::IndexOutOfRange { op, argument, position, index, bound: classes });
            }
        }
        if let Some(factor) = &options.factor
            && (factor.numel(), factor.dtype()) != (1, DType::F32)
        {
            return argument("factor", format!("{} {}", factor.dtype(), factor.shape()), "one f32");
        }
        let denominator = match options.denominator {
            _ if options.factor.is_some() => 1.0,
            Denominator::Fixed(n) if n.is_finite() && n > 0.0 => n,
            Denominator::Fixed(n) => {
                return argument("denominator", n.to_string(), "a finite number above 0");
            }
            // Waits for the GPU if the labels are there.
            Denominator::ValidTokens => {
                let ids = labels.to_device(Device::Cpu)?;
                let valid = ids.as_slice::<i32>()?.iter().filter(|&&l| l != options.ignore_index).count();
                if valid == 0 {
                    return argument("labels", "all ignored".into(), "at least one label");
                }
                if active(Defect::MeanOverPadding) { labels.numel() as f64 } else { valid as f64 }
            }
        };
        if let Some(w) = &options.row_weights
            && w.shape() != labels.shape()
        {
            return Err(ShapeError::new(Self::NAME, "row_weights", w.shape(), labels.shape()).into());
        }
        Ok(CrossEntropy {
            labels: labels.clone(),
            weights: options.row_weights.clone(),
            classes,
            ignore_index: options.ignore_index,
            smoothing: options.label_smoothing,
            z_loss: options.z_loss,
            denominator,
            factor: options.factor.clone(),
            consume: false,
        })
    }

    /// The same with its tensors where the logits are, as that device reads them.
    fn on(mut self, device: Device) -> Result<CrossEntropy> {
        self.labels = self.labels.to_device(device)?;
        let dtype = if device == Device::Cpu { DType::F64 } else { DType::F32 };
        self.factor = self.factor.map(|factor| factor.to_device(device)).transpose()?;
        let placed = self.weights.map(|w| w.to_dtype(dtype)?.to_device(device));
        self.weights = placed.transpose()?;
        Ok(self)
    }

    /// What the sum of row losses is multiplied by, on the host.
    fn host_factor(&self) -> Result<f64> {
        Ok(self.factor.as_ref().map_or(Ok(1.0), Tensor::item)?)
    }

    /// Weights of the rows on the host; empty without weights.
    fn host_weights(&self) -> Result<&[f64]> {
        Ok(self.weights.as_ref().map_or(Ok(&[][..]), Tensor::as_slice::<f64>)?)
    }
}

impl Op for CrossEntropy {
    const NAME: &'static str = "cross_entropy";
    type Saved = CrossEntropySaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (logits, labels) = (inputs[0], self.labels.shape());
        if logits.rank() == 0 || logits.dims()[..logits.rank() - 1] != *labels.dims() {
            let expected = format!("the axes of logits {logits} but the last");
            return Err(ShapeError::new(Self::NAME, "labels", labels, expected).into());
        }
        Ok(Shape::default())
    }

    fn out_dtype(&self, inputs: &[Tensor]) -> DType {
        if inputs[0].device() == Device::Cpu { inputs[0].dtype() } else { DType::F32 }
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _: &Shape) -> Result<(Tensor, CrossEntropySaved)> {
        let (x, labels) = (inputs[0].as_slice::<T>()?, self.labels.as_slice::<i32>()?);
        let columns = inputs[0].shape().last();
        // Three results a row: shift and sum of exponentials (saved), and the loss.
        let mut results = vec![T::ZERO; 3 * labels.len()];
        host::par_row_groups(&mut results, 3, columns, |row, result| {
            let label = labels[row];
            if label == self.ignore_index {
                return;
            }
            let x = &x[row * columns..][..self.classes];
            let max = softmax::shift(softmax::max(x));
            let sum = softmax::exp_sum(x, max);
            // The two large numbers are subtracted first, so that the loss of large logits keeps its digits.
            let mut loss = sum.ln() - (x[label as usize] - max);
            if self.smoothing != 0.0 {
                let even = sum.ln() - (softmax::sum(x) / T::from_f64(self.classes as f64) - max);
                loss = T::from_f64(1.0 - self.smoothing) * loss + T::from_f64(self.smoothing) * even;
            }
            if self.z_loss != 0.0 {
                let lse = max + sum.ln();
                loss += T::from_f64(self.z_loss) * lse * lse;
            }
            result.copy_from_slice(&[max, sum, loss]);
        });
        let column = |i: usize| results.iter().skip(i).step_by(3).copied().collect::<Vec<T>>();
        let saved = |values| Tensor::from_vec(values, self.labels.shape().clone());
        let saved =
            CrossEntropySaved { logits: inputs[0].clone(), max: saved(column(0))?, sum: saved(column(1))? };
        let losses = column(2);
        let weights = self.host_weights()?;
        let weight = |row: usize| weights.get(row).copied().unwrap_or(1.0);
        let terms = losses.iter().enumerate().map(|(row, loss)| loss.to_f64() * weight(row));
        let loss = match self.factor {
            Some(_) => terms.sum::<f64>() * self.host_factor()?,
            None => terms.sum::<f64>() / self.denominator,
        };
        Ok((Tensor::scalar(T::from_f64(loss)), saved))
    }

    fn host_backward<T: Float>(
        &self,
        saved: CrossEntropySaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let CrossEntropySaved { logits, max, sum } = saved;
        let (labels, max, sum) = (self.labels.as_slice::<i32>()?, max.as_slice::<T>()?, sum.as_slice::<T>()?);
        let columns = logits.shape().last();
        let dy = dy.as_slice::<T>()?[0].to_f64();
        let weights = self.host_weights()?;
        let dy = match self.factor {
            Some(_) => dy * self.host_factor()?,
            None => dy / self.denominator,
        };
        let weight = |row: usize| weights.get(row).copied().unwrap_or(1.0);
        // Turns a row of scores into its gradient in place.
        let differentiate = |row: usize, x: &mut [T]| {
            let label = labels[row];
            let (classes, padding) = x.split_at_mut(self.classes);
            padding.fill(T::ZERO);
            if label == self.ignore_index {
                classes.fill(T::ZERO);
                return;
            }
            // The label's p - 1 is computed as minus the sum of all other p: near certainty, 1 - (p rounded)
            // would have lost its digits.
            classes[label as usize] = T::NEG_INFINITY;
            let others = softmax::exp_in_place(classes, max[row]) / sum[row];
            let factor = T::from_f64(dy * weight(row));
            let z = T::from_f64(2.0 * self.z_loss) * (max[row] + sum[row].ln());
            let even = T::from_f64(self.smoothing / self.classes as f64);
            let scale = (T::ONE + z) / sum[row];
            for p in classes.iter_mut() {
                *p = (*p * scale - even) * factor;
            }
            let own = (z + T::from_f64(self.smoothing) - others * (T::ONE + z) - even) * factor;
            classes[label as usize] = own;
        };
        grads.add(0, host::update::<T>(logits, |dx| host::par_rows(dx, columns, differentiate))?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, CrossEntropySaved)> {
        self.forward_on(gpu, &inputs[0], out)
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: CrossEntropySaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        self.backward_on(gpu, saved, &dy, grads)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let labels = |rows: usize, classes: usize, ignored: usize| -> Vec<i32> {
        (0..rows).map(|r| if r % 5 < ignored { -100 } else { (r * 7 % classes) as i32 }).collect()
    };
    let case = |name: &str, rows: usize, columns: usize, ignored: usize, options: CrossEntropyOptions| {
        let classes = options.num_classes.unwrap_or(columns);
        let labels = labels(rows, classes, ignored);
        Case::normal(name, &[&[rows, columns]], move |v| {
            cross_entropy(&v[0], &Tensor::from_vec(labels.clone(), [rows])?, &options)
        })
    };
    let default = CrossEntropyOptions::default;
    let weights = Tensor::from_vec(vec![0.0, 1.0, 2.0, -0.5], [4]).ok();
    // The logits of these are a copy that nobody else holds, and so are overwritten.
    let consuming = |name: &str, rows: usize, columns: usize, ignored: usize, options: CrossEntropyOptions| {
        let classes = options.num_classes.unwrap_or(columns);
        let labels = labels(rows, classes, ignored);
        let shape: &[usize] = &[rows, columns];
        Case::normal(format!("consuming, {name}"), &[shape], move |v| {
            let labels = Tensor::from_vec(labels.clone(), [rows])?;
            cross_entropy_consuming(super::scale(&v[0], 1.0, 0.0)?, &labels, &options)
        })
    };
    vec![
        case("plain", 3, 5, 0, default()),
        case("odd vocabulary", 7, 257, 1, default()),
        case("one class", 2, 1, 0, default()),
        case("padding columns", 6, 64, 2, CrossEntropyOptions { num_classes: Some(33), ..default() }),
        case("smoothing", 6, 31, 1, CrossEntropyOptions { label_smoothing: 0.1, ..default() }),
        case("z-loss", 6, 31, 1, CrossEntropyOptions { z_loss: 0.01, ..default() }),
        case(
            "all ignored",
            4,
            5,
            5,
            CrossEntropyOptions { denominator: Denominator::Fixed(3.0), ..default() },
        ),
        case("row weights", 4, 9, 0, CrossEntropyOptions { row_weights: weights, ..default() }),
        case(
            "a factor",
            6,
            31,
            1,
            CrossEntropyOptions { factor: Some(Tensor::scalar(0.3f32)), ..default() },
        ),
        case(
            "everything",
            11,
            40,
            2,
            CrossEntropyOptions {
                num_classes: Some(37),
                label_smoothing: 0.2,
                z_loss: 0.1,
                denominator: Denominator::Fixed(20.0),
                ..default()
            },
        ),
        consuming("plain", 7, 257, 1, default()),
        consuming("padding columns", 6, 64, 2, CrossEntropyOptions { num_classes: Some(33), ..default() }),
        consuming("a long row", 2, 4104, 0, CrossEntropyOptions { num_classes: Some(4101), ..default() }),
        consuming(
            "everything",
            11,
            40,
            2,
            CrossEntropyOptions {
                num_classes: Some(37),
                label_smoothing: 0.2,
                z_loss: 0.1,
                denominator: Denominator::Fixed(20.0),
                row_weights: Tensor::from_vec((0..11).map(|i| 0.3 * f64::from(i) - 1.0).collect(), [11]).ok(),
                ..default()
            },
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GradStore, ParamStore, Tape};

    fn run(
        logits: Vec<f32>,
        columns: usize,
        labels: Vec<i32>,
        options: &CrossEntropyOptions,
    ) -> Result<(f64, Vec<f32>)> {
        let rows = labels.len();
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let x = tape.leaf(Tensor::from_vec(logits, [rows, columns])?);
        let loss = cross_entropy(&x, &Tensor::from_vec(labels, [rows])?, options)?;
        let value = loss.detach().item()?;
        let grads = tape.backward(&loss, &mut GradStore::new(&params)?)?;
        Ok((value, grads.get(&x).unwrap().to_vec()?))
    }

    #[test]
    fn shape_rule() {
        let error = |columns: usize, labels: Vec<i32>, options: CrossEntropyOptions| {
            run(vec![0.0; columns * labels.len()], columns, labels, &options).unwrap_err().to_string()
        };
        let default = CrossEntropyOptions::default;
        for label in [4, -1, 65535] {
            let message = error(4, vec![0, label], default());
            assert_eq!(message, format!("cross_entropy: labels[1] is {label}, expected 0..4"));
        }
        let message = error(4, vec![3], CrossEntropyOptions { num_classes: Some(3), ..default() });
        assert_eq!(message, "cross_entropy: labels[0] is 3, expected 0..3");
        let message = error(4, vec![-100], default());
        assert_eq!(message, "cross_entropy: labels is all ignored, expected at least one label");
        let message = error(4, vec![0], CrossEntropyOptions { label_smoothing: 1.0, ..default() });
        assert_eq!(message, "cross_entropy: label_smoothing is 1, expected 0 to below 1");
        let message = error(4, vec![0], CrossEntropyOptions { num_classes: Some(5), ..default() });
        assert!(message.starts_with("cross_entropy: num_classes is 5, expected 1 to 4"), "{message}");
        let labels = Tensor::from_vec(vec![0i32; 2], [2]).unwrap();
        let op = CrossEntropy::new(&[3, 4].into(), &labels, &default()).unwrap();
        let message = op.out_shape(&[&[3, 4].into()]).unwrap_err().to_string();
        assert_eq!(
            message,
            "cross_entropy: labels has shape [2], expected the axes of logits [3, 4] but the last"
        );
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("cross_entropy").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("cross_entropy") {
            let options = CrossEntropyOptions {
                ignore_index: case.number("ignore_index") as i32,
                label_smoothing: case.number("label_smoothing"),
                z_loss: case.number("z_loss"),
                denominator: match case.attrs["reduction"].as_str() {
                    Some("mean") => Denominator::ValidTokens,
                    _ => Denominator::Fixed(1.0),
                },
                ..CrossEntropyOptions::default()
            };
            crate::golden::check(&case, |v| cross_entropy(&v[0], case.tensor("labels"), &options), 1e-12);
        }
    }

    /// At 1e4 the f32 next to a logit is 1e-3 away: sums that passed through `lse` would be off by that much.
    #[test]
    fn large_logits_keep_loss_and_gradient() {
        for base in [1e4f32, -1e4] {
            let (loss, dx) =
                run(vec![base + 1.0, base, base - 1.0], 3, vec![1], &Default::default()).unwrap();
            let sum: f64 = [1.0f64, 0.0, -1.0].iter().map(|x| x.exp()).sum();
            assert!((loss - sum.ln()).abs() < 1e-6, "{loss}");
            for (dx, want) in dx.iter().zip([1f64.exp() / sum, 1.0 / sum - 1.0, (-1f64).exp() / sum]) {
                assert!((f64::from(*dx) - want).abs() < 1e-6, "{dx} {want}");
            }
        }
        let (loss, dx) = run(vec![1e4, -1e4], 2, vec![1], &Default::default()).unwrap();
        assert_eq!((loss, dx), (2e4, vec![1.0, -1.0]));
    }

    /// Weights scale rows, each by its own: the same as a weighted sum of row losses.
    #[test]
    fn row_weights_scale_their_own_rows() {
        let logits: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
        let labels = vec![0, 2, 1, 2];
        let fixed = CrossEntropyOptions { denominator: Denominator::Fixed(4.0), ..Default::default() };
        let (_, plain) = run(logits.clone(), 3, labels.clone(), &fixed).unwrap();
        let weights = [0f32, 1.0, 2.0, 4.0];
        let row_weights = Some(Tensor::from_vec(weights.to_vec(), [4]).unwrap());
        let (loss, dx) =
            run(logits.clone(), 3, labels.clone(), &CrossEntropyOptions { row_weights, ..fixed })
                .unwrap();
        for (row, weight) in weights.iter().enumerate() {
            let (dx, plain) = (&dx[3 * row..][..3], &plain[3 * row..][..3]);
            assert!(dx.iter().zip(plain).all(|(dx, plain)| (dx - weight * plain).abs() < 1e-7));
        }
        let one_row = |r: usize| run(logits[3 * r..][..3].to_vec(), 3, vec![labels[r]], &Default::default());
        let sum: f64 = (0..4).map(|r| one_row(r).unwrap().0 * f64::from(weights[r])).sum();
        assert!((loss - sum / 4.0).abs() < 1e-6);
    }

    /// Where the target is nearly certain, `p - 1` must keep its relative precision.
    #[test]
    fn a_confident_target_keeps_its_gradient() {
        for margin in [4.0f32, 8.0, 12.0, 20.0] {
            let (_, dx) = run(vec![margin, 0.0], 2, vec![0], &CrossEntropyOptions::default()).unwrap();
            let exact = -1.0 / (1.0 + f64::from(margin).exp());
            // A few roundings, whatever the margin.
            let tolerance = f64::from(4.0 * f32::EPSILON);
            for (got, want) in [(dx[0], exact), (dx[1], -exact)] {
                assert!((f64::from(got) / want - 1.0).abs() < tolerance, "margin {margin}: {got} {want}");
            }
        }
    }

    #[test]
    fn ignored_rows_and_padding_columns_are_exactly_zero() {
        let options = CrossEntropyOptions { num_classes: Some(2), ..Default::default() };
        let (loss, dx) =
            run(vec![1.0, 2.0, 1e9, 5.0, 6.0, f32::INFINITY], 3, vec![1, -100], &options).unwrap();
        assert!((loss - (1.0 + f64::exp(-1.0)).ln()).abs() < 1e-6);
        assert_eq!([dx[2], dx[3], dx[4], dx[5]], [0.0; 4]);
        assert!(dx[0] > 0.0 && dx[1] < 0.0);
    }

    #[test]
    fn unequal_micro_batches_add_up_to_the_large_batch() {
        let logits: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
        let labels = vec![0, -100, 2, -100];
        let (whole, dx) = run(logits.clone(), 3, labels.clone(), &CrossEntropyOptions::default()).unwrap();
        let fixed = CrossEntropyOptions { denominator: Denominator::Fixed(2.0), ..Default::default() };
        let parts: Vec<_> = (0..2)
            .map(|i| {
                run(logits[6 * i..6 * i + 6].to_vec(), 3, labels[2 * i..2 * i + 2].to_vec(), &fixed).unwrap()
            })
            .collect();
        assert!((whole - parts[0].0 - parts[1].0).abs() < 1e-6);
        assert_eq!(dx, [parts[0].1.clone(), parts[1].1.clone()].concat());
    }
}
