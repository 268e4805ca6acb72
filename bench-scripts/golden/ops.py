"""Golden values of operations whose semantics are subtle, from PyTorch in float64.

Purpose   outputs and gradients that `cargo test` compares the host reference and the kernels with.
Seed      20240607 (`--seed`); the upstream gradient `dy` is random, never ones.
Versions  requirements.txt of the parent folder; the metadata of each file records torch's.
Command   python bench-scripts/golden/ops.py [--out crates/rb-autograd/golden]

One file an operation, `<op>.safetensors`. A file holds several cases; a case holds
`<case>/in0`, `in1`, .. (f64, exact in f32), `out`, `dy`, `din0`, `din1`, .. (no `din` for a constant
input), integer inputs as int32 (`ids`, `labels`, `positions`, `doc_ids`, `mask`, `index`), and
what a fused operation may want to compare (`lse`, `inv_freq`). The string metadata has the keys
`torch`, `seed`, and each case's name with a JSON object of its attributes.

Attributes by operation
  softmax, log_softmax   axis
  max                    semantics ("amax": ties share dy evenly; "max_with_index": all of dy goes to
                         `index`), axis, keepdim
  mean                   axes (list), keepdim
  layer_norm, rms_norm   eps (added to the variance or mean square, inside the root)
  gelu_erf, gelu_tanh, silu, sigmoid, tanh, relu, swiglu, add, mul, div   none
  cross_entropy          ignore_index, label_smoothing, reduction ("mean": over labels that are not
                         ignored; "sum"), z_loss (coefficient; adds z_loss * mean(lse^2) over the rows
                         that are not ignored), valid_rows
  embedding              none
  rope                   style ("half_split"), theta, head_dim, position_offset, and rope_type
                         ("default", "linear", "llama3") with the parameters of that type
  attention              causal, scale, num_heads, num_kv_heads, head_dim, masking ("none",
                         "document"), masked_doc_id (tokens of that document see nothing and are
                         seen by none: out 0, gradient 0)
  concat                 axis, constant_inputs (positions of inputs without a gradient)

Layouts: attention and rope are [B, T, H, D]; `lse` of attention is [B, H, T]; `mask` is [B, T, T],
1 where query (second axis) may look at key (third axis).
"""

import argparse
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from common import Random, deterministic, write_safetensors

IGNORE = -100


class Op:
    """Collects the cases of one operation."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed
        self.tensors, self.attributes = {}, {}

    def random(self, case):
        return Random(self.seed, f"{self.name}/{case}")

    def record(self, case, inputs, out, dy, grads, attributes=None, extra=None):
        """Stores a case whose gradients are known; a grad of None is an input that is constant."""
        assert case not in self.attributes and case not in ("torch", "seed"), case
        assert out.shape == dy.shape and not torch.all(dy == 1), case
        named = {f"in{i}": x for i, x in enumerate(inputs)} | {"out": out, "dy": dy}
        named |= {f"din{i}": g for i, g in enumerate(grads) if g is not None}
        for name, tensor in (named | (extra or {})).items():
            assert torch.isfinite(tensor).all(), f"{self.name}/{case}/{name} is not finite"
            self.tensors[f"{case}/{name}"] = tensor.detach().clone()
        self.attributes[case] = attributes or {}

    def case(self, case, function, inputs, attributes=None, extra=None, constant=()):
        """Stores a case whose gradients come from PyTorch's autograd."""
        leaves = [x.clone().requires_grad_(i not in constant) for i, x in enumerate(inputs)]
        out = function(*leaves)
        dy = self.random(case + "/dy").normal(*out.shape)
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, dy))
        grads = [next(found) if x.requires_grad else None for x in leaves]
        self.record(case, inputs, out.detach(), dy, grads, attributes, extra)

    def write(self, folder):
        metadata = {case: json.dumps(value) for case, value in self.attributes.items()}
        metadata |= {"torch": torch.__version__, "seed": str(self.seed)}
        path = pathlib.Path(folder) / f"{self.name}.safetensors"
        write_safetensors(path, self.tensors, metadata)
        print(f"{path}: {len(self.attributes)} cases, {path.stat().st_size} bytes")


