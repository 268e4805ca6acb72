//! Steps that are captured once and replayed, against steps launched piece by piece.

use rb_autograd::ops::cross_entropy::Denominator;
use rb_cuda::Graph;
use rb_tensor::Arena;

use super::*;

const STEPS: usize = 50;

/// Weights, optimizer state and losses of both kinds of steps have the same bits.
pub(super) fn captured(gpu: Gpu, precision: Precision) -> Result<Check> {
    let training = Training::new(Device::Cuda(gpu), precision);
    let (losses, pieces) = training.run(0, STEPS, None)?;
    let (replayed, whole, nodes) = run(&training, gpu)?;
    let same = equal(&pieces, &whole)? && losses == replayed;
    let detail = format!(
        "{STEPS} steps, a graph of {nodes} nodes, last loss {:.4}: {}",
        replayed.last().copied().unwrap_or(f64::NAN),
        if same { "same bits" } else { "other bits" }
    );
    Ok(Check::new(format!("device: {} captured bit for bit", name_of(precision)), same, detail))
}

/// As [`Training::run`] with all steps but the first captured.
fn run(training: &Training, gpu: Gpu) -> Result<(Vec<f64>, Snapshot, usize)> {
    let config = &training.config;
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(config, &mut builder)?;
    let mut params = builder.build(&Rng::new(1), Device::Cpu)?.to_device(training.device)?;
    params.set_precision(training.precision)?;
    let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
    let mut grads = GradStore::new(&params)?;
    let shape = rows(config, 0)?.0.shape().clone();
    let n = shape.numel();
    let mut batch = Arena::zeros("batch", 3 * n, DType::I32, training.device)?;
    let positions: Vec<i32> = (0..n).map(|i| (i % shape[1]) as i32).collect();
    batch.write(2 * n, &Tensor::from_vec(positions, shape.clone())?)?;
    let mut losses = Vec::new();
    let mut graph: Option<(Graph, Tensor)> = None;
    for step in 0..STEPS {
        let (ids, labels) = rows(config, step % 4)?;
        batch.write(0, &ids)?;
        batch.write(n, &labels)?;
        adam.set_rate(LEARNING_RATE)?;
        let mut enqueue = || -> Result<Tensor> {
            let options =
                CrossEntropyOptions { denominator: Denominator::Fixed(n as f64), ..Default::default() };
            let loss = {
                let tape = Tape::new(&params);
                let input = ModelInput {
                    position_ids: Some(batch.view(2 * n, shape.clone())?),
                    ..ModelInput::causal(batch.view(0, shape.clone())?)
                };
                let loss = model.loss(&tape, &input, &batch.view(n, shape.clone())?, &options)?;
                tape.backward(&loss, &mut grads)?;
                loss.detach()
            };
            adam.rated_step(&mut params, &mut grads, 1.0, &loss)?;
            Ok(loss)
        };
        if step == 1 {
            graph = Some(gpu.capture(enqueue)?);
        } else if graph.is_none() {
            losses.push(enqueue()?.item()?);
            continue;
        }
        if let Some((graph, loss)) = &graph {
            graph.launch().map_err(rb_tensor::TensorError::from)?;
            losses.push(loss.item()?);
        }
    }
    let nodes = graph.as_ref().map_or(0, |(graph, _)| graph.nodes());
    Ok((losses, snapshot(&params, &adam)?, nodes))
}
