//! Cross entropy of scores against labels, as one scalar.
//!
//! - **Computes** with `lse = log(sum(exp(logits)))` over the `K` classes and `s` the smoothing: for each row with a
//!   label, `(1-s) (lse - logits[label]) + s (lse - mean(logits)) + z lse^2`, times its weight; the sum over rows is
//!   divided by the denominator.
//! - **Shapes** `logits [.., V]`, `labels [..]` (i32), optional `row_weights [..]` -> scalar.
//! - **Dtypes** `logits` any float type; row losses are summed in f64 in row order.
//! - **Backward** with `p = softmax(logits)`, `t = (1-s) onehot + s/K`:
//!   `dlogits = dy * weight / denominator * (p - t + 2 z lse p)`; exactly zero in rows without a label and in columns
//!   that are not classes. `p[label] - 1` is minus the sum of the other `p`.
//! - **Saves** `logits` (shared) and `lse [..]`.
//! - **Errors** `IndexOutOfRange` for a label that is neither a class nor `ignore_index`; `Argument` for options out of
//!   range, or for no label at all with [`Denominator::ValidTokens`]; `ShapeError` for `labels` of another shape.
//! - **Source** PyTorch `torch.nn.functional.cross_entropy`; arXiv:2204.02311, section 5, for the z-loss.

use rb_tensor::{DType, Shape, ShapeError, Tensor};

use super::shared::softmax;
use crate::host;
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, ParamStore, Result, Tape, Var, apply, saved};

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
        }
    }
}

/// The cross entropy between `logits [.., V]` and `labels [..]` (i32), as a scalar.
pub fn cross_entropy<'t>(
    logits: &Var<'t>,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Var<'t>> {
    apply(CrossEntropy::new(logits.shape(), labels, options)?, &[logits])
}

/// The loss of each row in nats (0 where the label is ignored), without weights or denominator: for
/// evaluation.
pub fn row_losses(logits: &Tensor, labels: &Tensor, options: &CrossEntropyOptions) -> Result<Vec<f64>> {
    let options = CrossEntropyOptions {
        denominator: Denominator::Fixed(1.0),
        row_weights: None,
        ..options.clone()
    };
    let rows = logits.shape().rows();
    let flat = logits.reshape([rows, logits.shape().last()])?;
    let labels = labels.reshape([rows])?;
    let params = ParamStore::empty();
    (0..rows)
        .map(|r| {
            let tape = Tape::inference(&params);
            let row = tape.constant(flat.narrow(r, 1)?);
            Ok(cross_entropy(&row, &labels.narrow(r, 1)?, &options)?.detach().item()?)
        })
        .collect()
}

struct CrossEntropy {
    labels: Tensor,
    weights: Option<Vec<f64>>,
    classes: usize,
    ignore_index: i32,
    smoothing: f64,
    z_loss: f64,
    denominator: f64,
}

