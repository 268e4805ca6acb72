"""Training speed on the CPU: plain PyTorch, and beside it our `bench` binary on the same shape.

Purpose   tokens/s of one training step in f32 (forward, backward, clipping, AdamW) for a Llama-style
          model with tied embeddings, on one fixed batch of random tokens, so that the loss must fall.
Seed      20240607 (`--seed`).
Versions  requirements.txt beside this file; the JSON line records torch's.
Command   python bench-scripts/cpu_speed.py --preset quickstart [--ours target/release/bench --repeats 3]

Without `--ours` the last line of stdout is a JSON object: tokens_per_s, step_ms (median of the timed
steps), loss_first, loss_last, params, torch, threads, optimizer. With `--ours` both programs run in
turns, each time in a fresh process, and a markdown table compares the medians; the binary's last
line must be a JSON object with the first five of these fields. Exit code: 0 good, 1 a program failed,
2 bad usage, 3 a loss is not finite or did not fall: then no speed is printed.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

# Shape flags in the order of the command line, with the values of the presets.
SHAPE = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab", "seq_len", "batch_size")
PRESETS = {
    "quickstart": (192, 4, 6, 2, 32, 512, 2048, 128, 16),
    "10m": (320, 6, 10, 5, 32, 864, 4096, 256, 8),
}
WARMUP_STEPS = 3
REFUSED = 3


class Refused(Exception):
    """A loss that makes the speed worthless."""


def check_losses(who, first, last):
    if not (math.isfinite(first) and math.isfinite(last) and last < first):
        raise Refused(f"{who}: loss went from {first} to {last}; it must be finite and fall")


def build(torch, a):
    """The model as a plain torch module: B batch, T time, C width, H heads, D head size."""
    from torch import nn
    from torch.nn import functional as F

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)

    def rotate(x_bhtd, cos, sin):
        first, second = x_bhtd.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            q_width, kv_width = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
            self.input_norm, self.post_norm = Norm(a.d_model), Norm(a.d_model)
            self.q, self.k, self.v = (nn.Linear(a.d_model, w, bias=False) for w in (q_width, kv_width, kv_width))
            self.o = nn.Linear(q_width, a.d_model, bias=False)
            self.gate, self.up = (nn.Linear(a.d_model, a.d_ff, bias=False) for _ in range(2))
            self.down = nn.Linear(a.d_ff, a.d_model, bias=False)

        def forward(self, x_btc, cos, sin):
            B, T, _ = x_btc.shape
            h = self.input_norm(x_btc)
            q, k, v = (part(h).view(B, T, -1, a.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
            x_btc = x_btc + self.o(y.transpose(1, 2).reshape(B, T, -1))
            h = self.post_norm(x_btc)
            return x_btc + self.down(F.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(a.vocab, a.d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(a.n_layers))
            self.norm = Norm(a.d_model)
            freq = 10000.0 ** -(torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim)
            angle = torch.arange(a.seq_len, dtype=torch.float64)[:, None] * freq
            self.register_buffer("cos", angle.cos().float())
            self.register_buffer("sin", angle.sin().float())

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.view(-1, a.vocab), labels.view(-1))

    model = Model()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def adamw(torch, parameters, kind, lr):
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **{kind: True})


def fastest_adamw(torch, parameters):
    """The faster of PyTorch's two AdamW implementations here, measured on copies."""
    times = {}
    for kind in ("fused", "foreach"):
        copies = [p.detach().clone().requires_grad_() for p in parameters]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        try:
            optimizer = adamw(torch, copies, kind, 1e-4)
            optimizer.step()
        except RuntimeError as error:
            print(f"AdamW {kind} is not available: {error}", file=sys.stderr)
            continue
        runs = []
        for _ in range(7):
            start = time.perf_counter()
            optimizer.step()
            runs.append(time.perf_counter() - start)
        times[kind] = statistics.median(runs)
    return min(times, key=times.get)


