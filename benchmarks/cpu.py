"""Speed and memory on the CPU beside attention as one writes it in NumPy, in one run.

    python benchmarks/cpu.py [--rounds 5] [--only TEXT]

"plain" is ``softmax(q @ k.T * scale) @ v``; "in place" is the same without a new array at every
step. The contenders take turns, in a new random order each round; medians over the rounds, and half
the distance between quartiles. Memory is the peak of what NumPy allocates beyond the result.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import cufa

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("8 heads, d64, 4096", dict(heads=8, seqlen=4096)),
    ("8 heads, d64, 4096, causal", dict(heads=8, seqlen=4096, causal=True)),
    ("8 heads, d64, 4096, bias", dict(heads=8, seqlen=4096, bias=True)),
    ("8 heads, d64, 4096, float16", dict(heads=8, seqlen=4096, dtype="float16")),
    ("8 heads, d128, 2048", dict(heads=8, seqlen=2048, head_dim=128)),
    ("8 heads, d64, 1024", dict(heads=8, seqlen=1024)),
    ("8 heads, d64, 256", dict(heads=8, seqlen=256)),
    ("64 batches, 8 heads, d64, 64", dict(batch=64, heads=8, seqlen=64)),
    ("65537 batches, d8, 1 x 2", dict(batch=65537, heads=1, seqlen_q=1, seqlen=2, head_dim=8)),
    (
        "decode, 32 heads on 8, d128, 8192",
        dict(heads=32, kv_heads=8, seqlen_q=1, seqlen=8192, head_dim=128),
    ),
]


def plain(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
    """Attention as a formula."""
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    if bias is not None:
        s = s + bias
    if hidden is not None:
        s = np.where(hidden, -np.inf, s)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def in_place(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
    """The same with one array of scores."""
    s = (q * q.dtype.type(q.shape[-1] ** -0.5)) @ k.swapaxes(-1, -2)
    if bias is not None:
        s += bias
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    return (s @ v) / total


def contenders(
    seqlen: int,
    heads: int,
    batch: int = 1,
    kv_heads: int | None = None,
    seqlen_q: int | None = None,
    head_dim: int = 64,
    dtype: str = "float32",
    causal: bool = False,
    bias: bool = False,
) -> dict[str, Callable[[], Any]]:
    """One call of each on the same arrays."""
    rng = np.random.default_rng(0)
    kv_heads, seqlen_q = kv_heads or heads, seqlen_q or seqlen
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim), np.float32).astype(dtype)
    k, v = rng.standard_normal((2, batch, kv_heads, seqlen, head_dim), np.float32).astype(dtype)
    added = rng.standard_normal((seqlen_q, seqlen), np.float32) if bias else None
    hidden = np.triu(np.ones((seqlen_q, seqlen), bool), 1) if causal else None

    def numpy_call(formula: Callable[..., Any]) -> Any:
        # Grouped heads read the same keys: one product serves them all. BLAS takes no float16.
        grouped = q.reshape(batch, kv_heads, -1, head_dim)
        wide = (a.astype(np.float32, copy=False) for a in (grouped, k, v))
        return formula(*wide, added, hidden).astype(dtype, copy=False)

    return {
        "plain": lambda: numpy_call(plain),
        "in place": lambda: numpy_call(in_place),
        "cufa": lambda: cufa.attention(q, k, v, causal=causal, bias=added),
    }


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that was allocated at one time during a call, less its result."""
    tracemalloc.start()
    result = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return int(peak - result.nbytes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose text contains this")
    options = parser.parse_args()
    print(f"NumPy {np.__version__}, {os.cpu_count()} processors")
    for name, sizes in ROWS:
        if options.only not in name:
            continue
        calls = contenders(**sizes)
        memory = {who: peak_bytes(call) for who, call in calls.items()}  # warms up, too
        times: dict[str, list[float]] = {who: [] for who in calls}
        for _ in range(options.rounds):
            for who in random.sample(list(calls), len(calls)):
                begin = time.perf_counter()
                calls[who]()
                times[who].append((time.perf_counter() - begin) * 1e3)
        line = [f"{name:34}"]
        for who, t in times.items():
            low, middle, high = statistics.quantiles(t, n=4)
            line.append(
                f"{who} {middle:8.2f} ms ±{(high - low) / 2:7.2f}, {memory[who] / 2**20:7.1f} MiB"
            )
        speedup = statistics.median(times["plain"]) / statistics.median(times["cufa"])
        print("   ".join(line), f"  plain / cufa {speedup:.2f}", flush=True)


if __name__ == "__main__":
    main()
