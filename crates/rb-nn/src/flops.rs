//! FLOP and parameter counts, with their formulas.

use crate::LlamaConfig;

/// Elements of all named parameters: padding rows are not counted, a tied table is counted once.
pub fn num_parameters(config: &LlamaConfig) -> usize {
    let (c, layers) = (config.hidden_size, config.num_hidden_layers);
    let (q, kv) = (config.num_attention_heads * config.head_dim(), config.kv_heads() * config.head_dim());
    let bias = if config.attention_bias { q + 2 * kv + c } else { 0 };
    let qk_norm = if config.use_qk_norm { 2 * config.head_dim() } else { 0 };
    let head = if config.tie_word_embeddings { 0 } else { config.vocab_size * c };
    product_elements(config) + head + layers * (2 * c + bias + qk_norm) + c
}

/// FLOP of one token in training: forward and backward, without recomputation.
///
/// `6 N + 6 L T H D`. `N` counts the elements of the matrices a token is multiplied with: q, k, v, o, gate, up
/// and down of each layer, and the output product, tied or not (reading the embedding multiplies nothing).
/// The second term is causal attention: `q k^T` and `p v` take `4 T H D` forward and twice that backward for
/// each layer, and half of it lies below the diagonal; the convention without that half has `12 L T H D`.
/// A sliding window of `W` tokens leaves `W - W^2 / 2T` of the `T / 2` tokens that a token sees in the mean.
/// Norms, rotation, activation, softmax and loss are left out.
/// **Source** arXiv:2204.02311, appendix B, with the causal half as in llm.c.
pub fn flops_per_token(config: &LlamaConfig, seq_len: usize) -> f64 {
    let (len, window) = (seq_len as f64, config.sliding_window.unwrap_or(seq_len).min(seq_len) as f64);
    let seen = if len == 0.0 { 0.0 } else { window - window * window / (2.0 * len) };
    let width = config.num_hidden_layers * config.num_attention_heads * config.head_dim();
    6.0 * product_elements(config) as f64 + 12.0 * seen * width as f64
}

/// Elements of all matrices, the vocabulary counted once.
fn product_elements(config: &LlamaConfig) -> usize {
    let c = config.hidden_size;
    let (q, kv) = (config.num_attention_heads * config.head_dim(), config.kv_heads() * config.head_dim());
    config.num_hidden_layers * (c * (2 * q + 2 * kv) + 3 * c * config.intermediate_size)
        + config.vocab_size * c
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;

    #[test]
    fn the_benchmark_model() {
        let mut config = tiny(32004, 12, 4);
        (config.hidden_size, config.num_hidden_layers, config.intermediate_size) = (768, 16, 1408);
        // 6 x 101.65 M + 6 x 16 x 1024 x 768 = 685.4 MFLOP (norm weights take no part in products).
        let flops = flops_per_token(&config, 1024);
        assert!((flops / 1e6 - 685.2).abs() < 0.3, "{flops}");
    }

    #[test]
    fn counts_worked_out_by_hand() {
        let mut config = tiny(100, 4, 2);
        (config.hidden_size, config.head_dim, config.num_hidden_layers) = (16, Some(6), 3);
        config.intermediate_size = 40;
        // q 24x16, k and v 12x16, o 16x24, three of 40x16, two norms; then one table and the last norm.
        let layer = 24 * 16 + 2 * 12 * 16 + 16 * 24 + 3 * 40 * 16;
        assert_eq!(num_parameters(&config), 3 * (layer + 32) + 1600 + 16);
        assert_eq!(flops_per_token(&config, 50), 6.0 * (3 * layer + 1600 + 3 * 50 * 24) as f64);
        // Each of 50 tokens sees 20 - 400 / 100 in the mean.
        let windowed = LlamaConfig { sliding_window: Some(20), ..config.clone() };
        assert_eq!(flops_per_token(&windowed, 50), 6.0 * (3 * layer + 1600 + 2 * 3 * 16 * 24) as f64);
        assert_eq!(flops_per_token(&windowed, 20), flops_per_token(&config, 20));
        let untied = LlamaConfig { tie_word_embeddings: false, ..config.clone() };
        assert_eq!(num_parameters(&untied), num_parameters(&config) + 1600);
        assert_eq!(flops_per_token(&untied, 50), flops_per_token(&config, 50));
    }
}