def softmax_like(op, function):
    cases = {"last_axis": ((5, 33), -1), "middle_axis": ((3, 7, 5), 1), "first_axis": ((9, 4), 0),
             "odd_257": ((3, 257), -1), "one_element": ((6, 1), -1), "rank1": ((31,), 0)}
    for case, (shape, axis) in cases.items():
        op.case(case, lambda x: function(x, axis), [op.random(case).normal(*shape, scale=2.0)], {"axis": axis})
    x = op.random("large").normal(6, 17, scale=3.0)
    x[0, 3], x[0, 5], x[1, 0], x[2, 16], x[2, 4], x[3] = 1e4, -1e4, 1e4, -1e4, 1e4, x[3] + 1e4
    x[4], x[5] = x[5] - 1e4, -1e4
    x = x.float().double()
    op.case("large", lambda x: function(x, -1), [x], {"axis": -1})
    x = torch.tensor([[1.0] * 9, [0.0] * 9, [2.0, 2, 1, 2, -3, 2, 0, 0, 1]], dtype=torch.float64)
    op.case("ties", lambda x: function(x, -1), [x], {"axis": -1})
    op.case("ties_middle_axis", lambda x: function(x, 1), [x.reshape(3, 3, 3)], {"axis": 1})


def maximum(op):
    # Few distinct values, so that most rows have ties; the last row of the first input has none.
    def tied(case, *shape):
        return op.random(case).integers(-2, 3, *shape).double()

    inputs = {"last_axis": (tied("last_axis", 6, 11), -1), "middle_axis": (tied("middle_axis", 3, 7, 5), 1),
              "first_axis": (tied("first_axis", 9, 4), 0), "all_equal": (torch.full((3, 5), -1.5, dtype=torch.float64), -1),
              "no_ties": (op.random("no_ties").normal(4, 33), -1), "signed_zeros": (torch.tensor([[0.0, -0.0, -1.0], [-0.0, 0.0, -2.0]], dtype=torch.float64), -1)}
    for name, (x, axis) in inputs.items():
        for keepdim in (False, True):
            suffix = "_keepdim" if keepdim else ""
            shared = {"axis": axis, "keepdim": keepdim}
            op.case(f"amax_{name}{suffix}", lambda x: torch.amax(x, axis, keepdim), [x], {"semantics": "amax"} | shared)
            op.case(f"max_{name}{suffix}", lambda x: torch.max(x, axis, keepdim).values, [x], {"semantics": "max_with_index"} | shared,
                    {"index": torch.max(x, axis, keepdim).indices.int()})


def mean(op):
    cases = {"last_axis": ((5, 33), [-1]), "middle_axis": ((3, 7, 5), [1]), "first_axis": ((9, 4), [0]),
             "two_axes": ((3, 7, 5), [0, 2]), "all_axes": ((3, 7, 5), [0, 1, 2]), "one_element": ((4, 1), [-1])}
    for case, (shape, axes) in cases.items():
        x = op.random(case).normal(*shape, shift=0.5)
        op.case(case, lambda x: x.mean(axes), [x], {"axes": axes, "keepdim": False})
        op.case(case + "_keepdim", lambda x: x.mean(axes, keepdim=True), [x], {"axes": axes, "keepdim": True})


def norm_inputs(random):
    """Inputs that tell apart the ways of adding eps and of computing a variance."""
    return {
        "basic": (random("basic").normal(5, 33), 1e-5),
        "rank3": (random("rank3").normal(2, 3, 48, scale=2.0, shift=0.3), 1e-6),
        "tiny_variance": (random("tiny_variance").normal(4, 31, scale=1e-4), 1e-5),
        "tiny_variance_offset": (random("tiny_variance_offset").normal(4, 31, scale=1e-3, shift=1.0), 1e-5),
        "constant_row": (torch.tensor([[0.75] * 17, [0.0] * 17, [-3.0] * 17], dtype=torch.float64), 1e-5),
        "large": (random("large").normal(3, 33, scale=1e3, shift=1e3), 1e-5),
        "big_eps": (random("big_eps").normal(3, 7), 0.5),
        "one_column": (random("one_column").normal(3, 1), 1e-5),
    }


