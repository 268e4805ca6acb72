"""Training speed on one GPU: our `bench` binary and PyTorch in turns, on the same shapes and tokens.

Purpose   tokens/s, time and memory of a whole training step (forward, backward, clipping, AdamW) of a Llama-style
          model with a tied head: fp32 master weights, bf16 compute, 101.7M parameters unless flags say otherwise.
          PyTorch runs with autocast, flash attention and fused AdamW, eagerly, through `torch.compile`, and (`graph`)
          compiled and with the whole step captured in one CUDA graph, its fastest way.
Seed      20240607 (`--seed`): weights of PyTorch, and the random tokens that both sides read from one file.
Versions  the JSON file records card, driver, PyTorch, Triton, and the libraries that our binary used.
Command   python bench-scripts/gpu_speed.py --ours target/release/bench --out gpu_speed.json
Time      two to three minutes for two shapes, most of it `torch.compile`

Both sides do the same: warm-up steps, timed steps and one more from fresh weights in each repeat; batches come from
host memory; the loss of a step is read while the next one is enqueued, and a step's time is that between two
losses. The first line of a shape is ours; `ratio` is our tokens/s divided by that line's. PyTorch's processes stay
alive between repeats, since compiling takes long, and wait idle while another program is timed.
The vocabulary is padded to a multiple of 64 on both sides; PyTorch also trains the padding rows.
`--cpu` runs both in fp32 on the CPU: it tests this script and measures nothing.

Exit code: 0 good, 1 a program failed, 2 bad usage, 3 a loss is not finite or did not fall: then no speed is shown.
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
import subprocess
import sys
import tempfile
import time

REFUSED = 3
MODEL = {"d_model": 768, "n_layers": 16, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "d_ff": 1408, "vocab": 32004}

# Names of PyTorch's modes, and what `torch.compile` is told.
MODES = {"eager": None, "compile": "default", "reduce-overhead": "reduce-overhead", "graph": "default"}


class Refused(Exception):
    """A loss that makes the speed worthless."""


class Failed(Exception):
    """A program that gave no result."""


def check_losses(who, losses):
    if len(losses) < 2 or not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
        raise Refused(f"{who}: the losses must be finite and fall: {losses}")


# --- PyTorch's process -----------------------------------------------------------------------------------------


def build(torch, a):
    """The model as a plain torch module: B batch, T time, C width."""
    from torch import nn
    from torch.nn import functional as F

    padded = -(-a.vocab // 64) * 64

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(a.d_model))

        def forward(self, x):
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    def rotate(x_bhtd, cos, sin):
        first, second = x_bhtd.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.widths = [a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim, a.n_kv_heads * a.head_dim]
            self.input_norm, self.post_norm = Norm(), Norm()
            self.qkv = nn.Linear(a.d_model, sum(self.widths), bias=False)
            self.o = nn.Linear(self.widths[0], a.d_model, bias=False)
            self.gate_up = nn.Linear(a.d_model, 2 * a.d_ff, bias=False)
            self.down = nn.Linear(a.d_ff, a.d_model, bias=False)

        def forward(self, x_btc, cos, sin):
            B, T, _ = x_btc.shape
            parts = self.qkv(self.input_norm(x_btc)).split(self.widths, -1)
            q, k, v = (part.view(B, T, -1, a.head_dim).transpose(1, 2) for part in parts)
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
            x_btc = x_btc + self.o(y.transpose(1, 2).reshape(B, T, -1))
            gate, up = self.gate_up(self.post_norm(x_btc)).chunk(2, -1)
            return x_btc + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(padded, a.d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(a.n_layers))
            self.norm = Norm()
            freq = 10000.0 ** -(torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim)
            angle = torch.arange(a.seq_len, dtype=torch.float64)[:, None] * freq
            self.register_buffer("cos", angle.cos().float())
            self.register_buffer("sin", angle.sin().float())

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.view(-1, padded), labels.view(-1))

    model = Model()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            into_residual = ".o." in name or ".down." in name
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * a.n_layers) if into_residual else 1.0))
    return model


def read_batches(torch, a):
    """Pairs of ids and labels in host memory, cut from the file as our binary cuts it."""
    kind = {".u16": "H", ".bin": "H", ".u32": "I"}.get(pathlib.Path(a.tokens).suffix, "B")
    tokens = array.array(kind)
    count = a.batch_size * a.seq_len
    data = pathlib.Path(a.tokens).read_bytes()[: (a.batches * count + 1) * tokens.itemsize]
    tokens.frombytes(data)
    ids = torch.tensor(tokens, dtype=torch.int64)
    shape = (a.batch_size, a.seq_len)
    batches = [(ids[i * count : (i + 1) * count].view(shape), ids[i * count + 1 : (i + 1) * count + 1].view(shape))
               for i in range((len(ids) - 1) // count)]
    if not batches or int(ids.max()) >= a.vocab:
        raise Failed(f"{a.tokens}: too short for a batch, or ids of --vocab {a.vocab} or more")
    return batches if a.cpu else [(x.pin_memory(), y.pin_memory()) for x, y in batches]


class Trainer:
    """A PyTorch model that can be trained from the same beginning again and again."""

    def __init__(self, torch, a):
        self.torch, self.a = torch, a
        torch.manual_seed(a.seed)
        self.device = "cpu" if a.cpu else "cuda"
        if not a.cpu and a.attention != "default":
            for kernel in ("flash", "cudnn", "mem_efficient", "math"):
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == a.attention)
        model = build(torch, a).to(self.device)
        self.parameters = list(model.parameters())
        self.initial = [p.detach().cpu().clone() for p in self.parameters]
        groups = [{"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": 0.1},
                  {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0}]
        self.whole = a.worker == "graph" and not a.cpu
        self.optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), eps=1e-8, fused=True, capturable=self.whole)
        compiled = MODES[a.worker]
        self.model = torch.compile(model, mode=compiled) if compiled else model
        self.batches = read_batches(torch, a)
        if self.whole:
            self.capture()

    def compute(self, ids, labels):
        """Forward, backward, clipping and update, enqueued; gives the loss."""
        torch = self.torch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=not self.a.cpu):
            loss = self.model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def capture(self):
        """Captures a step after a few on a stream of their own; batches go to the same memory from then on."""
        torch = self.torch
        self.places = [part.to(self.device) for part in self.batches[0]]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.compute(*self.places)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.compute(*self.places)

    def restart(self):
        """Initial weights, no moments, in the same memory: nothing is compiled again."""
        with self.torch.no_grad():
            for parameter, value in zip(self.parameters, self.initial):
                parameter.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def step(self, index):
        """Enqueues a step; gives what waits for its loss."""
        torch = self.torch
        batch = self.batches[index % len(self.batches)]
        if self.whole:
            for place, part in zip(self.places, batch):
                place.copy_(part, non_blocking=True)
            self.graph.replay()
            loss = self.loss
        else:
            loss = self.compute(*(part.to(self.device, non_blocking=True) for part in batch))
        if self.a.cpu:
            return loss.item
        host = torch.empty((), pin_memory=True).copy_(loss, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait():
            event.synchronize()
            return float(host)

        return wait

    def block(self):
        """Steps from the beginning, with the timed ones as milliseconds."""
        self.restart()
        if not self.a.cpu:
            self.torch.cuda.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
        losses, arrivals, pending = [], [], None
        for index in range(self.a.warm_up + self.a.steps + 1):
            wait = self.step(index)
            if pending:
                losses.append(pending())
                arrivals.append(time.perf_counter())
            pending = wait
        losses.append(pending())
        gaps = [1e3 * (b - a) for a, b in zip(arrivals, arrivals[1:])]
        times = gaps[self.a.warm_up - 1 : self.a.warm_up - 1 + self.a.steps]
        return times, losses


def serve(a):
    """PyTorch's process: one line of JSON when it is ready, then one for each line of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever a library prints must not get between the answers.
    os.dup2(2, 1)
    import torch

    started = time.perf_counter()
    trainer = Trainer(torch, a)
    for index in range(3):
        trainer.step(index)()
    ready = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
             "start_s": time.perf_counter() - started, "params": sum(p.numel() for p in trainer.parameters)}
    if not a.cpu:
        ready["card"] = torch.cuda.get_device_name()
    try:
        import triton

        ready["triton"] = triton.__version__
    except ImportError:
        pass
    print(json.dumps(ready), file=answers)
    for _ in sys.stdin:
        times, losses = trainer.block()
        step_ms = statistics.median(times)
        result = {"step_ms": step_ms, "tokens_per_s": 1e3 * a.batch_size * a.seq_len / step_ms, "step_ms_all": times, "losses": losses}
        if not a.cpu:
            result["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
            result["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
        print(json.dumps(result), file=answers)


# --- the comparison --------------------------------------------------------------------------------------------


def shape_flags(a, shape):
    batch_size, seq_len = shape
    flags = [part for name in MODEL for part in ("--" + name.replace("_", "-"), str(getattr(a, name)))]
    flags += ["--batch-size", str(batch_size), "--seq-len", str(seq_len), "--lr", str(a.lr)]
    return flags + ["--steps", str(a.steps), "--warm-up", str(a.warm_up), "--batches", str(a.batches)]


class Peer:
    """PyTorch in one mode on one shape."""

    def __init__(self, a, shape, mode, tokens):
        self.who = f"PyTorch {mode}"
        command = [sys.executable, __file__, "--worker", mode, *shape_flags(a, shape), "--tokens", str(tokens)]
        command += ["--seed", str(a.seed), "--attention", a.attention] + (["--cpu"] if a.cpu else [])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = None

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.who}: ended with exit code {self.process.wait()}")
        return json.loads(line)

    def ready(self):
        self.about = self.answer()

    def run(self):
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self):
        self.process.kill()
        self.process.wait()


