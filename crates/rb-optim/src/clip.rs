//! Clipping by the global norm.

/// The factor for all gradients that brings a global norm of `norm` down to `max_norm`: at most 1.
///
/// **Source** `torch.nn.utils.clip_grad_norm_`: `max_norm / (norm + 1e-6)`, capped at 1.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_torch() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(4.0, 1.0), 1.0 / (4.0 + 1e-6));
    }
}
