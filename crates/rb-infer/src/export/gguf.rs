//! GGUF files for llama.cpp.
//!
//! **Source** the format, version 3, in the documentation of ggml; names of keys and tensors, and the order of the rows of
//! queries and keys, as llama.cpp's converter of Hugging Face folders writes them.

use std::io::{BufWriter, Write};
use std::path::Path;

use half::f16;
use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::{LlamaConfig, RopeScaling, rope_table};
use rb_tensor::{DType, Device};

use super::gguf_tokenizer::Vocabulary;
use super::{ExportError, q8_0};

const VERSION: u32 = 3;
/// Tensors begin at multiples of this, in bytes.
const ALIGNMENT: usize = 32;

/// Element type of the matrices; vectors are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufFormat {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// 32 values in 34 bytes; a matrix whose rows are not multiples of 32 is stored in half precision.
    Q8_0,
}

impl GgufFormat {
    /// The number of `general.file_type`.
    fn file_type(self) -> u32 {
        match self {
            GgufFormat::F32 => 0,
            GgufFormat::F16 => 1,
            GgufFormat::Q8_0 => 7,
        }
    }

    /// The format of a tensor with rows of `columns` elements.
    fn of(self, rank: usize, columns: usize) -> GgufFormat {
        match self {
            _ if rank < 2 => GgufFormat::F32,
            GgufFormat::Q8_0 if !columns.is_multiple_of(q8_0::BLOCK) => GgufFormat::F16,
            other => other,
        }
    }

    /// ggml's number of the element type.
    fn type_number(self) -> u32 {
        match self {
            GgufFormat::F32 => 0,
            GgufFormat::F16 => 1,
            GgufFormat::Q8_0 => 8,
        }
    }

    fn size_bytes(self, numel: usize) -> usize {
        match self {
            GgufFormat::F32 => 4 * numel,
            GgufFormat::F16 => 2 * numel,
            GgufFormat::Q8_0 => numel / q8_0::BLOCK * q8_0::BLOCK_BYTES,
        }
    }

    fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            GgufFormat::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            GgufFormat::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            GgufFormat::Q8_0 => q8_0::quantise(values),
        }
    }
}

