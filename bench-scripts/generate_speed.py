"""Speed of greedy generation with cached keys and values: `rb generate` and transformers in turns, same folder, same CPU.

Purpose   tokens a second after the first one, and seconds to the first one, of both programs; the texts must be equal.
          Weights are read before the clock starts in both.
Seed      none: both always take the likeliest token.
Versions  requirements.txt beside this file.
Command   rb export RUN --out FOLDER
          python bench-scripts/generate_speed.py FOLDER --rb target/release/rb --threads 2 --repeats 3

Prints a markdown table with medians and ranges. Exit code: 0, or 1 if the texts differ.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def ours(args, prompt):
    command = [args.rb, "--threads", str(args.threads), "generate", args.folder, "--device", "cpu", "--temperature", "0",
               "--ignore-eos", "--max-new-tokens", str(args.tokens), "--stats", "--prompt", prompt]
    done = subprocess.run(command, capture_output=True, check=True)
    stats = done.stderr.decode()
    first = float(re.search(r"after ([0-9.]+) s", stats)[1])
    speed = float(re.search(r"after the first ([0-9.]+) a second", stats)[1])
    return first, speed, done.stdout.decode("utf-8")[: -len("\n")]


def theirs(model, tokenizer, args, prompt):
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=1, max_new_tokens=1)
        first = time.perf_counter() - started
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=args.tokens, max_new_tokens=args.tokens)
        seconds = time.perf_counter() - started
    text = tokenizer.decode(out[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return first, (args.tokens - 1) / (seconds - first), text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rb", default="target/release/rb")
    parser.add_argument("--prompt", default="The river and the boat")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    rows = {"RustingBrain": [], "transformers": []}
    equal = True
    for _ in range(args.repeats):
        a, b = ours(args, args.prompt), theirs(model, tokenizer, args, args.prompt)
        equal &= a[2] == b[2]
        if a[2] != b[2]:
            print(f"ours:   {a[2]!r}\ntheirs: {b[2]!r}", file=sys.stderr)
        rows["RustingBrain"].append(a[:2])
        rows["transformers"].append(b[:2])
    print(f"{sum(p.numel() for p in model.parameters())} parameters, prompt of {len(tokenizer(args.prompt, add_special_tokens=False).input_ids)} tokens, "
          f"{args.tokens} new tokens, {args.threads} threads, torch {torch.__version__}; texts {'equal' if equal else 'DIFFER'}")
    print("| Program | first token, ms | tokens/s after it |\n| --- | --- | --- |")
    for name, runs in rows.items():
        cells = []
        for column, factor, digits in ((0, 1e3, 1), (1, 1, 1)):
            values = [run[column] * factor for run in runs]
            cells.append(f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})")
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
