"""Golden tiny Llama and Qwen3 models: Hugging Face folders with logits, gradients and AdamW steps.

Purpose   what `cargo test` compares the model, the Hugging Face reader and the optimizer with.
Seed      20240607 (`--seed`); each model derives its own from its name.
Versions  requirements.txt of the parent folder; the metadata of golden.safetensors records them.
Command   python bench-scripts/golden/llama.py [--out crates/rb-train/golden]

A folder per model: `config.json` and `model.safetensors` as transformers writes them, and
`golden.safetensors` with, for T in 1, 7, 63, 65, 200,
  ids_T [1, T] int32      input tokens
  logits_T [1, T, V] f32  of transformers, attention "eager", on the CPU
  logits64_T [1, T, V]    the same in f64 (not every T), by the plain model of this file: rotary
                          angles, norms and softmax are f64 too, which transformers never does
Two folders also hold training. A label is already shifted: label[t] is the target of position t;
-100 is ignored; a loss is the mean over the other labels.
  train_ids, train_labels [4, 33] int32, loss [] f32, loss64 [] f64
  grad/<name> f32, grad64/<name> f64     gradients of that loss at the initial weights
  step_ids, step_labels [10, 4, 33]      ten batches, trained from the initial weights
  step_lrs [10] f64                      learning rate of each step
  step_losses, step_norms [10] f32       before the step; norms are before clipping
  step_losses64, step_norms64 [10] f64
  final/<name> f32                       weights after ten steps
A tied model has no `lm_head.weight` anywhere; the gradient of `model.embed_tokens.weight` is the
sum of both uses. String metadata: `torch`, `transformers`, `seed`, `logits_error` (JSON: T to
max |logits - logits64|) and, with training, `optimizer` (JSON) and `train_error` (JSON: largest
difference between the f32 and the f64 run of `grad`, `step_losses`, `step_norms`, `final`).
"""

import argparse
import json
import math
import pathlib
import shutil
import zlib

import torch
import torch.nn.functional as F
import transformers
from common import Random, deterministic, write_safetensors
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

IGNORE = -100
VOCAB = 101
LENGTHS = (1, 7, 63, 65, 200)
STEPS = 10
OPTIMIZER = {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
             "decayed": "parameters with two axes, the embedding included", "max_grad_norm": 1.0,
             "clip": "gradients *= min(1, max_grad_norm / (norm + 1e-6))"}

# The original length is short, so that at these lengths every band of frequencies matters.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
MODELS = {
    "tied_r1": {"kv": 12, "head_dim": 4, "tied": True},
    "untied_r2": {"kv": 6, "head_dim": 8, "tied": False, "train": True},
    "tied_r3": {"kv": 4, "head_dim": 4, "tied": True, "train": True},
    "untied_r4": {"kv": 3, "head_dim": 8, "tied": False},
    "bias_r3": {"kv": 4, "head_dim": 4, "tied": True, "bias": True},
    "rope_llama3_r3": {"kv": 4, "head_dim": 8, "tied": True, "rope": LLAMA3},
    "rope_linear_r2": {"kv": 6, "head_dim": 4, "tied": False, "rope": {"rope_type": "linear", "factor": 4.0}},
    "qwen3_r2": {"kv": 6, "head_dim": 8, "tied": True, "qwen3": True},
}


def build(name, spec, seed):
    """A transformers model in f32 with weights large enough for an error to show in the logits."""
    shared = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": spec["kv"], "head_dim": spec["head_dim"], "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "initializer_range": 0.2, "tie_word_embeddings": spec["tied"], "attention_bias": spec.get("bias", False),
        "rope_parameters": {"rope_theta": 10000.0} | spec.get("rope", {"rope_type": "default"}),
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "attn_implementation": "eager", "dtype": torch.float32,
    }
    if spec.get("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(use_sliding_window=False, **shared))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared))
    with torch.no_grad():
        for key, value in model.named_parameters():
            random = Random(seed, f"{name}/{key}")
            shift = 1.0 if key.endswith("norm.weight") else 0.0
            value.copy_(random.normal(*value.shape, scale=0.2, shift=shift))
    return model.eval()


def inv_freq64(config):
    """Inverse frequencies in f64 for the three kinds of scaling used here."""
    rope = config.rope_parameters
    dim = config.head_dim
    freq = rope["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope["rope_type"] == "linear":
        return freq / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((rope["original_max_position_embeddings"] * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * freq / rope["factor"] + smooth * freq
    assert rope["rope_type"] == "default", rope
    return freq


def forward64(weights, config, ids):
    """Logits in f64 from a dictionary of f64 weights: the model written out without a library."""
    heads, kv_heads, width, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    batch, length = ids.shape
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * inv_freq64(config)
    cos, sin = angle.cos(), angle.sin()
    hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x, weight):
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def rotate(x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    embedding = weights["model.embed_tokens.weight"]
    x = embedding[ids.long()]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."

        def linear(x, name):
            return F.linear(x, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

        h = norm(x, weights[prefix + "input_layernorm.weight"])
        q = linear(h, "self_attn.q_proj").view(batch, length, heads, width)
        k = linear(h, "self_attn.k_proj").view(batch, length, kv_heads, width)
        v = linear(h, "self_attn.v_proj").view(batch, length, kv_heads, width)
        if prefix + "self_attn.q_norm.weight" in weights:
            q = norm(q, weights[prefix + "self_attn.q_norm.weight"])
            k = norm(k, weights[prefix + "self_attn.k_norm.weight"])
        group = heads // kv_heads
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
        prob = scores.masked_fill(hidden_from, -math.inf).softmax(-1)
        x = x + linear(torch.einsum("bhqk,bkhd->bqhd", prob, v).reshape(batch, length, heads * width), "self_attn.o_proj")
        h = norm(x, weights[prefix + "post_attention_layernorm.weight"])
        x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return F.linear(norm(x, weights["model.norm.weight"]), weights.get("lm_head.weight", embedding))


def batch(random, kept=0.8):
    """Ids and shifted labels [4, 33]; about `kept` of the labels count."""
    tokens = random.integers(0, VOCAB, 4, 34)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[random.integers(0, 1000, *labels.shape) >= 1000 * kept] = IGNORE
    labels[0, -5:] = IGNORE
    return ids, labels


def loss_of(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1).long(), ignore_index=IGNORE)


def learning_rates():
    """Three steps of warm-up to 1e-3, then a cosine to 1e-4."""
    warm = [1e-3 * (step + 1) / 3 for step in range(3)]
    cosine = [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * step / 7)) for step in range(1, STEPS - 2)]
    return warm + cosine


def train(parameters, logits_of, batches):
    """Ten AdamW steps on named parameters; returns losses and norms before clipping."""
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    plain = [p for p in parameters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3, betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["eps"], foreach=False)
    losses, norms = [], []
    for (ids, labels), lr in zip(batches, learning_rates()):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(logits_of(ids), labels)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(parameters.values()), OPTIMIZER["max_grad_norm"]))
        losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), torch.stack(norms)


