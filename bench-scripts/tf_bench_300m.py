"""Training speed of TensorFlow on one GPU: a Llama-style decoder, fp32 master weights, bf16 compute.

Purpose   tokens/s of a whole training step (forward, backward, clipping, AdamW) in one function that XLA compiles.
          TensorFlow has no fused causal attention: scores are written, as XLA fuses them.
Seed      20240607, see `peer.py`.
Versions  printed with the result.
Command   BENCH_BATCH=4 BENCH_SEQ=1024 python bench-scripts/tf_bench_300m.py
Status    run on the CPU (`--cpu`, TensorFlow 2.21), where its loss falls like those of PyTorch and JAX on the same tokens; it has
          not been run on a GPU, and no speed of it is claimed.
"""

import math

import peer


class Trainer:
    """A model that can be trained from the same beginning again and again."""

    def __init__(self, a):
        import tensorflow as tf

        if a.cpu:
            tf.config.set_visible_devices([], "GPU")
        elif not tf.config.list_physical_devices("GPU"):
            raise SystemExit("TensorFlow sees no GPU; install tensorflow[and-cuda], or test the script with --cpu")
        self.tf, self.a = tf, a
        self.compute = tf.float32 if a.cpu else tf.bfloat16
        generator = tf.random.Generator.from_seed(a.seed)
        q_width, kv_width = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
        small = 0.02 / math.sqrt(2 * a.n_layers)
        shapes = {"embedding": ((a.padded, a.d_model), 0.02), "norm": ((a.d_model,), None)}
        for i in range(a.n_layers):
            shapes |= {f"{i}.qkv": ((a.d_model, q_width + 2 * kv_width), 0.02), f"{i}.o": ((q_width, a.d_model), small),
                       f"{i}.gate_up": ((a.d_model, 2 * a.d_ff), 0.02), f"{i}.down": ((a.d_ff, a.d_model), small),
                       f"{i}.input_norm": ((a.d_model,), None), f"{i}.post_norm": ((a.d_model,), None)}
        self.initial = {name: tf.ones(shape) if std is None else generator.normal(shape, stddev=std) for name, (shape, std) in shapes.items()}
        self.weights = {name: tf.Variable(value) for name, value in self.initial.items()}
        self.first = {name: tf.Variable(tf.zeros_like(value)) for name, value in self.initial.items()}
        self.second = {name: tf.Variable(tf.zeros_like(value)) for name, value in self.initial.items()}
        self.count = tf.Variable(0.0)
        self.params = sum(math.prod(shape) for shape, _ in shapes.values())
        shape = (a.batch_size, a.seq_len)
        self.batches = [tuple(tf.reshape(tf.constant(part, tf.int32), shape) for part in pair) for pair in peer.batches(a)]
        self.versions = {"tensorflow": tf.__version__}
        freq = peer.THETA ** (-tf.range(0, a.head_dim, 2, dtype=tf.float32) / a.head_dim)
        angle = tf.range(a.seq_len, dtype=tf.float32)[:, None] * freq
        self.cos, self.sin = (tf.cast(f(angle)[:, None, :], self.compute) for f in (tf.cos, tf.sin))
        self.compiled = tf.function(self.train, jit_compile=True)

    def norm(self, x, name):
        tf = self.tf
        wide = tf.cast(x, tf.float32)
        size = tf.math.rsqrt(tf.reduce_mean(wide * wide, -1, keepdims=True) + peer.NORM_EPSILON)
        return tf.cast(wide * size * self.weights[name], self.compute)

    def product(self, x, name):
        return self.tf.matmul(x, self.tf.cast(self.weights[name], self.compute))

    def rotate(self, x_bthd):
        first, second = self.tf.split(x_bthd, 2, -1)
        return self.tf.concat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)

    def loss_of(self, ids, labels):
        tf, a = self.tf, self.a
        B, T, group = a.batch_size, a.seq_len, a.n_heads // a.n_kv_heads
        visible = tf.linalg.band_part(tf.ones((T, T), tf.bool), -1, 0)
        x = tf.gather(tf.cast(self.weights["embedding"], self.compute), ids)
        for i in range(a.n_layers):
            packed = self.product(self.norm(x, f"{i}.input_norm"), f"{i}.qkv")
            q, k, v = tf.split(packed, [a.n_heads * a.head_dim] + 2 * [a.n_kv_heads * a.head_dim], -1)
            q, k, v = (tf.reshape(part, (B, T, -1, a.head_dim)) for part in (q, k, v))
            q = tf.reshape(self.rotate(q), (B, T, a.n_kv_heads, group, a.head_dim))
            scores = tf.cast(tf.einsum("btkgd,bskd->bkgts", q, self.rotate(k)), tf.float32) / math.sqrt(a.head_dim)
            shares = tf.cast(tf.nn.softmax(tf.where(visible, scores, -1e30)), self.compute)
            y = tf.reshape(tf.einsum("bkgts,bskd->btkgd", shares, v), (B, T, -1))
            x = x + self.product(y, f"{i}.o")
            gate, up = tf.split(self.product(self.norm(x, f"{i}.post_norm"), f"{i}.gate_up"), 2, -1)
            x = x + self.product(tf.nn.silu(gate) * up, f"{i}.down")
        last = self.norm(x, "norm")
        logits = tf.cast(tf.matmul(last, tf.cast(self.weights["embedding"], self.compute), transpose_b=True), tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def train(self, ids, labels):
        tf = self.tf
        with tf.GradientTape() as tape:
            loss = self.loss_of(ids, labels)
        names = list(self.weights)
        grads = tape.gradient(loss, [self.weights[name] for name in names])
        grads = [tf.convert_to_tensor(g) for g in grads]
        size = tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in grads]))
        factor = tf.minimum(1.0, peer.MAX_NORM / (size + 1e-6))
        t = self.count.assign_add(1.0)
        for name, g in zip(names, grads):
            w, g = self.weights[name], g * factor
            m = self.first[name].assign(peer.BETA1 * self.first[name] + (1 - peer.BETA1) * g)
            v = self.second[name].assign(peer.BETA2 * self.second[name] + (1 - peer.BETA2) * g * g)
            ratio = (m / (1 - peer.BETA1**t)) / (tf.sqrt(v / (1 - peer.BETA2**t)) + peer.EPSILON)
            decay = peer.DECAY if len(w.shape) >= 2 else 0.0
            w.assign(w - self.a.lr * (ratio + decay * w))
        return loss

    def restart(self):
        self.count.assign(0.0)
        for name, value in self.initial.items():
            self.weights[name].assign(value)
            self.first[name].assign(self.tf.zeros_like(value))
            self.second[name].assign(self.tf.zeros_like(value))

    def step(self, index):
        loss = self.compiled(*self.batches[index % len(self.batches)])
        return lambda: float(loss)

    def peak_mib(self):
        return None if self.a.cpu else self.tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20


if __name__ == "__main__":
    parser = peer.arguments(__doc__, ["xla"])
    arguments = parser.parse_args()
    peer.check_arguments(parser, arguments)
    peer.run(arguments, "TensorFlow", Trainer)