/// Writes a model as one GGUF file. Returns what the user should know about the tokenizer.
///
/// # Errors
/// [`ExportError::Unsupported`]: llama.cpp's architectures lack a sliding window in every layer, a cap of scores, and
/// biases beside QK-norm, and its tokenizers are byte-level BPE here; weights that are not finite; a full or read-only
/// disk. An older file is then untouched.
pub fn save_gguf(
    config: &LlamaConfig,
    params: &ParamStore,
    tokenizer: &Tokenizer,
    name: &str,
    target: &Path,
    format: GgufFormat,
) -> Result<Option<String>, ExportError> {
    let architecture = architecture(config)?;
    let vocabulary = Vocabulary::new(tokenizer, config.vocab_size)?;
    let mut keys = Keys::default();
    describe(&mut keys, config, architecture, name, format);
    describe_tokenizer(&mut keys, config, tokenizer, &vocabulary);
    let tensors = tensors(config, params, format)?;
    rb_data::atomic::replace::<ExportError>(target, |out| {
        let put = |out: &mut BufWriter<_>, bytes: &[u8]| {
            out.write_all(bytes).map_err(super::io_error(target, "writing"))
        };
        let mut head = b"GGUF".to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        head.extend(keys.count.to_le_bytes());
        head.extend(&keys.bytes);
        let mut offset = 0usize;
        for tensor in &tensors {
            head.extend(text(&tensor.name));
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            // The innermost axis comes first.
            tensor.dims.iter().rev().for_each(|&n| head.extend((n as u64).to_le_bytes()));
            head.extend(tensor.format.type_number().to_le_bytes());
            head.extend((offset as u64).to_le_bytes());
            offset += tensor.size_bytes().next_multiple_of(ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
        put(out, &head)?;
        for tensor in &tensors {
            let mut bytes = tensor.encode(params, config)?;
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
            put(out, &bytes)?;
        }
        Ok(())
    })?;
    Ok(vocabulary.note())
}

/// llama.cpp's name of what the model computes.
fn architecture(config: &LlamaConfig) -> Result<&'static str, ExportError> {
    let refuse = |reason: String| Err(ExportError::Unsupported { what: "the model", reason });
    if let Some(window) = config.sliding_window {
        return refuse(format!(
            "sliding_window is {window}, which llama.cpp does not compute in this architecture"
        ));
    }
    if let Some(cap) = config.attn_logit_softcapping {
        return refuse(format!(
            "attn_logit_softcapping is {cap}, which llama.cpp does not compute in this architecture"
        ));
    }
    match (config.use_qk_norm, config.attention_bias) {
        (false, _) => Ok("llama"),
        (true, false) => Ok("qwen3"),
        (true, true) => {
            refuse("use_qk_norm with attention_bias, for which llama.cpp has no architecture".into())
        }
    }
}

/// Key and value pairs in the bytes of the file.
#[derive(Default)]
struct Keys {
    count: u64,
    bytes: Vec<u8>,
}

/// Numbers of the types of values.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

impl Keys {
    fn add(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        self.bytes.extend(text(key));
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn u32(&mut self, key: &str, value: usize) {
        self.add(key, U32, &(value as u32).to_le_bytes());
    }

    fn f32(&mut self, key: &str, value: f64) {
        self.add(key, F32, &(value as f32).to_le_bytes());
    }

    fn bool(&mut self, key: &str, value: bool) {
        self.add(key, BOOL, &[u8::from(value)]);
    }

    fn string(&mut self, key: &str, value: &str) {
        self.add(key, STRING, &text(value));
    }

    fn array(&mut self, key: &str, kind: u32, items: impl ExactSizeIterator<Item = Vec<u8>>) {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend((items.len() as u64).to_le_bytes());
        items.for_each(|item| value.extend(item));
        self.add(key, ARRAY, &value);
    }
}

fn describe(keys: &mut Keys, config: &LlamaConfig, architecture: &str, name: &str, format: GgufFormat) {
    keys.string("general.architecture", architecture);
    keys.string("general.name", name);
    keys.u32("general.file_type", format.file_type() as usize);
    keys.u32("general.quantization_version", 2);
    keys.u32("general.alignment", ALIGNMENT);
    let key = |rest: &str| format!("{architecture}.{rest}");
    keys.u32(&key("vocab_size"), config.vocab_size);
    keys.u32(&key("context_length"), config.max_position_embeddings);
    keys.u32(&key("embedding_length"), config.hidden_size);
    keys.u32(&key("block_count"), config.num_hidden_layers);
    keys.u32(&key("feed_forward_length"), config.intermediate_size);
    keys.u32(&key("attention.head_count"), config.num_attention_heads);
    keys.u32(&key("attention.head_count_kv"), config.kv_heads());
    keys.u32(&key("attention.key_length"), config.head_dim());
    keys.u32(&key("attention.value_length"), config.head_dim());
    keys.f32(&key("attention.layer_norm_rms_epsilon"), config.rms_norm_eps);
    keys.u32(&key("rope.dimension_count"), config.head_dim());
    keys.f32(&key("rope.freq_base"), config.rope_theta);
    if let Some(RopeScaling::Linear { factor }) = config.rope_scaling {
        keys.string(&key("rope.scaling.type"), "linear");
        keys.f32(&key("rope.scaling.factor"), factor);
    }
}

fn describe_tokenizer(keys: &mut Keys, config: &LlamaConfig, tokenizer: &Tokenizer, vocabulary: &Vocabulary) {
    let eos = config.eos_token_id.unwrap_or(tokenizer.eos_id());
    keys.string("tokenizer.ggml.model", "gpt2");
    keys.string("tokenizer.ggml.pre", vocabulary.splitter);
    keys.array("tokenizer.ggml.tokens", STRING, vocabulary.tokens.iter().map(|token| text(token)));
    let kinds = vocabulary.kinds.iter().map(|kind| kind.to_le_bytes().to_vec());
    keys.array("tokenizer.ggml.token_type", I32, kinds);
    keys.array("tokenizer.ggml.merges", STRING, vocabulary.merges.iter().map(|merge| text(merge)));
    keys.u32("tokenizer.ggml.bos_token_id", config.bos_token_id.unwrap_or(eos) as usize);
    keys.u32("tokenizer.ggml.eos_token_id", eos as usize);
    keys.bool("tokenizer.ggml.add_bos_token", vocabulary.adds_bos);
    keys.bool("tokenizer.ggml.add_eos_token", false);
    keys.string("tokenizer.huggingface.json", &vocabulary.json);
}

/// Where the values of a tensor come from.
enum Source {
    /// A parameter, whose heads' rows are reordered if a number of heads is given.
    Param(String, Option<usize>),
    /// By what llama3's scaling divides each rotary frequency.
    RopeFactors,
}

struct TensorEntry {
    name: String,
    source: Source,
    dims: Vec<usize>,
    format: GgufFormat,
}

fn tensors(
    config: &LlamaConfig,
    params: &ParamStore,
    format: GgufFormat,
) -> Result<Vec<TensorEntry>, ExportError> {
    let mut list = Vec::new();
    let mut add = |name: String, param: String, heads: Option<usize>| -> Result<(), ExportError> {
        let dims = params.layout().part(&param)?.shape.to_vec();
        let format = format.of(dims.len(), dims.last().copied().unwrap_or(1));
        list.push(TensorEntry { name, source: Source::Param(param, heads), dims, format });
        Ok(())
    };
    add("token_embd.weight".into(), "model.embed_tokens.weight".into(), None)?;
    // llama's rotary positions turn neighbours, ours (and Qwen 3's) turn halves.
    let reorders = !config.use_qk_norm;
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, param: &str, heads: Option<usize>| {
            add(
                format!("blk.{layer}.{name}"),
                format!("model.layers.{layer}.{param}"),
                heads.filter(|_| reorders),
            )
        };
        add("attn_norm.weight", "input_layernorm.weight", None)?;
        add("ffn_norm.weight", "post_attention_layernorm.weight", None)?;
        let (heads, kv_heads) = (Some(config.num_attention_heads), Some(config.kv_heads()));
        for (name, param, heads) in [
            ("attn_q", "q_proj", heads),
            ("attn_k", "k_proj", kv_heads),
            ("attn_v", "v_proj", None),
            ("attn_output", "o_proj", None),
        ] {
            let kinds = if config.attention_bias { &["weight", "bias"][..] } else { &["weight"] };
            for kind in kinds {
                add(&format!("{name}.{kind}"), &format!("self_attn.{param}.{kind}"), heads)?;
            }
        }
        if config.use_qk_norm {
            add("attn_q_norm.weight", "self_attn.q_norm.weight", None)?;
            add("attn_k_norm.weight", "self_attn.k_norm.weight", None)?;
        }
        for (name, param) in [("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")] {
            add(&format!("{name}.weight"), &format!("mlp.{param}.weight"), None)?;
        }
    }
    add("output_norm.weight".into(), "model.norm.weight".into(), None)?;
    if !config.tie_word_embeddings {
        add("output.weight".into(), "lm_head.weight".into(), None)?;
    }
    if matches!(config.rope_scaling, Some(RopeScaling::Llama3 { .. })) {
        let dims = vec![config.head_dim() / 2];
        let (name, source) = ("rope_freqs.weight".to_string(), Source::RopeFactors);
        list.push(TensorEntry { name, source, dims, format: GgufFormat::F32 });
    }
    Ok(list)
}

impl TensorEntry {
    fn size_bytes(&self) -> usize {
        self.format.size_bytes(self.dims.iter().product())
    }

    fn encode(&self, params: &ParamStore, config: &LlamaConfig) -> Result<Vec<u8>, ExportError> {
        let values = match &self.source {
            Source::Param(name, heads) => {
                let tensor = params.part(name)?.to_device(Device::Cpu)?.to_dtype(DType::F32)?;
                let values = tensor.as_slice::<f32>()?;
                let largest = if self.format == GgufFormat::F32 { f32::MAX } else { f16::MAX.to_f32() };
                if let Some(bad) = values.iter().find(|x| !x.is_finite() || x.abs() > largest) {
                    let reason =
                        format!("it holds {bad}, which the format cannot store; use f32 or mend the weights");
                    return Err(ExportError::Target { path: name.into(), reason });
                }
                match heads {
                    Some(heads) => neighbours(values, *heads, self.dims.get(1).copied().unwrap_or(1)),
                    None => values.to_vec(),
                }
            }
            Source::RopeFactors => {
                let plain = rope_table(&LlamaConfig { rope_scaling: None, ..config.clone() });
                let scaled = rope_table(config);
                plain.inv_freq.iter().zip(scaled.inv_freq.iter()).map(|(p, s)| (p / s) as f32).collect()
            }
        };
        Ok(self.format.encode(&values))
    }
}

/// Rows `i` and `i + D/2` of each head become neighbours: rotary pairs as llama.cpp's llama has them.
fn neighbours(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(values.len() / heads) {
        let half = head.len() / columns / 2;
        for pair in 0..half {
            for row in [pair, pair + half] {
                out.extend_from_slice(&head[row * columns..][..columns]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, params, tokenizer};
    use super::*;
    use rb_nn::LlamaConfig;

    #[test]
    fn rotary_pairs_become_neighbours() {
        // Two heads of four rows with two columns; the value says head, row and column.
        let values: Vec<f32> = (0..16).map(|i| (i / 8 * 100 + i % 8 / 2 * 10 + i % 2) as f32).collect();
        let got = neighbours(&values, 2, 2);
        assert_eq!(got[..8], [0.0, 1.0, 20.0, 21.0, 10.0, 11.0, 30.0, 31.0]);
        assert_eq!(got[8..12], [100.0, 101.0, 120.0, 121.0]);
    }

    /// The header as a reader sees it: counts, offsets and the length of the file fit each other.
    #[test]
    fn a_file_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let (config, tokenizer) = (config(), tokenizer());
        let params = params(&config);
        for format in [GgufFormat::F32, GgufFormat::F16, GgufFormat::Q8_0] {
            let note = save_gguf(&config, &params, &tokenizer, "tiny", &path, format).unwrap();
            assert!(note.unwrap().contains("tokenizer.huggingface.json"));
            let bytes = std::fs::read(&path).unwrap();
            let list = tensors(&config, &params, format).unwrap();
            let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            assert_eq!(&bytes[..8], b"GGUF\x03\0\0\0");
            assert_eq!(number(8), list.len() as u64);
            assert_eq!(list.len(), 3 + 2 * 9);
            let data: usize = list.iter().map(|t| t.size_bytes().next_multiple_of(ALIGNMENT)).sum();
            assert!(bytes.len() > data && bytes.len().is_multiple_of(ALIGNMENT));
            // The last tensor is the head, in the order of the file.
            let size = list.last().unwrap().size_bytes();
            let head = &bytes[bytes.len() - size.next_multiple_of(ALIGNMENT)..][..size];
            let values = params.part("lm_head.weight").unwrap().to_vec::<f32>().unwrap();
            assert!(head == format.encode(&values), "{format:?}");
        }
    }

    #[test]
    fn what_llama_cpp_cannot_say_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, "old").unwrap();
        let base = config();
        let refused = |config: LlamaConfig| {
            let params = params(&config);
            let error = save_gguf(&config, &params, &tokenizer(), "x", &path, GgufFormat::F32).unwrap_err();
            error.to_string()
        };
        assert!(
            refused(LlamaConfig { sliding_window: Some(4), ..base.clone() }).contains("sliding_window is 4")
        );
        assert!(
            refused(LlamaConfig { attn_logit_softcapping: Some(9.0), ..base.clone() })
                .contains("softcapping is 9")
        );
        let both = LlamaConfig { use_qk_norm: true, attention_bias: true, ..base.clone() };
        assert!(refused(both).contains("use_qk_norm with attention_bias"));
        let mut damaged = params(&base);
        let norm = rb_tensor::Tensor::from_vec(vec![f32::NAN; 32], [32]).unwrap();
        damaged.set_part("model.norm.weight", &norm).unwrap();
        let error =
            save_gguf(&base, &damaged, &tokenizer(), "x", &path, GgufFormat::F16).unwrap_err().to_string();
        assert!(error.starts_with("model.norm.weight: it holds NaN"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"old", "the older file is untouched");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
