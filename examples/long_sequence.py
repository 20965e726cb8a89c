"""Attention over a sequence that need not fit into a card's memory, from host memory or files.

    python examples/long_sequence.py
    python examples/long_sequence.py --tokens 65536 --from-file sequence --check
    python examples/long_sequence.py --tokens 1000000 --max-bytes 4GiB --check

Queries, keys and values stay in host memory, or in the files of a folder, and go in blocks through
the card that CuPy finds, else through NumPy on the CPU. It prints how long that takes beside the
same attention with everything on the card, if there is room, what memory it takes, and with --check
how far sampled rows are from float64.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import cufa
from cufa import numerics
from cufa.tools.console import counting

Array = np.ndarray[Any, Any]
LONGEST_SECONDS = 60  # on the CPU, where the same is not computed once more if it takes longer
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def find_cupy() -> Any:
    """CuPy where it can run, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where there is no driver
            import cupy
        return cupy if cupy.is_available() else None
    except ImportError:
        if shutil.which("nvidia-smi"):
            print('a GPU is here but CuPy is not: pip install -e ".[cuda12]" or ".[cuda13]"')
        return None


def make_arrays(shape: tuple[int, ...], dtype: Any, folder: Path | None) -> dict[str, Array]:
    """q, k and v of normal noise, and out: in memory, or in files of a folder."""
    rng, arrays = np.random.default_rng(0), {}
    for name in ("q", "k", "v", "out"):
        if folder is None:
            arrays[name] = np.empty(shape, dtype)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            arrays[name] = np.memmap(folder / name, dtype, "w+", shape=shape)
        for head in arrays[name] if name != "out" else ():
            for start in range(0, len(head), 1 << 16):  # so much noise at once
                part = head[start : start + (1 << 16)]
                part[...] = rng.standard_normal(part.shape, np.float32)
    return arrays


def warm_up(arrays: list[Array], causal: bool, backward: bool) -> None:
    """Compile the kernels, of whole pairs of blocks and of those that causal cuts."""
    long = cufa.LongSequenceAttention(4096)
    out, lse = long(*arrays, causal=causal, return_lse=True)
    if backward:
        long.backward(out, *arrays, out, lse, causal=causal)


def seconds(call: Callable[[], object], cupy: Any) -> float:
    """Time until the result is there."""
    start = time.perf_counter()
    call()
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()
    return time.perf_counter() - start


def peak_bytes() -> int | None:
    """What this process has held at most, files that it has mapped included; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_seconds(
    cupy: Any, arrays: dict[str, Array], causal: bool, patience: float
) -> float | None:
    """Time of `cufa.attention` with all arrays on the card, or in place on the CPU; None if there
    is no room, or no `patience`."""
    q, k, v, out = arrays.values()
    if patience < 0:
        return None
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
        free, _ = cupy.cuda.runtime.memGetInfo()
        if 1.1 * sum(a.nbytes for a in arrays.values()) > free:
            return None
        q, k, v, out = (cupy.asarray(a) for a in (q, k, v, out))

    def attend() -> None:
        cufa.attention(q, k, v, causal=causal, out=out if cupy is not None else None)

    return min(seconds(attend, cupy) for _ in range(1 if cupy is None else 3))


def positive(text: str) -> int:
    """An option that is a positive integer, for argparse."""
    with suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")


def size_in_bytes(text: str) -> int:
    """An option such as 512MiB, for argparse."""
    digits = text.rstrip("KMGiB")
    with suppress(ValueError, KeyError):
        size = float(digits) * UNITS[text[len(digits) :]]
        if math.isfinite(size) and size >= 1:
            return int(size)
    raise argparse.ArgumentTypeError(f"{text} is not a size such as 512MiB or 4GiB")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=positive, help="default: 8192 on the CPU, 262144 on a GPU")
    add("--heads", type=positive, default=8)
    add("--head-dim", type=positive, default=64)
    add("--dtype", choices=("float16", "bfloat16", "float32"), help="default: float16")
    add("--max-bytes", type=size_in_bytes, help="of the card's memory; default: 1GiB")
    add("--block-size", type=positive, help="default: the longest blocks that fit")
    add("--causal", action=argparse.BooleanOptionalAction, default=True)
    add("--from-file", type=Path, metavar="FOLDER", help="q, k, v and out are files made in it")
    add("--backward", action="store_true", help="the gradients too")
    add("--check", action="store_true", help="hold sampled rows against float64")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    cupy, causal = find_cupy(), options.causal
    tokens = options.tokens or (8192 if cupy is None else 262144)
    shape = (options.heads, tokens, options.head_dim)
    if options.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401, teaches NumPy the name
    arrays = make_arrays(shape, np.dtype(options.dtype or "float16"), options.from_file)
    q, k, v, out = arrays.values()
    blocks = {"block_size": options.block_size, "max_bytes": options.max_bytes}
    try:
        long = cufa.LongSequenceAttention(**blocks)
        plan = long.plan(q, k, v, causal=causal)
        if options.backward:  # takes more than the forward pass: refuse it before that
            long.plan(q, k, v, causal=causal, backward=True)
    except cufa.ArgumentError as error:
        sys.exit(f"--max-bytes: {error}")

    if cupy is not None:
        warm_up([a[:, :8192] for a in (q, k, v)], causal, options.backward)
        cupy.get_default_memory_pool().free_all_blocks()
    with counting("attention") as progress:
        long = cufa.LongSequenceAttention(**blocks, progress=progress)
        lse = np.empty(0)

        def attend() -> None:
            nonlocal lse
            lse = long(q, k, v, causal=causal, out=out, return_lse=True)[1]

        taken = seconds(attend, cupy)
    where = "NumPy on the CPU"
    if cupy is not None:
        where = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    operations = 4 * options.heads * tokens**2 * options.head_dim / (2 if causal else 1)
    print(f"backend       {where}")
    print(f"q, k, v       {shape} {q.dtype}{', causal' * causal}, {3 * q.nbytes / 1e6:.0f} MB")
    print(
        f"blocks        {plan.heads} heads, {plan.queries} queries, {plan.keys} keys; "
        f"{plan.pairs} pairs, planned {plan.bytes / 1e6:.0f} MB"
    )
    print(f"cufa          {taken:9.3f} s    {operations / taken / 1e12:.3g} TFLOP/s")
    if cupy is None:
        print(
            f"memory        {(peak_bytes() or math.nan) / 1e6:9.0f} MB   of this process, at most"
        )
    else:
        held = cupy.get_default_memory_pool().total_bytes()
        print(f"card memory   {held / 1e6:9.0f} MB   of CuPy's pool, at most")
    if options.backward:
        with counting("gradients") as progress:
            long = cufa.LongSequenceAttention(**blocks, progress=progress)
            back = seconds(lambda: long.backward(v, q, k, v, out, lse, causal=causal), cupy)
        print(f"gradients     {back:9.3f} s    {2.5 * operations / back / 1e12:.3g} TFLOP/s")
    patience = LONGEST_SECONDS - taken if cupy is None else math.inf
    resident = resident_seconds(cupy, arrays, causal, patience)
    if resident is None:
        print("resident      not timed: no room, or too slow")
    else:
        print(f"resident      {resident:9.3f} s    cufa has {resident / taken:.0%} of its speed")
    if options.check:
        report = numerics.report(q, k, v, out=out, lse=lse, rows=16, causal=causal)
        print(report)
        if not report.within_rounding:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