class Ours:
    """Our binary on one shape, a fresh process each time."""

    def __init__(self, a, shape, tokens, folder):
        self.who, self.about = "RustingBrain", None
        self.result = pathlib.Path(folder) / "ours.json"
        self.command = [str(a.ours), *shape_flags(a, shape), "--tokens", str(tokens), "--json", str(self.result)]
        self.command += ([] if a.cpu else ["--gpu", "--mixed-precision"]) + a.ours_arg

    def ready(self):
        # The first run compiles kernels, and searches for algorithms where `--tune` asks for it.
        self.about = self.run()

    def run(self):
        done = subprocess.run(self.command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == REFUSED:
            raise Refused(f"{self.who}: refused (exit code {REFUSED})")
        if done.returncode != 0:
            raise Failed(f"{self.who}: exit code {done.returncode} from {' '.join(self.command)}")
        result = json.loads(self.result.read_text())
        return result | {key: result["gpu"][key] for key in ("peak_mib", "reserved_mib") if result["gpu"]}

    def stop(self):
        pass


def random_tokens(a, shape, folder):
    """A file of random ids for all batches of a shape."""
    kind, suffix = ("H", "u16") if a.vocab <= 1 << 16 else ("I", "u32")
    chance = random.Random(a.seed)
    count = a.batches * shape[0] * shape[1] + 1
    path = pathlib.Path(folder) / f"random_{shape[0]}x{shape[1]}.{suffix}"
    path.write_bytes(array.array(kind, (chance.randrange(a.vocab) for _ in range(count))).tobytes())
    return path


def machine():
    """Card and driver as `nvidia-smi` names them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def compare(a, folder):
    """Runs all programs in turns; gives what the JSON file holds."""
    programs = {}
    try:
        for shape in a.shapes:
            tokens = a.tokens or random_tokens(a, shape, folder)
            programs[shape] = [Ours(a, shape, tokens, folder)] + [Peer(a, shape, mode, tokens) for mode in a.modes]
        # The peers' processes start and compile side by side, before anything is timed.
        for program in sorted((p for row in programs.values() for p in row), key=lambda p: isinstance(p, Ours)):
            program.ready()
            print(f"ready: {program.who}", file=sys.stderr)
        shapes = []
        for shape, row in programs.items():
            runs = {program.who: [] for program in row}
            for repeat in range(a.repeats):
                # The order alternates, so that a card that warms up favours none.
                for program in row[:: -1 if repeat % 2 else 1]:
                    result = program.run()
                    check_losses(program.who, result["losses"])
                    runs[program.who].append(result)
                    print(f"{shape[0]}x{shape[1]} run {repeat + 1} {program.who}: {result['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
            about = {program.who: program.about for program in row}
            shapes.append({"batch_size": shape[0], "seq_len": shape[1], "runs": runs, "about": about})
    finally:
        for program in (p for row in programs.values() for p in row):
            program.stop()
    return {"machine": "cpu" if a.cpu else machine(), "date": time.strftime("%Y-%m-%d"), "command": sys.argv,
            "platform": platform.platform(), "attention": a.attention, "tokens": str(a.tokens or "random ids"), "shapes": shapes}


def summarize(found):
    """Adds medians and ratios to each shape, and gives the table."""
    lines = ["| Shape | Program | tokens/s, median (range) | step ms | TFLOP/s | peak MiB | loss, first to last | ratio |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for shape in found["shapes"]:
        ours = shape["runs"]["RustingBrain"]
        flops = ours[0]["flops_per_token"]
        our_speed = statistics.median(run["tokens_per_s"] for run in ours)
        shape["summary"] = {}
        for who, runs in shape["runs"].items():
            speeds = [run["tokens_per_s"] for run in runs]
            speed = statistics.median(speeds)
            peak = max((run["peak_mib"] for run in runs if "peak_mib" in run), default=None)
            summary = {"tokens_per_s": speed, "step_ms": statistics.median(run["step_ms"] for run in runs),
                       "tflops": speed * flops / 1e12, "peak_mib": peak, "ratio": our_speed / speed,
                       "loss_first": runs[0]["losses"][0], "loss_last": runs[0]["losses"][-1]}
            shape["summary"][who] = summary
            memory = "-" if peak is None else f"{peak:.0f}"
            lines.append(f"| {shape['batch_size']}x{shape['seq_len']} | {who} | {speed:.0f} ({min(speeds):.0f} to {max(speeds):.0f}) "
                         f"| {summary['step_ms']:.2f} | {summary['tflops']:.1f} | {memory} "
                         f"| {summary['loss_first']:.3f} to {summary['loss_last']:.3f} | {summary['ratio']:.2f} |")
    return "\n".join(lines)


def parse_shape(text):
    try:
        batch_size, seq_len = (int(part) for part in text.split("x"))
    except ValueError:
        batch_size = seq_len = 0
    if batch_size < 1 or seq_len < 1:
        raise argparse.ArgumentTypeError(f"{text}: a shape is sequences x tokens, such as 4x1024")
    return batch_size, seq_len


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=pathlib.Path, default=pathlib.Path("target/release/bench"), metavar="PATH", help="our bench binary")
    parser.add_argument("--ours-arg", action="append", default=[], metavar="ARG", help="one more argument for it: --ours-arg=--tune")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(4, 1024), (16, 1024)], metavar="BxT", help="sequences x tokens")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["compile", "graph"], help="PyTorch's")
    parser.add_argument("--attention", choices=("flash", "cudnn", "default"), default="flash", help="PyTorch's kernel: one of two, or its own choice")
    for name, value in MODEL.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a run")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program")
    parser.add_argument("--batches", type=int, default=4, help="distinct batches, taken in turn")
    parser.add_argument("--tokens", type=pathlib.Path, metavar="FILE", help="u16 (.u16, .bin) or u32 (.u32) ids or text for both sides; random if left out")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--cpu", action="store_true", help="test this script without a GPU")
    for hidden in ("--batch-size", "--seq-len"):
        parser.add_argument(hidden, type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if min(getattr(a, name) for name in (*MODEL, "steps", "warm_up", "repeats", "batches")) < 1:
        parser.error("every number must be at least 1")
    if a.worker:
        serve(a)
        return
    for path in filter(None, (a.ours, a.tokens)):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if len(set(a.shapes)) != len(a.shapes) or len(set(a.modes)) != len(a.modes):
        parser.error("a shape or mode is given twice")
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(a, folder)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)
    except Failed as failure:
        sys.exit(f"failed: {failure}")
    table = summarize(found)
    about = found["shapes"][0]["about"]
    peer = about[f"PyTorch {a.modes[0]}"]
    ours = about["RustingBrain"]
    libraries = ", ".join(ours["gpu"]["libraries"]) if ours["gpu"] else "no GPU"
    print(f"{found['machine']}; PyTorch {peer['torch']} ({a.attention} attention); bench {ours['version']} ({libraries}).")
    print(f"{ours['params']} parameters, {a.warm_up} + {a.steps} steps, {a.repeats} runs each in turns; ratio: ours by that line's tokens/s.\n")
    print(table)
    if a.out:
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
