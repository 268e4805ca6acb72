"""Checks that llama.cpp's Python reader accepts a GGUF file of `rb export` and finds the model's weights in it.

Purpose   the file must be read by `gguf.GGUFReader`; its keys must say what config.json says; every tensor,
          with queries and keys put back into Hugging Face's order of rows, must hold the folder's weights:
          exactly in f32, rounded to f16, or with the very bytes that `gguf.quants` makes for q8_0; its tokens,
          kinds and merges must be those of tokenizer.json.
Seed      none.
Versions  gguf 0.17 or newer from PyPI, numpy, safetensors.
Command   rb export RUN --out FOLDER
          rb export RUN --format gguf --dtype q8_0 --out FILE
          python bench-scripts/check_gguf.py FOLDER FILE

FOLDER is an f32 Hugging Face folder of the same model. Exit code: 0 good, 1 a check failed.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import load_file

import verdict

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def hugging_face_name(name):
    if name in TOP:
        return TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def permuted(weights, heads):
    """Rows of rotary pairs as neighbours: the conversion of llama.cpp's converter."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("file", type=pathlib.Path)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    tokenizer = json.loads((args.folder / "tokenizer.json").read_text())
    weights = load_file(args.folder / "model.safetensors")
    reader = gguf.GGUFReader(args.file)
    failures = []

    def value(key):
        field = reader.get_field(key)
        return None if field is None else field.contents()

    def same(key, want):
        got = value(key)
        close = isinstance(want, float) and got is not None and abs(got - want) <= 1e-6 * abs(want)
        if not (got == want or close):
            failures.append(f"{key} is {got!r}, expected {want!r}")

    arch = "qwen3" if config["model_type"] == "qwen3" else "llama"
    head_dim = config["head_dim"]
    same("general.architecture", arch)
    for key, want in {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config["rope_theta"]),
    }.items():
        same(f"{arch}.{key}", want)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        same(f"{arch}.rope.scaling.type", "linear")
        same(f"{arch}.rope.scaling.factor", float(scaling["factor"]))

    found = set()
    formats = {}
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType(tensor.tensor_type)
        formats[kind.name] = formats.get(kind.name, 0) + 1
        if tensor.name == "rope_freqs.weight":
            print(f"rope_freqs: {tensor.data.min():.3f} to {tensor.data.max():.3f}")
            continue
        name = hugging_face_name(tensor.name)
        found.add(name)
        want = weights[name].astype(np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            want = permuted(want, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        if [int(n) for n in reversed(tensor.shape)] != list(want.shape):
            failures.append(f"{tensor.name} has shape {list(tensor.shape)}, expected the reverse of {list(want.shape)}")
            continue
        want = gguf.quants.quantize(want, kind)
        if not np.array_equal(tensor.data.reshape(-1).view(np.uint8), np.ascontiguousarray(want).reshape(-1).view(np.uint8)):
            failures.append(f"{tensor.name} ({kind.name}) differs from gguf's own conversion of {name}")
    if found != set(weights):
        failures.append(f"missing {sorted(set(weights) - found)}")
    print(f"tensors: {len(reader.tensors)}, {formats}")

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    vocabulary = dict(tokenizer["model"]["vocab"])
    vocabulary.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    wrong = [name for name, index in vocabulary.items() if tokens[index] != name]
    if wrong or len(tokens) != config["vocab_size"] or len(kinds) != len(tokens):
        failures.append(f"{len(tokens)} tokens, {len(kinds)} kinds, wrong names: {wrong[:5]}")
    control = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    if control != {index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL}:
        failures.append("control tokens differ")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    if list(value("tokenizer.ggml.merges")) != merges:
        failures.append("merges differ")
    same("tokenizer.ggml.eos_token_id", config["eos_token_id"])
    same("tokenizer.ggml.bos_token_id", config["bos_token_id"])
    if json.loads(value("tokenizer.huggingface.json")) != tokenizer:
        failures.append("tokenizer.huggingface.json differs from tokenizer.json")
    print(f"tokenizer: {len(tokens)} tokens, {len(merges)} merges, splitter {value('tokenizer.ggml.pre')}")
    verdict.end(failures)


if __name__ == "__main__":
    main()
