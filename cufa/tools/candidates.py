"""Tiles worth trying: those of the table, and their neighbours that a kernel and a card allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import product

from cufa.errors import UnsupportedError
from cufa.gpu.config import (
    LENGTHS,
    Config,
    Scores,
    blocks_fit,
    element_bytes,
    find_config,
    round_up,
    smem_bytes,
)
from cufa.gpu.device import Device

_HEAD_DIMS = range(32, 257, 32)
#: A multiprocessor's registers and threads.
_REGISTERS, _THREADS = 65536, 2048
_HALF, _TWICE = Fraction(1, 2), Fraction(2)
_STEPS = (_HALF, Fraction(3, 4), Fraction(1), Fraction(3, 2), _TWICE)


def _fa2_fwd(c: Config, size: int, d: int, dv: int) -> bool:
    half_a_slab = size == 2 and (d % 64 or dv % 64)  # is left over: tile/swizzled_tile.cuh
    return (
        c.block_m % (c.threads // 2) == 0  # a warp owns whole tiles of 16 rows
        and c.block_n % 16 == 0
        and c.threads % 64 == 0  # tile/copy_async.cuh: 8 rows at a time, at most 64
        and c.threads <= (256 if half_a_slab else 512)
        and c.stages == 1
    )


def _fa2_fwd_simt(c: Config, size: int, d: int, dv: int) -> bool:
    rows_are_whole = c.block_m * 16 % c.threads == 0  # half a warp owns them
    return rows_are_whole and c.block_n % 16 == 0 and c.stages == 1


def _fa1_fwd(c: Config, size: int, d: int, dv: int) -> bool:
    warps = c.threads // 32
    return (
        c.block_m & (c.block_m - 1) == 0
        and c.block_m % (8 * warps) == 0  # a warp owns whole tiles of 8 rows
        and c.block_n % (16 * warps) == 0
        and c.threads % 64 == 0
        and c.stages == 1
    )


def _fa3_fwd_sm90(c: Config, size: int, d: int, dv: int) -> bool:
    # Of a thread of the warpgroups that compute, which have 64 rows each: its own, and what the one
    # that loads gives up, all but 24 a thread.
    given = min(248, _REGISTERS // (c.threads * c.blocks_per_sm))
    registers = min(248, given + (given - 24) // (c.block_m // 64))
    scores, weights, output = c.block_n // 2, c.block_n // 4, dv // 2
    return scores + weights + output < registers


#: What each kernel asserts of its tile, given the size of an element in shared memory, and head_dim
#: and head_dim_v rounded up to a multiple of 32. A kernel without a line here gets every neighbour,
#: and its compiler says which will not do.
_RULES: dict[str, Callable[[Config, int, int, int], bool]] = {
    "fa3_fwd_sm90": _fa3_fwd_sm90,
    "fa2_fwd": _fa2_fwd,
    "fa2_fwd_simt": _fa2_fwd_simt,
    "fa1_fwd": _fa1_fwd,
}
#: All tiles of kernels where threads go with the rows of a block, so that neighbours have few.
_LISTED: dict[str, Sequence[Config]] = {
    "fa3_fwd_sm90": [
        Config(m, n, 128 * (m // 64 + 1), stages, blocks)
        for m, n, stages, blocks in product((64, 128, 192), range(32, 257, 32), (2, 4), (1, 2, 3))
    ],
}


def candidates(
    kernel: str, dtype: str, head_dim: int, head_dim_v: int, device: Device, first: Config
) -> list[Config]:
    """Tiles to try, those most like `first` first, `first` itself left out."""
    d, dv = round_up(head_dim, 32), round_up(head_dim_v, 32)
    if kernel in _LISTED:
        found = {*_LISTED[kernel]}
    else:
        found = {c for base in _of_table(kernel, dtype, device) for c in _neighbours(base)}
    rule, size = _RULES.get(kernel), element_bytes(kernel, dtype)
    fitting = [
        c
        for c in found - {first}
        if (rule is None or rule(c, size, d, dv)) and _fits(kernel, c, dtype, d, dv, device)
    ]
    return sorted(fitting, key=lambda c: (_distance(c, first), *c))


def _of_table(kernel: str, dtype: str, device: Device) -> set[Config]:
    """Every tile that the kernel has for this dtype, at whatever head dim."""
    found = set()
    for d, n, scores, causal in product(_HEAD_DIMS, LENGTHS, Scores, (False, True)):
        try:
            found.add(find_config(kernel, dtype, d, d, n, scores, causal, device))
        except UnsupportedError:
            continue
    return found


def _neighbours(base: Config) -> Iterable[Config]:
    """Half to twice as large in each direction, with half to twice the threads."""
    sizes = product(_STEPS, _STEPS, (_HALF, Fraction(1), _TWICE), (-1, 0, 1), (1, 2, 3, 4))
    for m, n, t, more_stages, blocks in sizes:
        whole = [base.block_m * m, base.block_n * n, base.threads * t]
        block_m, block_n, threads = (int(x) for x in whole)
        config = Config(block_m, block_n, threads, base.stages + more_stages, blocks)
        if whole == [block_m, block_n, threads] and min(config) >= 1:
            yield config


def _fits(kernel: str, c: Config, dtype: str, d: int, dv: int, device: Device) -> bool:
    """Whether a multiprocessor has room for the blocks that are to share it."""
    if c.threads % 32 or not 32 <= c.threads <= 1024 or c.threads * c.blocks_per_sm > _THREADS:
        return False
    wide = 2 if dtype == "float64" else 1
    accumulators = wide * c.block_m * (c.block_n + dv) / c.threads
    registers = min(255, _REGISTERS // (c.threads * c.blocks_per_sm))
    smem = smem_bytes(kernel, c, dtype, d, dv)
    return accumulators < registers and blocks_fit(c, smem, device.shared_memory)


def _distance(a: Config, b: Config) -> float:
    """How many doublings lie between two tiles."""
    return sum(
        abs(float(x) / y - 1) if x > y else abs(float(y) / x - 1) for x, y in zip(a, b, strict=True)
    )
