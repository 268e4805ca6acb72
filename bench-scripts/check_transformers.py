"""Checks that transformers reads a model folder written by RustingBrain and computes the same logits.

Purpose   the folder must load with AutoModelForCausalLM and AutoTokenizer: no missing, unexpected or
          mismatched key, the same token ids as tokenizer.json gives, the same logits.
Seed      none; the probe's ids are stored in it.
Versions  requirements.txt beside this file.
Command   rb logits RUN_OR_CHECKPOINT_DIR --out PROBE
          python bench-scripts/check_transformers.py RUN_OR_CHECKPOINT_DIR PROBE

RUN_OR_CHECKPOINT_DIR is a Hugging Face folder (it has config.json) or a run directory, of which the
newest `checkpoints/step-N` is taken. PROBE is a safetensors file with `ids_T` [B, T] int32 and
`logits_T` [B, T, V] f32 for one or more T, which `rb logits` writes; without it, `probe.safetensors`
of the checkpoint is used if there is one. Exit code: 0 good, 1 a check failed, 2 bad usage.
"""

import argparse
import pathlib
import re

import torch
from safetensors.torch import load_file

import verdict

# Spaces, digits, accents, a script with combining marks, and a character outside the basic plane.
SAMPLE = "Hello, world!  It's 3.14 at 09:05.\n\tna\u00efve \u0986\u09ae\u09be\u09b0 \u09b8\u09cb\u09a8\u09be\u09b0 \u09ac\u09be\u0982\u09b2\u09be \U0001f980"


def checkpoint_of(path):
    """The Hugging Face folder that a path means, or None."""
    if (path / "config.json").is_file():
        return path
    steps = [(int(match[1]), child) for child in path.glob("checkpoints/step-*") if (match := re.fullmatch(r"step-0*(\d+)", child.name))]
    steps = [step for step in steps if (step[1] / "config.json").is_file()]
    return max(steps)[1] if steps else None


def check_model(folder, failures):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            failures.append(f"{kind}: {sorted(map(str, info[kind]))}")
    count = sum(p.numel() for p in model.parameters())
    print(f"model: {type(model).__name__}, {count} parameters, tied head: {bool(model.config.tie_word_embeddings)}")
    return model.eval()


def check_tokenizer(folder, vocab_size, failures):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    print(f"tokenizer: {type(tokenizer).__name__}, {len(tokenizer)} tokens, sample text is {len(ids)} tokens")
    if len(tokenizer) > vocab_size:
        failures.append(f"tokenizer has {len(tokenizer)} tokens, config.json's vocab_size is {vocab_size}")
    # transformers may rebuild a tokenizer from its vocabulary under its own rules for the class named
    # in tokenizer_config.json; the ids then differ from those of the training run.
    stored = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAMPLE, add_special_tokens=False).ids
    if ids != stored:
        failures.append(f"AutoTokenizer gives other ids than tokenizer.json: {ids[:12]}.. and {stored[:12]}..")
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded != SAMPLE:
        failures.append(f"sample text does not survive encoding and decoding: {decoded!r}")


def check_probe(model, path, tolerance, failures):
    probe = load_file(path)
    lengths = sorted(int(name.removeprefix("ids_")) for name in probe if re.fullmatch(r"ids_\d+", name))
    if not lengths:
        failures.append(f"{path} holds no ids_T")
    for length in lengths:
        ids, ours = probe[f"ids_{length}"].long(), probe.get(f"logits_{length}")
        if ours is None:
            failures.append(f"{path} has ids_{length} but no logits_{length}")
            continue
        with torch.no_grad():
            theirs = model(ids, use_cache=False).logits
        if theirs.shape != ours.shape:
            failures.append(f"T {length}: logits have shape {list(ours.shape)}, transformers gives {list(theirs.shape)}")
            continue
        difference = (theirs - ours.float()).abs().max().item()
        # Written so that NaN fails.
        good = difference <= tolerance
        print(f"T {length}: max |difference| {difference:.3e}, max |logit| {theirs.abs().max().item():.3f}, {'good' if good else 'BAD'}")
        if not good:
            failures.append(f"T {length}: logits differ by {difference:.3e}, at most {tolerance:.1e} is allowed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT_DIR", type=pathlib.Path)
    parser.add_argument("probe", metavar="PROBE", type=pathlib.Path, nargs="?")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest allowed difference of a logit")
    parser.add_argument("--no-tokenizer", action="store_true", help="the folder has no tokenizer")
    args = parser.parse_args()
    folder = checkpoint_of(args.folder)
    if folder is None:
        parser.error(f"{args.folder}: neither config.json nor checkpoints/step-N/config.json is there")
    probe = args.probe or folder / "probe.safetensors"
    if args.probe and not probe.is_file():
        parser.error(f"{probe}: no such file")
    print(f"folder: {folder}")

    failures = []
    model = check_model(folder, failures)
    if not args.no_tokenizer:
        if (folder / "tokenizer.json").is_file():
            check_tokenizer(folder, model.config.vocab_size, failures)
        else:
            failures.append("no tokenizer.json (pass --no-tokenizer if that is meant)")
    if probe.is_file():
        check_probe(model, probe, args.tolerance, failures)
    else:
        print("probe: none given, logits not compared; `rb logits` writes one")
    verdict.end(failures)


if __name__ == "__main__":
    main()
