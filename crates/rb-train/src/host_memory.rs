//! Whether a run on the CPU can fit into the memory of the machine at all.

use rb_tensor::Device;

use crate::config::Config;
use crate::{Result, TrainError};

/// Bytes of a parameter: weight, gradient and the two moments of AdamW, in fp32.
const PARAMETER_BYTES: f64 = 16.0;
/// Bytes of an activation.
const ACTIVATION_BYTES: f64 = 4.0;
const GIB: f64 = (1u64 << 30) as f64;

/// Refuses a config for the CPU that needs more than all memory of the machine: the system would end such a run in the
/// middle, or stand still. Where the size of the memory is unknown nothing is refused; a run on a GPU has a plan.
///
/// # Errors
/// [`TrainError::Config`] with what is needed at least, what there is and what to lower.
pub(crate) fn check(config: &Config, device: Device) -> Result<()> {
    if device != Device::Cpu {
        return Ok(());
    }
    let Some(total) = total_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()) else {
        return Ok(());
    };
    refuse(config, total).map_or(Ok(()), |reason| Err(TrainError::Config { origin: "model".into(), reason }))
}

fn refuse(config: &Config, total: f64) -> Option<String> {
    let (parameters, activations) = (num_parameters(config), num_activations(config));
    let needed = parameters * PARAMETER_BYTES + activations * ACTIVATION_BYTES;
    (needed > total).then(|| {
        format!(
            "a step needs at least {:.1} GiB of memory ({:.1} million parameters with gradients and optimizer state, \
             {:.1} million activations) and this machine has {:.1} GiB; make the model smaller, or lower \
             train.per_device_train_batch_size or train.seq_len",
            needed / GIB,
            parameters / 1e6,
            activations / 1e6,
            total / GIB
        )
    })
}

/// In floating point, where absurd sizes do not overflow.
fn num_parameters(config: &Config) -> f64 {
    let m = &config.model;
    let [c, f, d] = [m.hidden_size, m.intermediate_size, m.head_dim()].map(|n| n as f64);
    let heads = m.num_attention_heads as f64 + m.kv_heads() as f64;
    let layer = 2.0 * heads * d * c + 3.0 * c * f;
    let tables = if m.tie_word_embeddings { 1.0 } else { 2.0 };
    m.num_hidden_layers as f64 * layer + tables * vocabulary(config) * c
}

/// What even recomputation keeps: the input of each layer, the widest part of one, and the logits.
fn num_activations(config: &Config) -> f64 {
    let (m, t) = (&config.model, &config.train);
    let row = m.num_hidden_layers as f64 * m.hidden_size as f64
        + 2.0 * m.intermediate_size as f64
        + vocabulary(config);
    t.per_device_train_batch_size as f64 * t.seq_len as f64 * row
}

/// Entries at least: a text may give fewer than were asked for, but not fewer than its bytes.
fn vocabulary(config: &Config) -> f64 {
    if config.model.vocab_size > 0 { config.model.vocab_size as f64 } else { 257.0 }
}

/// Reads the line `MemTotal:   16384 kB`.
fn total_bytes(meminfo: &str) -> Option<f64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_machine_is_read() {
        assert_eq!(total_bytes("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some((16384 * 1024) as f64));
        assert_eq!(total_bytes(""), None);
    }

    #[test]
    fn what_cannot_fit_is_refused_and_what_can_is_not() {
        let config = |text: &str| -> Config { toml::from_str(text).unwrap() };
        let model = |layers: usize| {
            config(&format!(
                "[model]\nhidden_size = 192\nintermediate_size = 512\nnum_hidden_layers = {layers}\n\
                 num_attention_heads = 6\nnum_key_value_heads = 2\nmax_position_embeddings = 128\n\
                 tie_word_embeddings = true\n[train]\nseq_len = 128\n"
            ))
        };
        // Of 8 layers: 8 * (2 * 8 * 32 * 192 + 3 * 192 * 512) + 257 * 192 parameters, and
        // 8 * 128 * (8 * 192 + 1024 + 257) activations.
        let needed = f64::from(3_195_072 * 16 + 2_884_608 * 4);
        assert_eq!(refuse(&model(8), needed), None);
        let reason = refuse(&model(8), needed - 1.0).unwrap();
        assert!(reason.contains("3.2 million parameters"), "{reason}");
        assert!(refuse(&model(1_000_000), 1024.0 * GIB).unwrap().contains("make the model smaller"));
    }
}