def layer_norm(op):
    for case, (x, eps) in norm_inputs(op.random).items():
        width = x.shape[-1]
        weight = op.random(case + "/weight").normal(width, scale=0.3, shift=1.0)
        bias = op.random(case + "/bias").normal(width, scale=0.3)
        op.case(case, lambda x, w, b: F.layer_norm(x, (width,), w, b, eps), [x, weight, bias], {"eps": eps})


def rms_norm(op):
    for case, (x, eps) in norm_inputs(op.random).items():
        width = x.shape[-1]
        weight = op.random(case + "/weight").normal(width, scale=0.3, shift=1.0)

        # LlamaRMSNorm computes this in f32 whatever the input's type, so the formula is written out.
        def llama(x, weight):
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

        torch.testing.assert_close(llama(x, weight), F.rms_norm(x, (width,), weight, eps), rtol=1e-12, atol=1e-14)
        op.case(case, llama, [x, weight], {"eps": eps})


def special_values():
    values = [0.0, -0.0, 1e-30, -1e-30, 1e-8, -1e-8, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 12.0, -12.0, 20.0, -20.0,
              88.0, -88.0, 1e4, -1e4]
    return torch.tensor(values, dtype=torch.float32).double()


def activation(op, function):
    op.case("specials", function, [special_values()])
    op.case("random", function, [op.random("random").normal(5, 33, scale=2.0)])
    op.case("one_element", function, [op.random("one_element").normal(1)])


def swiglu(op):
    def function(gate, up):
        return F.silu(gate) * up

    gate = special_values()
    op.case("specials", function, [gate, op.random("specials/up").normal(*gate.shape)])
    for case, shape in {"random": (5, 33), "rank3": (2, 3, 40), "one_element": (1, 1)}.items():
        op.case(case, function, [op.random(case + "/gate").normal(*shape, scale=2.0), op.random(case + "/up").normal(*shape)])


def cross_entropy(op):
    def case(name, logits, labels, reduction="mean", label_smoothing=0.0, z_loss=0.0):
        labels64, valid = labels.long(), labels != IGNORE

        def function(logits):
            loss = F.cross_entropy(logits, labels64, ignore_index=IGNORE, label_smoothing=label_smoothing, reduction=reduction)
            if z_loss:
                loss = loss + z_loss * torch.logsumexp(logits, -1)[valid].pow(2).mean()
            return loss

        op.case(name, function, [logits],
                {"ignore_index": IGNORE, "label_smoothing": label_smoothing, "reduction": reduction, "z_loss": z_loss,
                 "valid_rows": int(valid.sum())},
                {"labels": labels, "lse": torch.logsumexp(logits, -1)})

    rows, vocab = 7, 257
    logits = op.random("logits").normal(rows, vocab, scale=3.0)
    labels = op.random("labels").integers(0, vocab, rows)
    labels[0], labels[1] = 0, vocab - 1
    some = labels.clone()
    some[[2, 4, 6]] = IGNORE
    one = torch.full_like(labels, IGNORE)
    one[5] = labels[5]
    for reduction in ("mean", "sum"):
        for smoothing in (0.0, 0.1):
            suffix = f"_{reduction}" + ("_smooth" if smoothing else "")
            case("plain" + suffix, logits, labels, reduction, smoothing)
            case("ignore" + suffix, logits, some, reduction, smoothing)
            case("one_valid" + suffix, logits, one, reduction, smoothing)
    # With every label ignored PyTorch's mean is 0/0; only the sum has a value to store.
    case("all_ignored_sum", logits[:3], torch.full((3,), IGNORE, dtype=torch.int32), "sum")
    for name, used in {"z_loss": labels, "z_loss_ignore": some, "z_loss_one_valid": one}.items():
        case(name, logits, used, z_loss=1e-2)
    case("z_loss_ignore_smooth", logits, some, label_smoothing=0.1, z_loss=1e-2)
    large = op.random("large").normal(5, 33, scale=3.0)
    large[0, 4], large[1, 4], large[2], large[3] = 1e4, -1e4, large[2] + 1e4, large[3] - 1e4
    large = large.float().double()
    case("large", large, torch.tensor([4, 4, 0, 32, 7], dtype=torch.int32))
    case("large_wrong", large, torch.tensor([5, 6, 1, 0, IGNORE], dtype=torch.int32))
    case("ties", torch.full((3, 17), 2.5, dtype=torch.float64), torch.tensor([0, 16, 3], dtype=torch.int32))
    case("one_row", op.random("one_row").normal(1, 101), torch.tensor([100], dtype=torch.int32))


