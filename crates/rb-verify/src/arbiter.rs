//! The gradient-flow arbiter.
//!
//! The list of what must have a gradient is the parameter registry itself, never what backward happened to
//! produce, and its length is part of the result.

use rb_autograd::{GradStore, Layout, ParamStore};
use rb_tensor::{DType, Device, Tensor};

use crate::{Check, Result};

/// Norm that a gradient must exceed. Far below any gradient that moves a weight (an f32 weight of order 0.02
/// has an ulp of 2e-9), far above rounding noise of an exact zero, which is zero.
pub const GRADIENT_FLOOR: f64 = 1e-12;

/// Checks after a backward pass that each trainable part has a gradient that is present, finite and above
/// [`GRADIENT_FLOOR`].
pub fn gradient_flow(params: &ParamStore, grads: &GradStore) -> Result<Check> {
    let (mut bad, mut seen, mut smallest) = (Vec::new(), 0, (f64::INFINITY, String::new()));
    for (_, part) in params.layout().parts().filter(|(e, _)| e.trainable) {
        seen += 1;
        match grads.part(&part.name)? {
            None => bad.push(format!("{} has none", part.name)),
            Some(grad) => match norm(&grad)? {
                n if !n.is_finite() => bad.push(format!("{} is not finite", part.name)),
                n if n <= GRADIENT_FLOOR => bad.push(format!("{} has norm {n:e}", part.name)),
                n if n < smallest.0 => smallest = (n, part.name.clone()),
                _ => {}
            },
        }
    }
    let frozen = match params.layout().parts().count() - seen {
        0 => String::new(),
        count => format!(", {count} more are frozen"),
    };
    let detail = match (seen, bad.is_empty()) {
        (0, _) => "the model has no trainable parameter".to_string(),
        (_, true) => {
            format!(
                "{seen} of {seen} gradients flow, smallest norm {:.1e} ({}){frozen}",
                smallest.0, smallest.1
            )
        }
        (_, false) => format!("{} of {seen} gradients do not flow: {}", bad.len(), bad.join(", ")),
    };
    Ok(Check::new("gradient flow", seen > 0 && bad.is_empty(), detail))
}

/// Checks that every trainable part differs from `before` and every frozen one does not.
pub fn moved_after_step(layout: &Layout, before: &[(String, Tensor)], params: &ParamStore) -> Result<Check> {
    let mut bad = Vec::new();
    for (name, old) in before {
        let (new, old) = (params.part(name)?.to_device(Device::Cpu)?, old.to_device(Device::Cpu)?);
        let moved = new.as_bytes()? != old.as_bytes()?;
        let trainable = layout.parts().any(|(e, p)| e.trainable && p.name == *name);
        match (trainable, moved) {
            (true, false) => bad.push(format!("{name} did not move")),
            (false, true) => bad.push(format!("{name} is frozen and moved")),
            _ => {}
        }
    }
    let complete = before.len() == layout.parts().count();
    let detail = match (bad.is_empty(), complete) {
        (true, true) => format!("{} parameters checked after one step", before.len()),
        (_, false) => format!("{} of {} parameters were compared", before.len(), layout.parts().count()),
        _ => bad.join(", "),
    };
    Ok(Check::new("optimizer moves parameters", bad.is_empty() && complete, detail))
}

fn norm(tensor: &Tensor) -> Result<f64> {
    let wide = tensor.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
    Ok(wide.as_slice::<f64>()?.iter().map(|x| x * x).sum::<f64>().sqrt())
}
