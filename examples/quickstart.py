"""Attention by cufa beside plain attention: same result, how long each takes, how exact each is.

    python examples/quickstart.py
    python examples/quickstart.py --seqlen 8192 --head-dim 128 --full

Runs on the GPU if CuPy is installed and sees one, else in NumPy on the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

import cufa

Array = Any
REPEATS = 3
SAMPLED_ROWS = 64  # queries whose result is held against float64


def pick_backend() -> tuple[Any, str]:
    """CuPy where it can run, else NumPy; and what to call it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where there is no driver
            import cupy
        if cupy.is_available():
            name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
            return cupy, f"CuPy {cupy.__version__} on {name}"
    except ImportError:
        if shutil.which("nvidia-smi"):
            print("a GPU is here but CuPy is not: pip install 'cufa[cuda12]' or 'cufa[cuda13]'")
    return np, f"NumPy {np.__version__} on the CPU"


def plain_attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """softmax(q @ k.T / sqrt(head_dim)) @ v, with the whole score matrix in memory."""
    scores = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
    scores[..., ~visible] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def host(a: Array) -> np.ndarray[Any, Any]:
    return a if isinstance(a, np.ndarray) else a.get()


def seconds(xp: Any, call: Callable[[], Array]) -> tuple[Array, float]:
    """The result of a call, and the time until it is there."""
    start = time.perf_counter()
    result = call()
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return result, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seqlen", type=int, help="default: 2048 on the CPU, 4096 on a GPU")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        help="default: float32 on the CPU, float16 on a GPU",
    )
    parser.add_argument("--full", action="store_true", help="every query sees every key")
    options = parser.parse_args(arguments)

    xp, backend = pick_backend()
    seqlen = options.seqlen or (2048 if xp is np else 4096)
    dtype = np.dtype(options.dtype or ("float32" if xp is np else "float16"))
    causal = not options.full
    shape = (options.batch, options.heads, seqlen, options.head_dim)
    rng = np.random.default_rng(0)
    q, k, v = (xp.asarray(rng.standard_normal(shape), dtype) for _ in range(3))
    visible = xp.tri(seqlen, dtype=bool) | (not causal)

    def flash() -> Array:
        return cufa.attention(q, k, v, causal=causal)

    def plain() -> Array:
        return plain_attention(q, k, v, visible)

    first = seconds(xp, flash)[1]
    (out, fast), (reference, slow) = (
        min((seconds(xp, call) for _ in range(REPEATS)), key=itemgetter(1))
        for call in (flash, plain)
    )
    rows = np.unique(np.linspace(0, seqlen - 1, SAMPLED_ROWS, dtype=int))
    exact = plain_attention(
        *(host(a).astype(float) for a in (q[..., rows, :], k, v)), host(visible)[rows]
    )
    error, plain_error = (abs(host(a[..., rows, :]) - exact).max() for a in (out, reference))
    bound = 2 * plain_error + 2 * np.finfo(dtype).eps * abs(exact).max()

    scores_mb = options.batch * options.heads * seqlen**2 * dtype.itemsize / 1e6
    print(f"backend       {backend}")
    print(f"q, k, v       {shape} {dtype}{', causal' * causal}")
    print(f"cufa          {1e3 * fast:9.2f} ms   (first call {1e3 * first:.0f} ms)")
    print(f"plain         {1e3 * slow:9.2f} ms   {slow / fast:.1f} times that")
    print(f"scores        {scores_mb:9.0f} MB   formed by plain attention, never by cufa")
    print(f"error         {error:9.1e}      plain {plain_error:.1e}, against float64")
    if not error <= bound:  # a NaN fails
        print(f"wrong: the error is above {bound:.1e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
