//! Clipping by the global norm.

/// The factor that brings gradients of global norm `norm` down to `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`. A `max_norm` of 0 turns clipping off. A norm that is not finite gives
/// NaN, which every optimizer refuses; callers report it first.
///
/// **Source** `torch.nn.utils.clip_grad_norm_`, its 1e-6 included.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    if !norm.is_finite() {
        return f64::NAN;
    }
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_torch_and_never_hides_a_bad_norm() {
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(1.0, 1.0), 1.0 / 1.000001);
        assert_eq!(clip_coefficient(10.0, 2.0), 2.0 / 10.000001);
        assert_eq!(clip_coefficient(10.0, 0.0), 1.0);
        assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
        assert!(clip_coefficient(f64::INFINITY, 1.0).is_nan());
        assert!(clip_coefficient(f64::NAN, 0.0).is_nan());
    }
}
