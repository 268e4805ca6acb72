"""What the programs `torch_bench_300m.py`, `jax_bench_300m.py` and `tf_bench_300m.py` share.

Purpose   the same flags, tokens, warm-up, timed steps, statistics and loss gate for every framework, and the two ways
          to run: once, printing a table row, or `--serve`, where each line on stdin asks for a run from fresh weights
          and gets one line of JSON, so that `cargo xtask bench-sweep` can take programs in turns.
Seed      20240607 (`--seed`): weights, and random tokens where `--tokens` names no file.
Shapes    `BENCH_BATCH` and `BENCH_SEQ` in the environment, or `--batch-size` and `--seq-len`.

A step's time is that between the arrival of its loss and that of the step before; the loss is read while the next step
is already enqueued. Exit code: 0 good, 1 failed, 2 bad usage, 3 a loss is not finite or did not fall: then no speed is
shown.
"""

import argparse
import array
import json
import math
import os
import pathlib
import platform
import random
import statistics
import sys
import time

REFUSED = 3
MODEL = {"d_model": 768, "n_layers": 16, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "d_ff": 1408, "vocab": 32004}
BETA1, BETA2, EPSILON, DECAY, MAX_NORM, NORM_EPSILON, THETA = 0.9, 0.95, 1e-8, 0.1, 1.0, 1e-6, 10000.0


class Refused(Exception):
    """A loss that makes the speed worthless."""


def check_losses(losses):
    if len(losses) < 2 or not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
        raise Refused(f"the losses must be finite and fall: {losses}")


def arguments(doc, modes):
    """Flags of every program; `modes` are its ways to run, the fastest first."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=int(os.environ.get("BENCH_BATCH", 4)), help="sequences; or BENCH_BATCH")
    parser.add_argument("--seq-len", type=int, default=int(os.environ.get("BENCH_SEQ", 1024)), help="tokens of one; or BENCH_SEQ")
    for name, value in MODEL.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--batches", type=int, default=4, help="distinct batches, taken in turn")
    parser.add_argument("--tokens", type=pathlib.Path, metavar="FILE", help="u16 (.u16, .bin) or u32 (.u32) ids; random if left out")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--mode", choices=modes, default=modes[0], help="how steps are run")
    parser.add_argument("--cpu", action="store_true", help="fp32 on the CPU: tests this script and measures nothing")
    parser.add_argument("--serve", action="store_true", help="answer each line of stdin with a run")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the result of a single run")
    return parser


def check_arguments(parser, a):
    if min(getattr(a, name) for name in (*MODEL, "batch_size", "seq_len", "steps", "warm_up", "batches")) < 1:
        parser.error("every number must be at least 1")
    if a.n_heads % a.n_kv_heads or a.head_dim % 2:
        parser.error("--n-kv-heads must divide --n-heads, and --head-dim must be even")
    if a.tokens and not a.tokens.is_file():
        parser.error(f"{a.tokens}: no such file")
    a.padded = -(-a.vocab // 64) * 64


def batches(a):
    """Pairs of lists: ids and labels of each batch, cut as our own program cuts them."""
    count = a.batch_size * a.seq_len
    if a.tokens:
        tokens = array.array({".u16": "H", ".bin": "H", ".u32": "I"}.get(a.tokens.suffix, "B"))
        tokens.frombytes(a.tokens.read_bytes()[: (a.batches * count + 1) * tokens.itemsize])
        ids = tokens.tolist()
    else:
        chance = random.Random(a.seed)
        ids = [chance.randrange(a.vocab) for _ in range(a.batches * count + 1)]
    found = [(ids[i * count : (i + 1) * count], ids[i * count + 1 : (i + 1) * count + 1]) for i in range((len(ids) - 1) // count)]
    if not found or max(ids) >= a.vocab:
        sys.exit(f"{a.tokens}: too short for a batch, or ids of --vocab {a.vocab} or more")
    return found


def flops_per_token(a):
    """6 N + 6 L T H D: N elements of all matrices, causal attention."""
    q, kv = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    matrices = a.n_layers * (a.d_model * (2 * q + 2 * kv) + 3 * a.d_model * a.d_ff) + a.vocab * a.d_model
    return 6.0 * matrices + 6.0 * a.n_layers * a.seq_len * q


def block(a, trainer):
    """A run from fresh weights: milliseconds of the timed steps, and every loss."""
    trainer.restart()
    losses, arrivals, pending = [], [], None
    for index in range(a.warm_up + a.steps + 1):
        wait = trainer.step(index)
        if pending:
            losses.append(pending())
            arrivals.append(time.perf_counter())
        pending = wait
    losses.append(pending())
    gaps = [1e3 * (late - early) for early, late in zip(arrivals, arrivals[1:])]
    return gaps[a.warm_up - 1 : a.warm_up - 1 + a.steps], losses


def result(a, trainer, about):
    times, losses = block(a, trainer)
    check_losses(losses)
    step_ms = statistics.median(times)
    speed = 1e3 * a.batch_size * a.seq_len / step_ms
    return about | {"step_ms": step_ms, "tokens_per_s": speed, "step_ms_all": times, "losses": losses,
                    "flops_per_token": flops_per_token(a), "tflops": speed * flops_per_token(a) / 1e12,
                    "peak_mib": trainer.peak_mib()}


def run(a, framework, make):
    """`make(a)` gives a trainer: `restart()`, `step(index)` that gives what waits for the loss, `peak_mib()`,
    `params` and `versions`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever a library prints must not get between the answers.
    os.dup2(2, 1)
    started = time.perf_counter()
    trainer = make(a)
    trainer.restart()
    for index in range(3):
        trainer.step(index)()
    about = {"program": f"{framework} {a.mode}", "params": trainer.params, "versions": trainer.versions,
             "python": platform.python_version(), "start_s": time.perf_counter() - started,
             "device": "cpu, fp32: no measurement" if a.cpu else "gpu, bf16"}
    try:
        if not a.serve:
            found = result(a, trainer, about)
            print(f"{a.batch_size}x{a.seq_len} {about['program']}: {found['tokens_per_s']:.0f} tokens/s, {found['step_ms']:.2f} ms, "
                  f"{found['tflops']:.1f} TFLOP/s, loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}, "
                  f"ready after {about['start_s']:.0f} s, {about['device']}", file=answers)
            if a.json:
                a.json.write_text(json.dumps(found) + "\n")
            return
        print(json.dumps(about), file=answers)
        for _ in sys.stdin:
            print(json.dumps(result(a, trainer, about)), file=answers)
    except Refused as refusal:
        print(f"refused: {about['program']}: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)