def training(name, model, weights64, seed):
    """Loss, gradients and ten steps of a model, in f32 by transformers and in f64 by forward64."""
    config = model.config
    ids, labels = batch(Random(seed, name + "/train"))
    # Few labels make a large gradient: clipping then weighs the steps differently.
    batches = [batch(Random(seed, f"{name}/step{step}"), 0.05 if step in (3, 6) else 0.8) for step in range(STEPS)]
    tensors = {"train_ids": ids, "train_labels": labels, "step_lrs": torch.tensor(learning_rates(), dtype=torch.float64),
               "step_ids": torch.stack([b[0] for b in batches]), "step_labels": torch.stack([b[1] for b in batches])}
    parameters = dict(model.named_parameters())
    parameters64 = {key: value.clone().requires_grad_() for key, value in weights64.items()}
    assert parameters.keys() == parameters64.keys()
    error = {"grad": 0.0, "final": 0.0}

    def logits32(ids):
        return model(ids.long(), use_cache=False).logits

    def logits64(ids):
        return forward64(parameters64, config, ids)

    for suffix, named, logits in (("", parameters, logits32), ("64", parameters64, logits64)):
        loss = loss_of(logits(ids), labels)
        tensors["loss" + suffix] = loss.detach()
        for key, grad in zip(named, torch.autograd.grad(loss, list(named.values()))):
            tensors[f"grad{suffix}/{key}"] = grad
        tensors["step_losses" + suffix], tensors["step_norms" + suffix] = train(named, logits, batches)
    for key, value in parameters.items():
        tensors[f"final/{key}"] = value.detach()
        error["final"] = max(error["final"], (value.double() - parameters64[key]).abs().max().item())
        error["grad"] = max(error["grad"], (tensors[f"grad/{key}"].double() - tensors[f"grad64/{key}"]).abs().max().item())
        assert tensors[f"grad/{key}"].abs().max() > 0, key
    for key in ("step_losses", "step_norms"):
        error[key] = (tensors[key].double() - tensors[key + "64"]).abs().max().item()
    return tensors, error


def write_model(folder, name, spec, seed):
    torch.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    model = build(name, spec, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    weights64 = {key: value.double() for key, value in load_file(folder / "model.safetensors").items()}
    weights64 = {key: weights64[key] for key, _ in model.named_parameters()}
    assert ("lm_head.weight" in weights64) is not spec["tied"]

    tensors, logits_error = {}, {}
    for length in LENGTHS:
        ids = Random(seed, f"{name}/ids{length}").integers(0, VOCAB, 1, length)
        with torch.no_grad():
            logits = model(ids.long(), use_cache=False).logits
            logits64 = forward64(weights64, model.config, ids)
        tensors |= {f"ids_{length}": ids, f"logits_{length}": logits}
        if length < 200 or spec.get("train"):
            tensors[f"logits64_{length}"] = logits64
        logits_error[length] = (logits - logits64).abs().max().item()
        # Far below the logits' spread: the two models are the same one.
        assert logits_error[length] < 1e-4 < 1.0 < logits.std(), (name, length, logits_error, logits.std())
    metadata = {"torch": torch.__version__, "transformers": transformers.__version__, "seed": str(seed),
                "logits_error": json.dumps(logits_error)}
    if spec.get("train"):
        more, error = training(name, model, weights64, seed)
        tensors |= more
        metadata |= {"optimizer": json.dumps(OPTIMIZER), "train_error": json.dumps(error)}
    write_safetensors(folder / "golden.safetensors", tensors, metadata)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size} bytes, logits std {tensors['logits_200'].std():.2f}, {metadata['logits_error']}")
    if spec.get("train"):
        print("  losses", [round(x, 4) for x in tensors["step_losses"].tolist()])
        print("  norms ", [round(x, 4) for x in tensors["step_norms"].tolist()])
        print("  error ", metadata["train_error"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="crates/rb-train/golden", help="folder for one folder a model")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--only", choices=sorted(MODELS), help="write one model")
    args = parser.parse_args()
    deterministic()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, spec in MODELS.items():
        if args.only in (None, name):
            write_model(pathlib.Path(args.out) / name, name, spec, args.seed)


if __name__ == "__main__":
    main()