saved!(
    struct CrossEntropySaved { logits, lse }
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
        let ids = labels.as_slice::<i32>()?;
        let bad = |&l: &i32| l != options.ignore_index && usize::try_from(l).map_or(true, |l| l >= classes);
        if let Some(position) = ids.iter().position(bad) {
            let index = i64::from(ids[position]);
            let (op, argument) = (Self::NAME, "labels");
            return Err(AutogradError::IndexOutOfRange { op, argument, position, index, bound: classes });
        }
        let valid = ids.iter().filter(|&&l| l != options.ignore_index).count();
        let denominator = match options.denominator {
            Denominator::Fixed(n) if n.is_finite() && n > 0.0 => n,
            Denominator::Fixed(n) => return argument("denominator", n.to_string(), "a finite number above 0"),
            Denominator::ValidTokens if valid > 0 => valid as f64,
            Denominator::ValidTokens => return argument("labels", "all ignored".into(), "at least one label"),
        };
        let weights = match &options.row_weights {
            None => None,
            Some(w) if w.shape() == labels.shape() => Some(w.to_dtype(DType::F64).to_vec()?),
            Some(w) => return Err(ShapeError::new(Self::NAME, "row_weights", w.shape(), labels.shape()).into()),
        };
        Ok(CrossEntropy {
            labels: labels.clone(),
            weights,
            classes,
            ignore_index: options.ignore_index,
            smoothing: options.label_smoothing,
            z_loss: options.z_loss,
            denominator,
        })
    }

    fn weight(&self, row: usize) -> f64 {
        self.weights.as_ref().map_or(1.0, |w| w[row])
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

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _: &Shape) -> Result<(Tensor, CrossEntropySaved)> {
        let (x, labels) = (inputs[0].as_slice::<T>()?, self.labels.as_slice::<i32>()?);
        let columns = inputs[0].shape().last();
        // Two columns of results a row: lse (saved) and the loss.
        let mut results = vec![T::ZERO; 2 * labels.len()];
        host::par_row_groups(&mut results, 2, columns, |row, result| {
            let label = labels[row];
            if label == self.ignore_index {
                return;
            }
            let x = &x[row * columns..][..self.classes];
            let max = softmax::max(x);
            let shift = softmax::shift(max);
            let lse = softmax::exp_sum(x, shift).ln() + shift;
            let mut loss = lse - x[label as usize];
            if self.smoothing != 0.0 {
                let even = lse - softmax::sum(x) / T::from_f64(self.classes as f64);
                loss = T::from_f64(1.0 - self.smoothing) * loss + T::from_f64(self.smoothing) * even;
            }
            if self.z_loss != 0.0 {
                loss += T::from_f64(self.z_loss) * lse * lse;
            }
            (result[0], result[1]) = (lse, loss);
        });
        let terms = results.chunks(2).enumerate().map(|(row, r)| r[1].to_f64() * self.weight(row));
        let loss = T::from_f64(terms.sum::<f64>() / self.denominator);
        let lse: Vec<T> = results.chunks(2).map(|r| r[0]).collect();
        let lse = Tensor::from_vec(lse, self.labels.shape().clone())?;
        Ok((Tensor::scalar(loss), CrossEntropySaved { logits: inputs[0].clone(), lse }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: CrossEntropySaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let CrossEntropySaved { mut logits, lse } = saved;
        let (labels, lse) = (self.labels.as_slice::<i32>()?, lse.as_slice::<T>()?);
        let columns = logits.shape().last();
        let dy = dy.as_slice::<T>()?[0].to_f64() / self.denominator;
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
            let others = softmax::exp_in_place(classes, lse[row]);
            let factor = T::from_f64(dy * self.weight(row));
            let z = T::from_f64(2.0 * self.z_loss) * lse[row];
            let even = T::from_f64(self.smoothing / self.classes as f64);
            for p in classes.iter_mut() {
                *p = (*p * (T::ONE + z) - even) * factor;
            }
            let own = (z + T::from_f64(self.smoothing) - others * (T::ONE + z) - even) * factor;
            classes[label as usize] = own;
        };
        if let Some(values) = logits.as_mut_slice::<T>() {
            host::par_rows(values, columns, differentiate);
            return grads.add(0, logits);
        }
        let mut values = logits.to_vec::<T>()?;
        host::par_rows(&mut values, columns, differentiate);
        grads.add(0, Tensor::from_vec(values, logits.shape().clone())?)
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
    vec![
        case("plain", 3, 5, 0, default()),
        case("odd vocabulary", 7, 257, 1, default()),
        case("one class", 2, 1, 0, default()),
        case("padding columns", 6, 64, 2, CrossEntropyOptions { num_classes: Some(33), ..default() }),
        case("smoothing", 6, 31, 1, CrossEntropyOptions { label_smoothing: 0.1, ..default() }),
        case("z-loss", 6, 31, 1, CrossEntropyOptions { z_loss: 0.01, ..default() }),
        case("all ignored", 4, 5, 5, CrossEntropyOptions { denominator: Denominator::Fixed(3.0), ..default() }),
        case("row weights", 4, 9, 0, CrossEntropyOptions { row_weights: weights, ..default() }),
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
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GradStore;

    fn run(logits: Vec<f32>, columns: usize, labels: Vec<i32>, options: &CrossEntropyOptions) -> Result<(f64, Vec<f32>)> {
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
        assert_eq!(message, "cross_entropy: labels has shape [2], expected the axes of logits [3, 4] but the last");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("cross_entropy").unwrap();
    }

    /// Where the target is nearly certain, `p - 1` must keep its relative precision.
    #[test]
    fn a_confident_target_keeps_its_gradient() {
        for margin in [4.0f32, 8.0, 12.0, 20.0] {
            let (_, dx) = run(vec![margin, 0.0], 2, vec![0], &CrossEntropyOptions::default()).unwrap();
            let exact = -1.0 / (1.0 + f64::from(margin).exp());
            // lse is rounded to f32, which moves every p by half an ulp of lse, relatively.
            let tolerance = f64::from(f32::EPSILON * margin);
            for (got, want) in [(dx[0], exact), (dx[1], -exact)] {
                assert!((f64::from(got) / want - 1.0).abs() < tolerance, "margin {margin}: {got} {want}");
            }
        }
    }

    #[test]
    fn ignored_rows_and_padding_columns_are_exactly_zero() {
        let options = CrossEntropyOptions { num_classes: Some(2), ..Default::default() };
        let (loss, dx) = run(vec![1.0, 2.0, 1e9, 5.0, 6.0, f32::INFINITY], 3, vec![1, -100], &options).unwrap();
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
        let parts: Vec<_> =
            (0..2).map(|i| run(logits[6 * i..6 * i + 6].to_vec(), 3, labels[2 * i..2 * i + 2].to_vec(), &fixed).unwrap()).collect();
        assert!((whole - parts[0].0 - parts[1].0).abs() < 1e-6);
        assert_eq!(dx, [parts[0].1.clone(), parts[1].1.clone()].concat());
    }

    #[test]
    fn row_losses_are_the_rows() {
        let logits = Tensor::from_vec(vec![0f32, 1.0, 2.0, 0.0], [2, 2]).unwrap();
        let labels = Tensor::from_vec(vec![1, -100], [2]).unwrap();
        let rows = row_losses(&logits, &labels, &CrossEntropyOptions::default()).unwrap();
        assert!((rows[0] - (1.0 + f64::exp(-1.0)).ln()).abs() < 1e-6 && rows[1] == 0.0);
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("cross_entropy") {
            let valid = case.number("valid_rows");
            let denominator = match case.attrs["reduction"].as_str() {
                Some("sum") => Denominator::Fixed(1.0),
                _ => Denominator::Fixed(valid),
            };
            let options = CrossEntropyOptions {
                ignore_index: case.number("ignore_index") as i32,
                label_smoothing: case.number("label_smoothing"),
                z_loss: case.attrs["z_loss"].as_f64().unwrap_or(0.0),
                denominator,
                ..Default::default()
            };
            crate::golden::check(&case, |v| cross_entropy(&v[0], case.tensor("labels"), &options), 1e-11);
        }
    }
}
