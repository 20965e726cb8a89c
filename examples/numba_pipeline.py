"""Attention by cufa after a Numba kernel: on device arrays if Numba can use a GPU, else on NumPy's.

    pip install -e . numba
    python examples/numba_pipeline.py

For a GPU install numba-cuda too, and cufa's extra cuda12 or cuda13. Numba's device arrays have the
CUDA array interface, by which cufa takes them as they are. It returns a CuPy array, since Numba has
no importer of DLPack, and Numba's kernels take that as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import cufa

try:
    from numba import cuda, njit
except ImportError:
    sys.exit('Numba is missing: pip install -e ".[pipelines]"')

Array = Any
HEADS, SEQLEN, HEAD_DIM = 8, 512, 64
ROPE_BASE = 10_000.0


def rotate_pair(x: Array, out: Array, head: int, row: int, i: int) -> None:
    """Rotary position of one pair of elements (Su et al., arXiv:2104.09864, eq. 34)."""
    half = x.shape[2] // 2
    angle = row * ROPE_BASE ** (-i / half)
    cos, sin = math.cos(angle), math.sin(angle)
    a, b = x[head, row, i], x[head, row, half + i]
    out[head, row, i] = a * cos - b * sin
    out[head, row, half + i] = a * sin + b * cos


def make_rotate(on_gpu: bool) -> Callable[[Array, Array], None]:
    """A function from x to out, both (heads, seqlen, head_dim): rotary positions, by Numba."""
    if not on_gpu:
        pair = njit(rotate_pair)

        @njit
        def on_cpu(x: Array, out: Array) -> None:
            for head in range(x.shape[0]):
                for row in range(x.shape[1]):
                    for i in range(x.shape[2] // 2):
                        pair(x, out, head, row, i)

        return on_cpu

    pair = cuda.jit(device=True)(rotate_pair)

    @cuda.jit
    def kernel(x: Array, out: Array) -> None:
        i, row, head = cuda.grid(3)
        if row < x.shape[1] and i < x.shape[2] // 2:
            pair(x, out, head, row, i)

    return kernel[(math.ceil(HEAD_DIM / 64), math.ceil(SEQLEN / 8), HEADS), (32, 8)]


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(q @ k.T / sqrt(head_dim)) @ v with every score at once, in the dtype of q."""
    scores = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf).astype(q.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def main() -> int:
    on_gpu = all(map(find_spec, ("numba_cuda", "cupy"))) and cuda.is_available()
    place, empty_like = (cuda.to_device, cuda.device_array_like) if on_gpu else (np.array,) * 2
    rotate = make_rotate(on_gpu)
    x = np.random.default_rng(0).standard_normal((3, HEADS, SEQLEN, HEAD_DIM), np.float32)
    x_q, x_k, v = map(place, x)
    q, k = empty_like(x_q), empty_like(x_k)
    rotate(x_q, q)
    rotate(x_k, k)
    # Runs after Numba's kernels, without waiting for them here.
    out = cufa.attention(q, k, v, causal=True)

    q, k, v = (a.copy_to_host() if on_gpu else a for a in (q, k, v))
    print(f"q is a {type(x_q).__name__}, the result a {type(out).__name__}")
    exact = plain_attention(*(a.astype(np.float64) for a in (q, k, v)))
    error = abs((out.get() if on_gpu else out) - exact).max()
    bound = 2 * abs(plain_attention(q, k, v) - exact).max()
    bound += 2 * np.finfo(np.float32).eps * abs(exact).max()
    print(f"cufa after a Numba kernel: error {error:.1e}, at most {bound:.1e}")
    return int(not error <= bound)  # a NaN fails


if __name__ == "__main__":
    sys.exit(main())
