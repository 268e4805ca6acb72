"""Helpers that the golden scripts share: seeded random numbers and a safetensors writer.

Purpose   one source of random inputs that does not depend on the order of the cases, and files
          whose bytes do not change between two runs (the usual writer stores metadata in random
          order).
Seed      given by the caller; each case derives its own from (seed, crc32 of the case's name).
Versions  requirements.txt of the parent folder.
Command   imported by ops.py and llama.py; not run by itself.
"""

import json
import pathlib
import struct
import zlib

import numpy as np
import torch

# Order of data in the file: wider types first, so that every tensor is aligned.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.int32: "I32"}
WIDTHS = {"F64": 8, "F32": 4, "I32": 4}


def deterministic():
    """One thread and deterministic algorithms: sums are then taken in one order everywhere."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


class Random:
    """Random numbers of one case; every floating-point value is exact in f32."""

    def __init__(self, seed, name):
        self.generator = np.random.default_rng([seed, zlib.crc32(name.encode())])

    def normal(self, *shape, scale=1.0, shift=0.0):
        """Normal numbers in f64 that f32 represents exactly."""
        values = self.generator.standard_normal(shape) * scale + shift
        return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(torch.float64)

    def integers(self, low, high, *shape):
        """Integers of [low, high) as int32."""
        return torch.tensor(self.generator.integers(low, high, size=shape), dtype=torch.int32)


def write_safetensors(path, tensors, metadata):
    """Writes f64, f32 and i32 tensors and string metadata; the same input gives the same bytes."""
    order = list(WIDTHS)
    entries = sorted(tensors.items(), key=lambda item: (order.index(DTYPES[item[1].dtype]), item[0]))
    header = {"__metadata__": dict(sorted(metadata.items()))}
    chunks, offset = [], 0
    for name, tensor in entries:
        array = tensor.detach().contiguous().numpy()
        dtype = DTYPES[tensor.dtype]
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        assert len(data) == tensor.numel() * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))