def embedding(op):
    def case(name, vocab, width, ids):
        op.case(name, lambda weight: F.embedding(ids.long(), weight), [op.random(name).normal(vocab, width)], extra={"ids": ids})

    case("repeated", 11, 7, torch.tensor([[3, 3, 0, 10, 3], [0, 5, 10, 10, 3]], dtype=torch.int32))
    case("all_same", 5, 33, torch.full((2, 9), 4, dtype=torch.int32))
    case("single", 5, 8, torch.tensor([[2]], dtype=torch.int32))
    case("random", 101, 12, op.random("random/ids").integers(0, 101, 2, 65))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default"}


def inv_freq(head_dim, theta, scaling):
    """Inverse frequencies in f64, by the formulas of Llama 3.1 and of linear position scaling."""
    freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        low, high, old = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
        smooth = ((old * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return freq


def inv_freq_transformers(head_dim, theta, scaling):
    """Inverse frequencies in f32 by transformers' own code."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=65536,
                         rope_parameters={"rope_theta": theta} | scaling)
    rotary = LlamaRotaryEmbedding(config)
    assert rotary.attention_scaling == 1.0
    return rotary.inv_freq.float()


def rotate(x, positions, freq):
    """Half-split rotation of [B, T, H, D]: element i is paired with i + D/2."""
    angle = positions.double()[:, :, None, None] * freq
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def rope(op):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def case(name, shape, positions, scaling=DEFAULT, theta=1e4, offset=0):
        head_dim = shape[-1]
        freq, freq_f32 = inv_freq(head_dim, theta, scaling), inv_freq_transformers(head_dim, theta, scaling)
        torch.testing.assert_close(freq_f32.double(), freq, rtol=2e-6, atol=0)
        x = op.random(name).normal(*shape)
        angle = torch.cat([positions.double()[..., None] * freq] * 2, -1)
        theirs, _ = apply_rotary_pos_emb(x, x, angle.cos(), angle.sin(), unsqueeze_dim=2)
        torch.testing.assert_close(rotate(x, positions, freq), theirs, rtol=1e-12, atol=1e-12)
        op.case(name, lambda x: rotate(x, positions, freq), [x],
                {"style": "half_split", "theta": theta, "head_dim": head_dim, "position_offset": offset} | scaling,
                {"positions": positions, "inv_freq": freq, "inv_freq_f32": freq_f32})

    def span(batch, length, offset=0):
        return torch.arange(offset, offset + length, dtype=torch.int32).repeat(batch, 1)

    case("basic", (2, 7, 3, 8), span(2, 7))
    case("head_dim_4", (1, 33, 2, 4), span(1, 33))
    case("head_dim_2", (1, 5, 1, 2), span(1, 5))
    case("one_token", (1, 1, 2, 16), span(1, 1))
    case("offset", (1, 9, 2, 16), span(1, 9, 200), offset=200)
    case("far_offset", (1, 5, 1, 32), span(1, 5, 4090), offset=4090)
    case("theta_5e5", (1, 7, 2, 16), span(1, 7, 30), theta=5e5, offset=30)
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0]], dtype=torch.int32)
    case("document_positions", (2, 7, 2, 8), restarting)
    case("llama3", (1, 9, 2, 64), span(1, 9, 100), LLAMA3, offset=100)
    case("llama3_far", (1, 3, 1, 64), span(1, 3, 9000), LLAMA3, offset=9000)
    case("llama3_theta_5e5", (1, 3, 1, 64), span(1, 3, 50), LLAMA3, theta=5e5, offset=50)
    case("linear", (1, 9, 2, 64), span(1, 9, 100), LINEAR, offset=100)


def attention_forward(q, k, v, mask, scale):
    """Attention of [B, T, H, D] with a boolean mask [B, T, T]; returns out, probabilities and lse."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    seen = mask.any(-1)[:, None, :, None]
    prob = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", prob, v), prob, lse


def attention_backward(q, k, v, prob, dy, scale):
    """Gradients written out by hand, so that a row that sees nothing gets exactly zero."""
    batch, length, heads, width = k.shape
    group = q.shape[2] // heads
    k_all, v_all = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    dprob = torch.einsum("bqhd,bkhd->bhqk", dy, v_all)
    dscore = prob * (dprob - (dprob * prob).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscore, k_all)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscore, q).reshape(batch, length, heads, group, width).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", prob, dy).reshape(batch, length, heads, group, width).sum(3)
    return dq, dk, dv


def attention(op):
    def case(name, heads, kv_heads, length, width, batch=1, causal=True, doc_ids=None, scale_up=1.0):
        q = op.random(name + "/q").normal(batch, length, heads, width, scale=scale_up)
        k = op.random(name + "/k").normal(batch, length, kv_heads, width)
        v = op.random(name + "/v").normal(batch, length, kv_heads, width)
        dy = op.random(name + "/dy").normal(batch, length, heads, width)
        scale = width**-0.5
        mask = torch.ones(batch, length, length, dtype=torch.bool)
        if causal:
            mask &= torch.ones(length, length, dtype=torch.bool).tril()
        if doc_ids is not None:
            mask &= doc_ids[:, :, None] == doc_ids[:, None, :]
            mask &= (doc_ids != -1)[:, :, None]
        out, prob, lse = attention_forward(q, k, v, mask, scale)
        grads = attention_backward(q, k, v, prob, dy, scale)

        extra = {"lse": lse}
        if mask.any(-1).all():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), attn_mask=mask[:, None], enable_gqa=True)
            theirs = theirs.transpose(1, 2)
            torch.testing.assert_close(out, theirs.detach(), rtol=1e-11, atol=1e-12)
            for ours, other in zip(grads, torch.autograd.grad(theirs, leaves, dy)):
                torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-11)
        else:
            # The logarithm of an empty sum is not finite, so there is no lse to store.
            extra = {}
            hidden = ~mask.any(-1)
            assert (out[hidden] == 0).all() and (grads[0][hidden] == 0).all()
            unseen = ~mask.any(1)
            assert (grads[1][unseen] == 0).all() and (grads[2][unseen] == 0).all()
        attributes = {"causal": causal, "scale": scale, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width,
                      "masking": "none" if doc_ids is None else "document"}
        if doc_ids is not None:
            attributes["masked_doc_id"] = -1
            extra |= {"doc_ids": doc_ids, "mask": mask.int()}
        op.record(name, [q, k, v], out, dy, grads, attributes, extra)

    for heads, kv_heads in ((4, 2), (4, 1), (6, 2), (4, 4)):
        for length in (1, 7, 33, 65):
            for width in (8, 16):
                # T 65 with D 16 is large; one ratio is enough.
                if (length, width) != (65, 16) or (heads, kv_heads) == (4, 2):
                    case(f"causal_h{heads}_kv{kv_heads}_t{length}_d{width}", heads, kv_heads, length, width)
    case("causal_batch2", 6, 2, 7, 8, batch=2)
    case("causal_sharp", 4, 2, 17, 8, scale_up=30.0)
    case("full", 4, 2, 9, 8, causal=False)
    case("full_t33", 6, 2, 33, 8, causal=False)
    case("full_one_token", 4, 1, 1, 8, batch=2, causal=False)

    def documents(*rows):
        """Document numbers from lengths; a negative length is a run of masked tokens."""
        return torch.tensor([[doc if run > 0 else -1 for doc, run in enumerate(row) for _ in range(abs(run))] for row in rows], dtype=torch.int32)

    case("document", 4, 2, 33, 8, batch=2, doc_ids=documents([5, 1, 11, 16], [32, 1]))
    case("document_one_token_each", 4, 4, 7, 8, doc_ids=documents([1] * 7))
    case("document_full", 6, 2, 17, 8, causal=False, doc_ids=documents([6, 4, 7]))
    case("masked_rows", 4, 2, 17, 8, batch=2, doc_ids=documents([6, 4, -7], [-1, 9, -2, 5]))
    case("masked_rows_full", 4, 1, 9, 8, causal=False, doc_ids=documents([4, -1, 3, -1]))
    case("masked_all", 4, 2, 5, 8, batch=2, doc_ids=documents([-5], [5]))


