//! FLOP counts, with their formula.

use crate::LlamaConfig;

/// FLOP of one token in training: forward and backward, without recomputation.
///
/// `6 N + 6 L T H D`: `N` counts the parameters that take part in matrix products (the embedding once, as the
/// output product, tied or not), and the second term is causal attention, half of the full square.
/// **Source** arXiv:2204.02311, appendix B, with the causal half as in llm.c.
pub fn flops_per_token(config: &LlamaConfig, seq_len: usize) -> f64 {
    let (c, f, d) = (config.hidden_size as f64, config.intermediate_size as f64, config.head_dim() as f64);
    let (h, g) = (config.num_attention_heads as f64, config.kv_heads() as f64);
    let layers = config.num_hidden_layers as f64;
    let layer = c * (h + 2.0 * g) * d + h * d * c + 3.0 * c * f;
    let products = layers * layer + config.vocab_size as f64 * c;
    6.0 * products + 6.0 * layers * seq_len as f64 * h * d
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
}
