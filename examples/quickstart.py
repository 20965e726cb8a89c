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
from contextlib import suppress
from typing import Any

import numpy as np

import cufa

Array = Any
REPEATS = 3
SAMPLED_ROWS = 32  # queries whose result is held against float64


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
            print('a GPU is here but CuPy is not: pip install -e ".[cuda12]" or ".[cuda13]"')
    return np, f"NumPy {np.__version__} on the CPU"


def plain_attention(q: Array, k: Array, v: Array, hide: Array) -> Array:
    """softmax(q @ k.T / sqrt(head_dim)) @ v; `hide` is 0 or, for a hidden key, -inf."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + hide
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def host(a: Array) -> np.ndarray[Any, Any]:
    return a if isinstance(a, np.ndarray) else a.get()


def seconds(xp: Any, call: Callable[[], Array]) -> float:
    """Time until the result is there."""
    start = time.perf_counter()
    call()
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return time.perf_counter() - start


def positive(text: str) -> int:
    """An option that is a positive integer, for argparse."""
    with suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--heads", type=positive, default=8)
    seqlen = "default: 2048 on the CPU, 4096 on a GPU"
    parser.add_argument("--seqlen", type=positive, help=seqlen)
    parser.add_argument("--head-dim", type=positive, default=64)
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
    hide = xp.zeros((seqlen, seqlen), dtype)
    if causal:
        hide = xp.triu(hide - np.inf, 1)

    def flash() -> Array:
        return cufa.attention(q, k, v, causal=causal)

    first = seconds(xp, flash)
    fast = min(seconds(xp, flash) for _ in range(REPEATS))
    scores_mb = options.batch * options.heads * seqlen**2 * dtype.itemsize / 1e6
    print(f"backend       {backend}")
    print(f"q, k, v       {shape} {dtype}{', causal' * causal}")
    print(f"cufa          {1e3 * fast:9.2f} ms   first call {1e3 * first:.0f} ms")
    try:
        slow = min(seconds(xp, lambda: plain_attention(q, k, v, hide)) for _ in range(REPEATS))
        print(f"plain         {1e3 * slow:9.2f} ms   {slow / fast:.1f} times as long as cufa")
    except (ImportError, RuntimeError) as reason:
        print(f"plain         not timed: CuPy's products need cuBLAS, see the README ({reason})")
    print(f"scores        {scores_mb:9.0f} MB   formed by plain attention, never by cufa")

    rows = np.unique(np.linspace(0, seqlen - 1, SAMPLED_ROWS, dtype=int))
    sample = [host(a) for a in (q[..., rows, :], k, v, hide[rows])]
    exact = plain_attention(*(a.astype(np.float64) for a in sample))
    plain_error = abs(plain_attention(*sample) - exact).max()
    error = abs(host(flash()[..., rows, :]) - exact).max()
    bound = 2 * plain_error + 2 * np.finfo(dtype).eps * abs(exact).max()
    print(f"error         {error:9.1e}      plain {plain_error:.1e}, against float64")
    if not error <= bound:  # a NaN fails
        print(f"wrong: the error is above {bound:.1e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