def concat(op):
    def case(name, shapes, axis, constant=()):
        inputs = [op.random(f"{name}/{i}").normal(*shape) for i, shape in enumerate(shapes)]
        op.case(name, lambda *x: torch.cat(x, axis), inputs, {"axis": axis, "constant_inputs": list(constant)}, constant=constant)

    case("last_axis", [(3, 5), (3, 1), (3, 7)], -1)
    case("first_axis", [(2, 5), (4, 5)], 0)
    case("middle_axis", [(2, 3, 5), (2, 1, 5), (2, 4, 5)], 1)
    case("constant_middle", [(3, 5), (3, 2), (3, 7)], -1, constant=(1,))
    case("constant_first", [(2, 3, 5), (2, 4, 5)], 1, constant=(0,))
    case("constant_two", [(2, 5), (1, 5), (3, 5)], 0, constant=(0, 2))
    case("single", [(3, 5)], 0)


def broadcasting(op, function, away_from_zero=False):
    cases = {"same": ((5, 7), (5, 7)), "row": ((5, 7), (7,)), "column": ((5, 7), (5, 1)), "outer": ((1, 7), (5, 1)),
             "rank3": ((3, 1, 5), (4, 1)), "left_smaller": ((5,), (2, 3, 5)), "scalar": ((5, 7), ()), "scalar_left": ((), (3, 5)),
             "ones": ((1, 1), (3, 5)), "both_scalars": ((), ())}
    for case, (left, right) in cases.items():
        a, b = op.random(case + "/a").normal(*left), op.random(case + "/b").normal(*right)
        if away_from_zero:
            b = (b + torch.where(b < 0, -0.5, 0.5)).float().double()
        op.case(case, function, [a, b])


