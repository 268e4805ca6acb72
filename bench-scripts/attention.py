"""Speed of attention on one GPU: our `bench attention` and PyTorch's flash and cuDNN backends in turns.

Purpose   forward and backward TFLOP/s of bf16 attention with 12 query and 4 key-value heads (flags change that), head
          sizes 64 and 128, 512 to 8192 tokens, batches of 1 to 64.
Seed      PyTorch's inputs are normal with seed 0; ours are described in `bench attention --help`.
Versions  the JSON file records card, driver, PyTorch, cuDNN, and the libraries that our binary used.
Command   python bench-scripts/attention.py --ours target/release/bench --out attention.json
Time      about two minutes

For each head size and length our binary runs, then each backend of PyTorch, all batches each; medians of 20 calls, with
512 MiB written between two calls so that no input lies in the cache. PyTorch gets keys and values of as many heads as
the queries (`repeat`), and, where a backend takes them, the grouped ones (`grouped`): the faster counts in the ratio.
Operations are counted alike: forward 4 B H T^2 D, halved under a causal mask; backward 2.5 times that.
Each backend's output and gradients are compared with PyTorch's math backend in fp32 on the first sequence.

Exit code: 0 good, 1 a program failed, 2 bad usage, 3 a result is wrong: then no speed is shown.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

REFUSED = 3
TOLERANCE = 0.02
FLUSH_BYTES = 512 << 20


def ours(a, head_dim, tokens):
    command = [
        a.ours.resolve(), "attention", "--head-dim", head_dim, "--seq-len", tokens, "--batch", ",".join(map(str, a.batch)),
        "--n-heads", a.heads, "--n-kv-heads", a.kv_heads, "--max-tokens", a.max_tokens, "--repeats", a.repeats, "--json",
    ]
    command += ["--full"] if a.full else []
    command += ["--path", a.path] if a.path else []
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


class Torch:
    """PyTorch's side; T tokens, H query heads, G key-value heads, D head size."""

    def __init__(self, a):
        import torch

        self.torch, self.a = torch, a
        torch.manual_seed(0)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time(self, work):
        torch, times = self.torch, []
        for repeat in range(self.a.repeats + 2):
            self.flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The card is busy while the host enqueues.
            torch.cuda._sleep(400_000)
            start.record()
            work()
            end.record()
            if repeat >= 2:
                times.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in times)

    def attend(self, q, k, v, grouped):
        from torch.nn import functional as F

        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.a.full, enable_gqa=grouped)

    def check(self, backend, q, k, v, dy, grouped):
        """Largest relative error of output and gradients of the first sequence."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def run(dtype, which):
            x = [t[:1].detach().to(dtype).requires_grad_() for t in (q, k, v)]
            with sdpa_kernel(which):
                y = self.attend(*x, grouped)
            return [y, *self.torch.autograd.grad(y, x, dy[:1].to(dtype))]

        got, want = run(self.torch.bfloat16, backend), run(self.torch.float32, SDPBackend.MATH)
        return max(((g.float() - w).norm() / w.norm()).item() for g, w in zip(got, want))

    def backend(self, name, backend, batch, tokens, head_dim):
        from torch.nn.attention import sdpa_kernel

        torch, a = self.torch, self.a

        def random(heads):
            return torch.randn(batch, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)

        dy, rows = random(a.heads), []
        for kind, kv_heads in (("repeat", a.heads), ("grouped", a.kv_heads)):
            grouped = kind == "grouped"
            if grouped and a.kv_heads == a.heads:
                continue
            q, k, v = (random(heads).requires_grad_() for heads in (a.heads, kv_heads, kv_heads))
            try:
                # fp32 on the math backend needs [T, T]: checked where that is small.
                error = self.check(backend, q, k, v, dy, grouped) if tokens <= 4096 else None
                with sdpa_kernel(backend):
                    forward = self.time(lambda: self.attend(q, k, v, grouped))
                    y = self.attend(q, k, v, grouped)
                backward = self.time(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))
            except RuntimeError as problem:
                print(f"{name} {kind}, {batch} x {tokens}, D {head_dim}: {str(problem).splitlines()[0]}", file=sys.stderr)
                continue
            if error is not None and not error < TOLERANCE:
                print(f"{name} {kind}, {batch} x {tokens}, D {head_dim}: off by {error:.1e}", file=sys.stderr)
                sys.exit(REFUSED)
            flops = 4 * batch * a.heads * tokens**2 * head_dim * (1 if a.full else 0.5)
            rows.append({
                "who": name, "kind": kind, "batch": batch, "seq_len": tokens, "head_dim": head_dim, "error": error,
                "forward_ms": forward, "backward_ms": backward,
                "forward_tflops": flops / forward / 1e9, "backward_tflops": 2.5 * flops / backward / 1e9,
            })
        return rows


def best(rows, who, row, what):
    of = [r[what] for r in rows if r["who"] == who and all(r[k] == row[k] for k in ("batch", "seq_len", "head_dim"))]
    return max(of, default=float("nan"))


def table(rows):
    print("| head | tokens | batch | ours fwd | flash | cuDNN | ours bwd | flash | cuDNN | fwd / cuDNN | bwd / cuDNN |")
    print("| --- " * 11 + "|")
    for row in (r for r in rows if r["who"] == "ours"):
        cells = [row["head_dim"], row["seq_len"], row["batch"]]
        ratios = []
        for what in ("forward_tflops", "backward_tflops"):
            flash, cudnn = (best(rows, who, row, what) for who in ("flash", "cudnn"))
            cells += [f"{x:.0f}" for x in (row[what], flash, cudnn)]
            ratios.append(f"{row[what] / cudnn:.2f}")
        print("| " + " | ".join(map(str, cells + ratios)) + " |", flush=True)


def main():
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", type=pathlib.Path, required=True, help="the `bench` binary")
    parser.add_argument("--path", help="our kernels: plain, mma, ..; chosen by card and shape if left out")
    parser.add_argument("--head-dim", type=numbers, default=[64, 128])
    parser.add_argument("--seq-len", type=numbers, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--max-tokens", type=int, default=131072, help="larger batches are left out")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    from torch.nn.attention import SDPBackend

    peer, rows, about = Torch(a), [], {}
    torch = peer.torch
    for head_dim in a.head_dim:
        for tokens in a.seq_len:
            batches = [batch for batch in a.batch if batch * tokens <= a.max_tokens]
            if not batches:
                continue
            report = ours(a, head_dim, tokens)
            rows += [{"who": "ours", **row} for row in report.pop("rows")]
            about["ours"] = report
            for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                for batch in batches:
                    rows += peer.backend(name, backend, batch, tokens, head_dim)
    about["torch"] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "card": torch.cuda.get_device_name(),
    }
    table(rows)
    print("TFLOP/s; " + ("no mask" if a.full else "causal") + f", {a.heads} query and {a.kv_heads} key-value heads")
    if a.out:
        a.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
