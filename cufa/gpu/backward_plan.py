"""From the gradients that are wanted to launches: which kernels, which tiles, grids, bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cufa.errors import UnsupportedError
from cufa.gpu.config import (
    BWD_QUERIES,
    BWD_QUERIES_MMA,
    BWD_ROWS,
    BWD_SINK,
    Config,
    round_up,
)
from cufa.gpu.device import Device
from cufa.gpu.params import make_backward_params, padded_rows
from cufa.gpu.plan import MAX_GRID, KernelKey, Plan, Step, bare_key, key_for
from cufa.gpu.registry import select_backward
from cufa.gradients import BackwardProblem

#: Of the kernels that see no scores: query rows that a block has, and its threads.
PLAIN_TILES = {
    BWD_ROWS: Config(32, 32, 128, 1, 1),
    BWD_QUERIES: Config(32, 32, 256, 1, 1),
    BWD_QUERIES_MMA: Config(64, 32, 128, 1, 1),
    BWD_SINK: Config(32, 32, 512, 1, 1),
}


class _Sizes(NamedTuple):
    """What the workspace holds, in elements of the accumulator's type."""

    #: `row_numbers` of every row.
    rows: int
    #: Sums of dQ; 0 if a kernel by queries computes it.
    dq_sums: int


def make_backward_plan(problem: BackwardProblem, device: Device) -> Plan:
    """The launches for gradients on a card; none if no query head sends any back.

    Raises
    ------
    UnsupportedError
        No kernel serves it, or a launch would have more than 2**31 - 1 blocks.
    """
    if not problem.forward.batch * problem.forward.heads:
        return Plan(())
    steps = (
        Step(key, grid, make_backward_params(problem, tiles))
        for key, grid, tiles in _launches(problem, device)
        if _checked(grid, key.kernel)
    )
    return Plan(tuple(steps), sum(workspace_of(problem)))


def workspace_of(problem: BackwardProblem) -> _Sizes:
    """Numbers of each query row, and head_dim more where dQ is gathered; rows of a head are rounded
    up to a multiple of 128, head_dim to one of 32."""
    forward = problem.forward
    rows = forward.batch * forward.heads * padded_rows(forward)
    gathered = rows * round_up(forward.head_dim, 32) * _is_gathered(problem)
    return _Sizes(rows * row_numbers(forward.dtype), gathered)


def row_numbers(dtype: str) -> int:
    """What the workspace holds of each row beside sums: lse, D and of float32 whether it splits."""
    return 3 if dtype == "float32" else 2


def _is_gathered(problem: BackwardProblem) -> bool:
    """Whether the blocks that own keys add up dQ: one of them alone would be as long a way."""
    return "q" in problem.wrt and not problem.deterministic and _by_keys(problem)


def _by_keys(problem: BackwardProblem) -> bool:
    return "k" in problem.wrt or "v" in problem.wrt


def _launches(problem: BackwardProblem, device: Device) -> list[tuple[KernelKey, int, int]]:
    """Of each launch the unit, its blocks, and how many tiles it divides a head into."""
    forward, wrt = problem.forward, problem.wrt
    heads, gathered = forward.batch * forward.heads, _is_gathered(problem)

    def unit(part: str) -> KernelKey:
        key = key_for(select_backward(part, problem, device), forward, device)
        return key._replace(sink=False, lse=False)

    def around(kernel: str, dq: bool = False, result: str | None = None) -> KernelKey:
        dims = forward.head_dim, forward.head_dim_v
        return plain_key(kernel, device.arch, forward.dtype, *dims, forward.aligned, dq, result)

    rows = padded_rows(forward) // PLAIN_TILES[BWD_ROWS].block_m
    found = [(around(BWD_ROWS, dq=gathered), heads * rows, rows)]
    if _by_keys(problem):
        key = unit("keys")._replace(dq=gathered, dk="k" in wrt, dv="v" in wrt)
        tiles = -(-forward.seqlen_k // key.config.block_n)
        found.append((key, forward.batch * forward.kv_heads * tiles, tiles))
    if gathered:
        sums = BWD_QUERIES_MMA if key.kernel == "fa2_bwd" else BWD_QUERIES
        tiles = -(-forward.seqlen_q // PLAIN_TILES[sums].block_m)
        found.append((around(sums), heads * tiles, tiles))
    elif "q" in wrt:
        key = unit("queries")._replace(dq=True)
        tiles = -(-forward.seqlen_q // key.config.block_m)
        found.append((key, heads * tiles, tiles))
    if "bias" in wrt:
        key = unit("bias")._replace(result=problem.dbias_dtype)
        found.append((key, _bias_tiles(problem, key.config), 1))
    if "sink" in wrt:
        found.append((around(BWD_SINK, result=problem.dsink_dtype), forward.heads, 1))
    return found


def _bias_tiles(problem: BackwardProblem, config: Config) -> int:
    """Tiles of dbias; 0 if it has no element."""
    forward = problem.forward
    tiles = (
        forward.batch,
        forward.heads,
        -(-forward.seqlen_q // config.block_m),
        -(-forward.seqlen_k // config.block_n),
    )
    varying = (n for n, step in zip(tiles, problem.dbias_strides, strict=True) if step)
    return math.prod(varying) if problem.has_dbias else 0


def plain_key(
    kernel: str,
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    aligned: bool,
    dq: bool = False,
    result: str | None = None,
) -> KernelKey:
    """Of a kernel that goes around those that see scores."""
    facts: dict[str, Any] = {"dtype": dtype, "dq": dq, "result": result}
    facts["aligned"] = aligned and kernel != BWD_SINK
    if dq or kernel in (BWD_QUERIES, BWD_QUERIES_MMA):
        facts["head_dim"] = round_up(head_dim, 32)
    if kernel == BWD_ROWS:
        facts["head_dim_v"] = round_up(head_dim_v, 32)
    return bare_key(kernel, arch, PLAIN_TILES[kernel], **facts)


def _checked(grid: int, kernel: str) -> bool:
    """Whether there is anything to launch."""
    if grid > MAX_GRID:
        raise UnsupportedError(
            f"{kernel} would have {grid} blocks; a launch takes at most {MAX_GRID}: split the batch"
        )
    return grid > 0
