"""Training speed of PyTorch on one GPU: a Llama-style decoder, fp32 master weights, bf16 compute.

Purpose   tokens/s of a whole training step (forward, backward, clipping, AdamW) at PyTorch's truly fastest: autocast,
          packed products, grouped attention without expanded heads (`enable_gqa`), padded logits, fused AdamW, the model
          compiled, and (`graph`, the default) the whole step captured in one CUDA graph.
Seed      20240607, see `peer.py`.
Versions  printed with the result.
Command   BENCH_BATCH=4 BENCH_SEQ=1024 python bench-scripts/torch_bench_300m.py [--mode compile] [--attention flash]
"""

import math

import peer

# Names of the modes, and what `torch.compile` is told.
MODES = {"graph": "default", "compile": "default", "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune", "eager": None}


def build(torch, a):
    """The model as a plain torch module: B batch, T time, C width."""
    from torch import nn
    from torch.nn import functional as F

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(a.d_model))

        def forward(self, x):
            return F.rms_norm(x, self.weight.shape, self.weight, peer.NORM_EPSILON)

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
            self.embedding = nn.Embedding(a.padded, a.d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(a.n_layers))
            self.norm = Norm()
            freq = peer.THETA ** -(torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim)
            angle = torch.arange(a.seq_len, dtype=torch.float64)[:, None] * freq
            self.register_buffer("cos", angle.cos().float())
            self.register_buffer("sin", angle.sin().float())

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.view(-1, a.padded), labels.view(-1))

    model = Model()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            into_residual = ".o." in name or ".down." in name
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * a.n_layers) if into_residual else 1.0))
    return model


class Trainer:
    """A model that can be trained from the same beginning again and again."""

    def __init__(self, a):
        import torch

        self.torch, self.a = torch, a
        torch.manual_seed(a.seed)
        self.device = "cpu" if a.cpu else "cuda"
        if not a.cpu and a.attention != "default":
            for kernel in ("flash", "cudnn", "mem_efficient", "math"):
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == a.attention)
        model = build(torch, a).to(self.device)
        self.parameters = list(model.parameters())
        self.params = sum(p.numel() for p in self.parameters)
        self.initial = [p.detach().cpu().clone() for p in self.parameters]
        groups = [{"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": peer.DECAY},
                  {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0}]
        self.whole = a.mode == "graph" and not a.cpu
        self.optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(peer.BETA1, peer.BETA2), eps=peer.EPSILON, fused=True,
                                           capturable=self.whole)
        compiled = None if a.cpu else MODES[a.mode]
        self.model = torch.compile(model, mode=compiled) if compiled else model
        shape = (a.batch_size, a.seq_len)
        self.batches = [tuple(torch.tensor(part, dtype=torch.int64).view(shape) for part in pair) for pair in peer.batches(a)]
        self.versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "attention": a.attention}
        if not a.cpu:
            self.batches = [tuple(part.pin_memory() for part in pair) for pair in self.batches]
            self.versions["card"] = torch.cuda.get_device_name()
        if self.whole:
            self.capture()

    def compute(self, ids, labels):
        """Forward, backward, clipping and update, enqueued; gives the loss."""
        torch = self.torch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=not self.a.cpu):
            loss = self.model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, peer.MAX_NORM, foreach=True)
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
        if not self.a.cpu:
            self.torch.cuda.synchronize()
        # What a captured step needs was taken when it was captured; only other modes take it again.
        if not self.a.cpu and not self.whole:
            self.torch.cuda.reset_peak_memory_stats()

    def step(self, index):
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

    def peak_mib(self):
        return None if self.a.cpu else self.torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    parser = peer.arguments(__doc__, list(MODES))
    parser.add_argument("--attention", choices=("cudnn", "flash", "default"), default="cudnn", help="kernel, or PyTorch's own choice")
    arguments = parser.parse_args()
    peer.check_arguments(parser, arguments)
    peer.run(arguments, "PyTorch", Trainer)
