"""Training speed of JAX on one GPU: a Llama-style decoder, fp32 master weights, bf16 compute.

Purpose   tokens/s of a whole training step (forward, backward, clipping, AdamW) in one compiled XLA program with donated
          weights and moments, cuDNN attention with grouped heads, padded logits.
Seed      20240607, see `peer.py`.
Versions  printed with the result.
Command   BENCH_BATCH=4 BENCH_SEQ=1024 python bench-scripts/jax_bench_300m.py
"""

import math

import peer


def functions(jax, a):
    """`init(key)` gives the weights, `step(state, ids, labels, t)` the next state and the loss."""
    import jax.numpy as jnp

    compute = jnp.float32 if a.cpu else jnp.bfloat16
    q_width, kv_width = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim

    def init(key):
        keys = iter(jax.random.split(key, 1 + 4 * a.n_layers))
        normal = lambda shape, std: std * jax.random.normal(next(keys), shape, jnp.float32)
        small = 0.02 / math.sqrt(2 * a.n_layers)
        layers = [{"qkv": normal((a.d_model, q_width + 2 * kv_width), 0.02), "o": normal((q_width, a.d_model), small),
                   "gate_up": normal((a.d_model, 2 * a.d_ff), 0.02), "down": normal((a.d_ff, a.d_model), small),
                   "input_norm": jnp.ones(a.d_model), "post_norm": jnp.ones(a.d_model)} for _ in range(a.n_layers)]
        return {"embedding": normal((a.padded, a.d_model), 0.02), "layers": layers, "norm": jnp.ones(a.d_model)}

    def norm(x, weight):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + peer.NORM_EPSILON) * weight).astype(compute)

    freq = peer.THETA ** (-jnp.arange(0, a.head_dim, 2, dtype=jnp.float32) / a.head_dim)
    angle = jnp.arange(a.seq_len, dtype=jnp.float32)[:, None] * freq
    cos, sin = jnp.cos(angle)[:, None, :].astype(compute), jnp.sin(angle)[:, None, :].astype(compute)

    def rotate(x_bthd):
        first, second = jnp.split(x_bthd, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def layer(x, w):
        B, T, _ = x.shape
        product = lambda value, weight: value @ weight.astype(compute)
        q, k, v = jnp.split(product(norm(x, w["input_norm"]), w["qkv"]), [q_width, q_width + kv_width], -1)
        q, k, v = (part.reshape(B, T, -1, a.head_dim) for part in (q, k, v))
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation="xla" if a.cpu else "cudnn")
        x = x + product(y.reshape(B, T, -1), w["o"])
        gate, up = jnp.split(product(norm(x, w["post_norm"]), w["gate_up"]), 2, -1)
        return x + product(jax.nn.silu(gate) * up, w["down"])

    def loss_of(weights, ids, labels):
        x = weights["embedding"].astype(compute)[ids]
        for w in weights["layers"]:
            x = layer(x, w)
        logits = (norm(x, weights["norm"]) @ weights["embedding"].astype(compute).T).astype(jnp.float32)
        target = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - target)

    def step(state, ids, labels, t):
        weights, first, second = state
        loss, grads = jax.value_and_grad(loss_of)(weights, ids, labels)
        size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        factor = jnp.minimum(1.0, peer.MAX_NORM / (size + 1e-6))

        def update(w, g, m, v):
            g = g * factor
            m = peer.BETA1 * m + (1 - peer.BETA1) * g
            v = peer.BETA2 * v + (1 - peer.BETA2) * g * g
            ratio = (m / (1 - peer.BETA1**t)) / (jnp.sqrt(v / (1 - peer.BETA2**t)) + peer.EPSILON)
            decay = peer.DECAY if w.ndim >= 2 else 0.0
            return w - a.lr * (ratio + decay * w), m, v

        updated = jax.tree.map(update, weights, grads, first, second)
        part = lambda i: jax.tree.map(lambda three: three[i], updated, is_leaf=lambda x: isinstance(x, tuple))
        return (part(0), part(1), part(2)), loss

    return init, step


class Trainer:
    """A model that can be trained from the same beginning again and again."""

    def __init__(self, a):
        import jax
        import numpy

        if a.cpu:
            jax.config.update("jax_platforms", "cpu")
        elif jax.default_backend() == "cpu":
            raise SystemExit("JAX sees no GPU; install jax[cuda13], or test the script with --cpu")
        self.jax, self.a = jax, a
        init, step = functions(jax, a)
        self.init, self.compiled = jax.jit(init), jax.jit(step, donate_argnums=0)
        shape = (a.batch_size, a.seq_len)
        self.batches = [tuple(numpy.array(part, numpy.int32).reshape(shape) for part in pair) for pair in peer.batches(a)]
        self.params = sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))
        self.versions = {"jax": jax.__version__, "card": jax.devices()[0].device_kind}

    def restart(self):
        jax = self.jax
        weights = self.init(jax.random.key(self.a.seed))
        zeros = lambda: jax.tree.map(lambda w: w * 0, weights)
        self.state, self.count = (weights, zeros(), zeros()), 0

    def step(self, index):
        self.count += 1
        ids, labels = self.batches[index % len(self.batches)]
        self.state, loss = self.compiled(self.state, ids, labels, float(self.count))
        return lambda: float(loss)

    def peak_mib(self):
        found = self.jax.devices()[0].memory_stats() or {}
        return found["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in found else None


if __name__ == "__main__":
    parser = peer.arguments(__doc__, ["jit"])
    arguments = parser.parse_args()
    peer.check_arguments(parser, arguments)
    peer.run(arguments, "JAX", Trainer)
