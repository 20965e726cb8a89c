"""The structs of attn/params.cuh as NumPy dtypes, and their records for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cufa.dropout import threshold
from cufa.gpu.tensor_map import MAP_ALIGNMENT, MAP_BYTES
from cufa.gradients import BackwardProblem
from cufa.problem import Operand, Problem


class Buffers(NamedTuple):
    """The arrays of a launch. Their pointers stand in this order in the struct, one after another,
    so that one `pack_into` writes them; None becomes 0."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    mask: Any
    bias: Any
    alibi_slopes: Any
    sink: Any
    workspace: Any
    tickets: Any


class GradientBuffers(NamedTuple):
    """The further arrays of a launch of the backward pass; their pointers stand likewise, behind
    all of `struct Params`."""

    dout: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any


#: No tile of the backward pass has more queries, and each has a divisor of it.
ROWS_TOGETHER = 128
_STRIDES = np.dtype([(axis, "i8") for axis in ("batch", "head", "row")])
_DIVISOR = np.dtype([("value", "i4"), ("multiplier", "u4"), ("shift", "i4")])
_SCORE_STRIDES = np.dtype([(axis, "i8") for axis in ("batch", "head", "row", "key")])

_FIELDS = (
    [(f"{name}_map", f"V{MAP_BYTES}") for name in ("q", "k", "v")]
    + [(name, "u8") for name in Buffers._fields]
    + [(f"{name}_stride", _STRIDES) for name in ("q", "k", "v", "o")]
    + [(f"{name}_stride", _SCORE_STRIDES) for name in ("mask", "bias")]
    + [("mask_tiles_stride", _STRIDES)]
    + [(name, "i8") for name in ("alibi_stride_batch", "alibi_stride_head", "sink_stride_head")]
    + [(name, "f8") for name in ("scale", "softcap", "scale_over_softcap")]
    + [(name, _DIVISOR) for name in ("heads", "group", "tiles")]
    + [(name, "i4") for name in ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v")]
    + [(name, "i4") for name in ("rows_per_block", "diagonal", "left", "right")]
    + [(name, "i4") for name in ("tile_count", "section")]
    + [("dropout_seed", "u8"), ("kept_scale", "f8"), ("dropout_threshold", "u4")]
)
_BACKWARD_FIELDS = (
    [(name, "u8") for name in GradientBuffers._fields]
    + [(f"{name}_stride", _STRIDES) for name in ("dout", "dq", "dk", "dv")]
    + [("dbias_stride", _SCORE_STRIDES), ("kv_heads", _DIVISOR)]
    + [(name, "i4") for name in ("batch", "padded_rows")]
)


def _padded(fields: list[Any]) -> np.dtype[Any]:
    padding = -np.dtype(fields, align=True).itemsize % MAP_ALIGNMENT
    return np.dtype([*fields, ("padding", "u1", padding)], align=True)


PARAMS = _padded(_FIELDS)
BACKWARD_PARAMS = _padded([("forward", PARAMS), *_BACKWARD_FIELDS])
#: Where the pointers begin, after three maps, and where the seed of dropout is.
POINTERS = 3 * MAP_BYTES
SEED: int = PARAMS.fields["dropout_seed"][1]  # type: ignore[index]
#: Where those of `GradientBuffers` begin.
GRADIENT_POINTERS = PARAMS.itemsize


def make_params(
    problem: Problem,
    tiles: int,
    rows_per_block: int,
    section: int,
    mask_tiles_stride: Sequence[int] = (0, 0, 0),
) -> np.ndarray[Any, Any]:
    """The parameters of one launch, one opaque item, shape (1,); pointers, maps and seed are 0.

    `tiles` is the number of query tiles of one head, or of ranges of them, and `section` the number
    of query heads that are worked on together (`plan.section`); 0 if blocks do not take tiles as
    they come. `mask_tiles_stride` counts words of eight bytes, by batch, head and query tile.
    """
    p = np.zeros(1, PARAMS)
    for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("o", problem.out)):
        p[f"{name}_stride"] = operand.strides[:3]
    for name, scores in (("mask", problem.mask), ("bias", problem.bias)):
        if scores is not None:
            p[f"{name}_stride"] = scores.strides
    p["mask_tiles_stride"] = tuple(mask_tiles_stride)
    p["alibi_stride_batch"], p["alibi_stride_head"] = _head_strides(problem.alibi_slopes)
    p["sink_stride_head"] = _head_strides(problem.sink)[1]
    p["scale"] = problem.scale
    if problem.softcap is not None:
        p["softcap"] = problem.softcap
        p["scale_over_softcap"] = problem.scale / problem.softcap
    p["heads"], p["group"] = divisor(problem.heads), divisor(problem.group)
    p["tiles"] = divisor(tiles)
    p["rows_per_block"] = rows_per_block
    for name in ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        p[name] = getattr(problem, name)
    band = problem.band
    p["diagonal"], p["left"], p["right"] = band.diagonal, band.left or 0, band.right or 0
    if section:
        p["tile_count"], p["section"] = problem.batch * problem.heads * tiles, section
    p["kept_scale"] = 1 / (1 - problem.dropout_p)
    p["dropout_threshold"] = threshold(problem.dropout_p)
    return _opaque(p)


def make_backward_params(problem: BackwardProblem, tiles: int) -> np.ndarray[Any, Any]:
    """The parameters of one launch of the backward pass, likewise.

    `tiles` is the number of blocks of one head, be they of queries or of keys.
    """
    p = np.zeros(1, BACKWARD_PARAMS)
    forward = make_params(problem.forward, max(1, tiles), 0, 0)
    p["forward"] = forward.view(PARAMS)
    for name in ("dout", "dq", "dk", "dv"):
        p[f"{name}_stride"] = getattr(problem, name).strides[:3]
    p["dbias_stride"] = problem.dbias_strides
    p["kv_heads"] = divisor(max(1, problem.forward.kv_heads))
    p["batch"], p["padded_rows"] = problem.forward.batch, padded_rows(problem.forward)
    return _opaque(p)


def padded_rows(problem: Problem) -> int:
    """Rows of one head in the workspace of the backward pass: whole query tiles of any kernel."""
    return -(-problem.seqlen_q // ROWS_TOGETHER) * ROWS_TOGETHER


def _opaque(p: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same bytes as one opaque item: a structured array is copied field by field, by NumPy and
    by CuPy, which takes longer than all the rest of a call."""
    return p.view(np.dtype((np.void, p.dtype.itemsize)))


def divisor(value: int) -> tuple[int, int, int]:
    """`struct Divisor`: ``n // value`` is ``n * multiplier >> shift`` for all n below 2**31."""
    shift = 31 + (value - 1).bit_length()
    return value, -(-(1 << shift) // value), shift


def _head_strides(operand: Operand | None) -> tuple[int, int]:
    return (0, 0) if operand is None else (operand.strides[0], operand.strides[1])