def run_torch(a):
    """Trains on one batch and returns what the JSON line holds."""
    import torch

    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    model = build(torch, a)
    parameters = list(model.parameters())
    ids = torch.randint(0, a.vocab, (a.batch_size, a.seq_len + 1))
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    kind = fastest_adamw(torch, parameters) if a.optimizer == "auto" else a.optimizer
    optimizer = adamw(torch, parameters, kind, a.lr)

    losses, times = [], []
    for step in range(WARMUP_STEPS + a.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        losses.append(loss.item())
        if step >= WARMUP_STEPS:
            times.append(time.perf_counter() - start)
    if not all(map(math.isfinite, losses)):
        raise Refused(f"PyTorch: a loss is not finite: {losses}")
    check_losses("PyTorch", losses[0], losses[-1])
    step_s = statistics.median(times)
    return {"tokens_per_s": a.batch_size * a.seq_len / step_s, "step_ms": 1e3 * step_s, "loss_first": losses[0],
            "loss_last": losses[-1], "params": sum(p.numel() for p in parameters), "torch": torch.__version__,
            "threads": a.threads, "optimizer": kind}


def run_process(who, command, environment):
    """The JSON object on the last line of a command's stdout."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode == REFUSED:
        raise Refused(f"{who}: refused (exit code {REFUSED})")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"{who}: exit code {done.returncode} from {' '.join(command)}")
    try:
        result = json.loads(lines[-1])
        check_losses(who, result["loss_first"], result["loss_last"])
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"{who}: the last line is not the expected JSON object ({error!r}): {lines[-1]}")
    return result


def compare(a):
    """Runs both in turns and prints a table of medians."""
    shape = [part for name in SHAPE for part in ("--" + name.replace("_", "-"), str(getattr(a, name)))]
    shape += ["--steps", str(a.steps), "--threads", str(a.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "RAYON_NUM_THREADS": str(a.threads)}
    commands = {
        "PyTorch": [sys.executable, __file__, *shape, "--lr", str(a.lr), "--seed", str(a.seed), "--optimizer", a.optimizer],
        "RustingBrain": [str(a.ours.resolve()), *shape, *a.ours_arg, "--json"],
    }
    results = {who: [] for who in commands}
    for repeat in range(a.repeats):
        # The order alternates, so that a machine that warms up favours neither.
        for who in list(commands)[:: -1 if repeat % 2 else 1]:
            result = run_process(who, commands[who], environment)
            results[who].append(result)
            print(f"run {repeat + 1} {who}: {result['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
    counts = {who: runs[0]["params"] for who, runs in results.items()}
    if len(set(counts.values())) != 1:
        sys.exit(f"the models differ: parameters {counts}")

    medians = {who: statistics.median(run["tokens_per_s"] for run in runs) for who, runs in results.items()}
    torch_run = results["PyTorch"][0]
    print(f"Shape: {' '.join(shape)}")
    print(f"{counts['PyTorch']} parameters, f32, {a.threads} threads, {platform.machine()}, torch {torch_run['torch']} "
          f"({torch_run['optimizer']} AdamW), {a.repeats} runs each in turns, median (range).\n")
    print("| Program | tokens/s | step ms | loss, first to last | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for who, runs in results.items():
        speeds = [run["tokens_per_s"] for run in runs]
        step_ms = statistics.median(run["step_ms"] for run in runs)
        print(f"| {who} | {medians[who]:.0f} ({min(speeds):.0f} to {max(speeds):.0f}) | {step_ms:.1f} "
              f"| {runs[0]['loss_first']:.3f} to {runs[0]['loss_last']:.3f} | {medians[who] / medians['PyTorch']:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quickstart", help="shape; the flags below override it")
    for name in SHAPE:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--optimizer", choices=("auto", "fused", "foreach"), default="auto", help="PyTorch's AdamW")
    parser.add_argument("--ours", type=pathlib.Path, metavar="PATH", help="our bench binary, to run in turns with PyTorch")
    parser.add_argument("--ours-arg", action="append", default=[], metavar="ARG", help="one more argument for it: --ours-arg=--flag")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program")
    args = parser.parse_args()
    for name, value in zip(SHAPE, PRESETS[args.preset]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(getattr(args, name) for name in (*SHAPE, "steps", "threads", "repeats")) < 1:
        parser.error("every size must be at least 1")
    if args.n_heads % args.n_kv_heads or args.head_dim % 2:
        parser.error("--n-heads must be a multiple of --n-kv-heads, and --head-dim even")
    if args.ours and not args.ours.is_file():
        parser.error(f"--ours {args.ours}: no such file")
    try:
        if args.ours:
            compare(args)
        else:
            print(json.dumps(run_torch(args)))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