OPS = {
    "softmax": lambda op: softmax_like(op, torch.softmax),
    "log_softmax": lambda op: softmax_like(op, torch.log_softmax),
    "max": maximum,
    "mean": mean,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu_erf": lambda op: activation(op, lambda x: F.gelu(x, approximate="none")),
    "gelu_tanh": lambda op: activation(op, lambda x: F.gelu(x, approximate="tanh")),
    "silu": lambda op: activation(op, F.silu),
    "sigmoid": lambda op: activation(op, torch.sigmoid),
    "tanh": lambda op: activation(op, torch.tanh),
    "relu": lambda op: activation(op, F.relu),
    "swiglu": swiglu,
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "rope": rope,
    "attention": attention,
    "concat": concat,
    "add": lambda op: broadcasting(op, torch.add),
    "mul": lambda op: broadcasting(op, torch.mul),
    "div": lambda op: broadcasting(op, torch.div, away_from_zero=True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="crates/rb-autograd/golden", help="folder for <op>.safetensors")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--only", choices=sorted(OPS), help="write one operation")
    args = parser.parse_args()
    deterministic()
    for name, fill in OPS.items():
        if args.only in (None, name):
            op = Op(name, args.seed)
            fill(op)
            op.write(args.out)


if __name__ == "__main__":
    main()
