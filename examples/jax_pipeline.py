"""Attention by cufa inside a JAX program: between two jitted functions, and within one.

    pip install -e . jax
    python examples/jax_pipeline.py

For a GPU install "jax[cuda13]" and cufa's extra cuda13, or both for CUDA 12. Between jitted
functions the arrays stay on the device, in bfloat16, and are never copied. Within one,
`jax.pure_callback` takes them through host memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

import cufa

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave room for CuPy's pool
try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit('JAX is missing: pip install -e ".[pipelines]"')

Array = Any
SEQLEN, HEADS, HEAD_DIM = 512, 8, 64
WIDTH = HEADS * HEAD_DIM


@jax.jit
def project(x: Array, w_qkv: Array) -> tuple[Array, Array, Array]:
    """From tokens (seqlen, width) to q, k and v, each (heads, seqlen, head_dim)."""
    q, k, v = jnp.moveaxis((x @ w_qkv).reshape(SEQLEN, 3, HEADS, HEAD_DIM), 0, 2)
    return q, k, v


@jax.jit
def finish(x: Array, attended: Array, w_out: Array) -> Array:
    """The heads side by side, projected and added to the tokens."""
    return x + jnp.moveaxis(attended, 0, 1).reshape(x.shape) @ w_out


@jax.jit
def project_and_attend(x: Array, w_qkv: Array) -> Array:
    """Both in one jitted function, where cufa is a callback of the compiled program."""
    q, k, v = project(x, w_qkv)
    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)


def on_host(*qkv: Array) -> np.ndarray[Any, Any]:
    """A callback may not call JAX again, so NumPy in and out; on the CPU that copies nothing."""
    return cufa.attention(*map(np.asarray, qkv), causal=True)


def plain_attention(q: Array, k: Array, v: Array, xp: Any = jnp) -> Array:
    """softmax(q @ k.T / sqrt(head_dim)) @ v with every score at once, in the dtype of q."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores = xp.where(xp.tri(q.shape[-2], dtype=bool), scores, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def main() -> int:
    x = normal(0, SEQLEN, WIDTH)
    w_qkv, w_out = normal(1, WIDTH, 3 * WIDTH) / WIDTH**0.5, normal(2, WIDTH, WIDTH) / WIDTH**0.5
    q, k, v = project(x, w_qkv)
    attended = cufa.attention(q, k, v, causal=True)
    y = finish(x, attended, w_out)
    print(f"{type(y).__name__} {y.shape} {y.dtype} on {y.device}")

    exact = plain_attention(*(np.asarray(a, np.float64) for a in (q, k, v)), xp=np)
    plain_error = abs(np.asarray(plain_attention(q, k, v), np.float64) - exact).max()
    bound = 2 * plain_error + 2 * float(jnp.finfo(q.dtype).eps) * abs(exact).max()
    results = {
        "between jitted functions": attended,
        "within a jitted function": project_and_attend(x, w_qkv),
    }
    errors = {name: abs(np.asarray(a, np.float64) - exact).max() for name, a in results.items()}
    for name, error in errors.items():
        print(f"cufa {name}: error {error:.1e}, at most {bound:.1e}")
    return int(not all(error <= bound for error in errors.values()))  # a NaN fails


if __name__ == "__main__":
    sys.exit(main())
