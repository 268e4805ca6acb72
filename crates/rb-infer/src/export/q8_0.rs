//! The block format `Q8_0` of ggml: 32 values are a half-precision step and 32 bytes.

use half::f16;

/// Values of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block.
pub const BLOCK_BYTES: usize = 2 + BLOCK;

/// The blocks of `values`, whose number is a multiple of [`BLOCK`].
///
/// The step is the largest magnitude divided by 127; values are divided by the step in single precision and rounded, ties
/// away from zero, as ggml's reference does.
pub fn quantise(values: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len() / BLOCK * BLOCK_BYTES);
    for block in values.as_chunks::<BLOCK>().0 {
        let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        let step = most / 127.0;
        let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
        out.extend(f16::from_f32(step).to_le_bytes());
        out.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use rb_tensor::Rng;

    #[test]
    fn values_come_back_within_half_a_step() {
        let mut rng = Rng::new(1);
        let values: Vec<f32> =
            (0..8 * BLOCK).map(|i| (rng.normal() * f64::from(1u32 << (i / 64))) as f32).collect();
        let bytes = quantise(&values);
        assert_eq!(bytes.len(), 8 * BLOCK_BYTES);
        for (block, values) in bytes.chunks(BLOCK_BYTES).zip(values.chunks(BLOCK)) {
            let step = f16::from_le_bytes([block[0], block[1]]).to_f32();
            let most = values.iter().fold(0f32, |m, x| m.max(x.abs()));
            assert!((step - most / 127.0).abs() <= step / 1024.0);
            for (&byte, &value) in block[2..].iter().zip(values) {
                // The step itself is rounded to half precision.
                let back = f32::from(byte as i8) * step;
                assert!((back - value).abs() <= 0.5 * step + value.abs() / 1024.0, "{value} became {back}");
            }
        }
    }

    #[test]
    fn zeros_and_ties() {
        assert_eq!(quantise(&[0.0; BLOCK]), [0; BLOCK_BYTES]);
        let mut values = [0.0f32; BLOCK];
        (values[0], values[1], values[2]) = (127.0, 2.5, -2.5);
        let bytes = quantise(&values);
        assert_eq!(bytes[2..5], [127, 3, -3i8 as u8]);
    }
}
