"""Forward speed on the GPU beside torch's scaled_dot_product_attention, in one run.

    python benchmarks/gpu.py [--rounds 7] [--json FILE] [--only TEXT]

Each contender runs in short bursts after an idle gap, in a new random order each round, with
kernels queued behind a delay so that host time does not count; medians over the rounds, and the
spread between quartiles. TFLOP/s are 4 * seqlen**2 * head_dim * heads * batch over time, half of
that for causal. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cufa

TOKENS, HIDDEN = 16384, 2048
BURST_MS, IDLE_S, DELAY_CYCLES = 8.0, 0.03, 2_000_000

ROWS = [
    *[
        ("bfloat16", d, n, c)
        for d in (64, 128, 256)
        for n in (512, 2048, 8192, 16384)
        for c in (False, True)
    ],
    *[("float16", 128, 8192, c) for c in (False, True)],
    *[
        ("float32", d, n, c)
        for d, n in ((64, 2048), (128, 2048), (128, 8192))
        for c in (False, True)
    ],
    *[("float64", 128, 2048, False)],
]


def problem(dtype: str, head_dim: int, seqlen: int) -> tuple[list[Any], list[torch.Tensor]]:
    """q, k, v as CuPy arrays and the same memory as torch tensors."""
    tokens = TOKENS if dtype != "float64" else TOKENS // 4
    shape = (max(1, tokens // seqlen), HIDDEN // head_dim, seqlen, head_dim)
    tensors = [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)]
    return [to_cupy(t) for t in tensors], tensors


def to_cupy(t: torch.Tensor) -> Any:
    """The tensor's memory as a CuPy array."""
    if t.dtype == torch.bfloat16:
        import ml_dtypes

        return cupy.from_dlpack(t.view(torch.int16)).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(t)


def peers(dtype: str) -> dict[str, SDPBackend]:
    """torch's backends to stand beside, by dtype."""
    if dtype in ("float16", "bfloat16"):
        return {"torch FA2": SDPBackend.FLASH_ATTENTION}
    if dtype == "float32":
        return {"torch efficient": SDPBackend.EFFICIENT_ATTENTION}
    return {"torch unfused": SDPBackend.MATH}


def torch_call(tensors: list[torch.Tensor], causal: bool, backend: SDPBackend) -> Callable[[], Any]:
    """One call of torch's attention with one backend."""

    def call() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    return call


def timed(call: Callable[[], Any], count: int) -> float:
    """Milliseconds of one of `count` calls in a row, after an idle gap."""
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(DELAY_CYCLES)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


def compare(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Times of each contender, one a round, in random order."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, min(200, int(BURST_MS / timed(call, 1))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(timed(calls[name], counts[name]))
    return times


def host_times(rounds: int = 15, calls: int = 300) -> dict[str, float]:
    """Microseconds of host time for a call too small to fill the GPU, medians over rounds."""
    arrays, tensors = problem("float16", 64, 128)
    q, k, v = (a[:1, :1] for a in arrays)
    small = [t[:1, :1] for t in tensors]
    out = cupy.empty(q.shape, q.dtype)
    contenders: dict[str, Callable[[], Any]] = {
        "cufa": lambda: cufa.attention(q, k, v),
        "cufa out=": lambda: cufa.attention(q, k, v, out=out),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(*small),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                contenders[name]()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose text contains this")
    parser.add_argument("--json", help="write every figure here")
    options = parser.parse_args()
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CuPy {cupy.__version__}")
    for dtype, head_dim, seqlen, causal in ROWS:
        row = f"{dtype} d{head_dim} {seqlen} {'causal' if causal else 'full'}"
        if options.only not in row:
            continue
        arrays, tensors = problem(dtype, head_dim, seqlen)
        batch, heads = tensors[0].shape[:2]
        flop = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
        calls = {"cufa": lambda a=arrays, c=causal: cufa.attention(*a, causal=c)}
        for name, backend in peers(dtype).items():
            calls[name] = torch_call(tensors, causal, backend)
        times = compare(calls, options.rounds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        line = [f"{row:28}"]
        for name, t in times.items():
            low, _, high = statistics.quantiles(t, n=4)
            spread = 50 * (high - low) / medians[name]
            line.append(f"{name} {flop / medians[name] / 1e9:7.1f} TFLOP/s ±{spread:4.1f}%")
        peer = min(value for name, value in medians.items() if name != "cufa")
        line.append(f"ratio {peer / medians['cufa']:.3f}")
        print("   ".join(line), flush=True)
        results.append({"row": row, "flop": flop, "ms": times, "ratio": peer / medians["cufa"]})
    host = host_times()
    print("host µs a small call:", ", ".join(f"{name} {t:.1f}" for name, t in host.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": results, "host_us": host}, file)


if __name__ == "__main__":
    main()
