"""What is to be computed: every check on user input, once, and a frozen value without pointers.

``Signature`` is what a caller passed, reduced to hashable facts; ``Problem`` is its meaning.
Nothing is allocated, launched or written before ``make_problem`` has returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from cufa.dropout import check_heads
from cufa.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from cufa.options import FLOAT_DTYPES, ITEMSIZE, MAX_SEQLEN, dtype_name

Shape = tuple[int, ...]
Window = tuple[int | None, int | None] | None
Causal = bool | Literal["top_left"]


class ArrayFacts(NamedTuple):
    """What the checks need to know of one array: strides in bytes, device -1 for the CPU."""

    shape: Shape
    strides: Shape
    dtype: np.dtype[Any]
    device: int


class Signature(NamedTuple):
    """One call of `attention` as facts and options; the key of the caches of its meaning."""

    q: ArrayFacts
    k: ArrayFacts
    v: ArrayFacts
    mask: ArrayFacts | None
    bias: ArrayFacts | None
    alibi_slopes: ArrayFacts | None
    sink: ArrayFacts | None
    out: ArrayFacts | None
    causal: bool | str
    window: Window
    softcap: float | None
    scale: float | None
    layout: str
    return_lse: bool
    algorithm: str
    #: q, k, v and out start at multiples of 16 bytes; True on the CPU.
    aligned: bool
    dropout_p: float = 0.0


class Operand(NamedTuple):
    """An array as the kernels see it: four axes, strides in elements (0 along broadcast axes)."""

    shape: Shape
    strides: Shape
    dtype: str


@dataclass(frozen=True)
class Band:
    """Keys that causal and window leave: ``i + diagonal - left <= j <= i + diagonal + right``.

    `None` is an open side. `diagonal` is ``seqlen_k - seqlen_q`` (bottom-right) or 0 (top-left).
    """

    left: int | None
    right: int | None
    diagonal: int


@dataclass(frozen=True)
class Problem:
    """Attention on axes (batch, heads, seqlen, head_dim); see `cufa.attention` for the meaning."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    softcap: float | None
    #: 0: no dropout. The seed comes with the arrays.
    dropout_p: float
    band: Band
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    mask: Operand | None
    bias: Operand | None
    #: Axes (batch, heads, 1, 1), strides 0 where one slope serves all.
    alibi_slopes: Operand | None
    #: Axes (1, heads, 1, 1).
    sink: Operand | None
    return_lse: bool
    algorithm: str
    #: Shapes that the caller gets back.
    out_shape: Shape
    lse_shape: Shape
    #: Every row of q, k, v and out starts at a multiple of 16 bytes.
    aligned: bool

    @property
    def accumulator(self) -> str:
        """Dtype of scores, sums and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1


@lru_cache(maxsize=4096)
def make_problem(call: Signature) -> Problem:
    """Check a call and give its meaning.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
        The message names the argument, what was given, what is allowed and, where there is one,
        the way out.
    """
    q, k, v, layout = call.q, call.k, call.v, call.layout
    _check_devices(call)
    dtype = _check_dtypes(call)
    _check_ranks(call)
    batch, heads, seqlen_q, head_dim = _four_axes(q.shape, layout)
    _, kv_heads, seqlen_k, _ = _four_axes(k.shape, layout)
    head_dim_v = v.shape[-1]
    _check_sizes(call)

    if call.dropout_p:
        check_heads(batch, heads)
    score_shape = (batch, heads, seqlen_q, seqlen_k)
    out_shape = (*q.shape[:-1], head_dim_v)
    if call.out:
        _check_out(call.out, out_shape, q)
    out = (
        operand_of("out", call.out, layout)
        if call.out
        else contiguous_operand(out_shape, layout, dtype)
    )
    operands = [operand_of(name, facts, layout) for name, facts in (("q", q), ("k", k), ("v", v))]
    alibi, sink = call.alibi_slopes, call.sink
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        scale=_check_scale(call.scale, head_dim),
        softcap=_check_softcap(call.softcap, dtype),
        dropout_p=call.dropout_p,
        band=_band(call.causal, call.window, seqlen_q, seqlen_k),
        q=operands[0],
        k=operands[1],
        v=operands[2],
        out=out,
        mask=_broadcast("mask", call.mask, score_shape) if call.mask else None,
        bias=_broadcast("bias", call.bias, score_shape) if call.bias else None,
        alibi_slopes=_per_head("alibi_slopes", alibi, batch, heads) if alibi else None,
        sink=_per_head("sink", sink, None, heads) if sink else None,
        return_lse=call.return_lse,
        algorithm=call.algorithm,
        out_shape=out_shape,
        lse_shape=(batch, heads, seqlen_q)[4 - len(q.shape) :],
        aligned=call.aligned and all(rows_aligned(a) for a in (*operands, out)),
    )


def check_merge(arrays: list[ArrayFacts], layout: str) -> None:
    """Check the arguments of `cufa.merge`, in its order."""
    out_a, lse_a, out_b, lse_b = arrays
    for name, a in zip(("out_a", "lse_a", "out_b", "lse_b"), arrays, strict=True):
        check_float(name, a)
    for name, a in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if a.device != out_a.device:
            raise DeviceError(
                f"out_a is on {place_of(out_a.device)} and {name} is on {place_of(a.device)}"
            )
    if len(out_a.shape) not in (2, 3, 4):
        raise ShapeError(
            f"out_a has {len(out_a.shape)} axes, shape {out_a.shape}; it must have 2, 3 or 4"
        )
    if out_b.shape != out_a.shape:
        raise ShapeError(
            f"out_a has shape {out_a.shape} and out_b has {out_b.shape}; they must be equal"
        )
    rows = _four_axes(out_a.shape, layout)[4 - len(out_a.shape) : -1]
    for name, a in (("lse_a", lse_a), ("lse_b", lse_b)):
        if a.shape != rows:
            raise ShapeError(
                f"{name} has shape {a.shape}; for out_a of shape {out_a.shape} it must be {rows}"
            )
    if out_a.dtype != out_b.dtype:
        names = dtype_name(out_a.dtype), dtype_name(out_b.dtype)
        raise DTypeError(f"out_a is {names[0]} and out_b is {names[1]}; they must be equal")
    wanted = "float64" if dtype_name(out_a.dtype) == "float64" else "float32"
    for name, a in (("lse_a", lse_a), ("lse_b", lse_b)):
        if dtype_name(a.dtype) != wanted:
            raise DTypeError(
                f"{name} is {dtype_name(a.dtype)}; for out_a of {dtype_name(out_a.dtype)} it must "
                f"be {wanted}, as attention returns it"
            )


def _given(call: Signature) -> list[tuple[str, ArrayFacts]]:
    names = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sink", "out")
    return [(name, facts) for name in names if (facts := getattr(call, name)) is not None]


def _check_devices(call: Signature) -> None:
    for name, facts in _given(call):
        if facts.device != call.q.device:
            raise DeviceError(
                f"q is on {place_of(call.q.device)} and {name} is on {place_of(facts.device)}; all "
                "arrays must be on one device (cupy.asarray and cupy.asnumpy move them)"
            )


def place_of(device: int) -> str:
    return "the CPU (NumPy)" if device < 0 else f"GPU {device} (CuPy)"


def _check_dtypes(call: Signature) -> str:
    for name, facts in _given(call):
        if name != "mask":
            check_float(name, facts)
    dtype = dtype_name(call.q.dtype)
    for name in ("k", "v", "out"):
        facts = getattr(call, name)
        if facts is not None and dtype_name(facts.dtype) != dtype:
            raise DTypeError(
                f"q is {dtype} and {name} is {dtype_name(facts.dtype)}; their dtypes must be equal"
            )
    if call.mask is not None and dtype_name(call.mask.dtype) != "bool":
        raise DTypeError(
            f"mask is {dtype_name(call.mask.dtype)}; it must be bool, True where a key takes part "
            "(a mask of numbers to be added is a bias: pass it as bias=)"
        )
    return dtype


def check_float(name: str, facts: ArrayFacts) -> None:
    if dtype_name(facts.dtype) not in FLOAT_DTYPES:
        raise DTypeError(f"{name} is {dtype_name(facts.dtype)}; it takes {', '.join(FLOAT_DTYPES)}")
    if not facts.dtype.isnative:
        raise DTypeError(
            f"{name} is stored in the other byte order ({facts.dtype.str}); convert it with astype"
        )


def _check_ranks(call: Signature) -> None:
    rank = len(call.q.shape)
    if rank not in (2, 3, 4):
        raise ShapeError(
            f"q has {rank} axes, shape {call.q.shape}; it must have 2 (seqlen, head_dim), 3 (heads "
            "first) or 4 (batch and heads first)"
        )
    for name in ("k", "v"):
        shape = getattr(call, name).shape
        if len(shape) != rank:
            raise ShapeError(
                f"q has {rank} axes and {name} has {len(shape)}, shape {shape}; they must have as "
                "many"
            )


def _check_sizes(call: Signature) -> None:
    layout = call.layout
    q, k, v = (_four_axes(facts.shape, layout) for facts in (call.q, call.k, call.v))
    for name, other in (("k", k), ("v", v)):
        if q[0] != other[0]:
            raise ShapeError(
                f"q has batch {q[0]} and {name} has batch {other[0]}; they must be equal"
            )
    if q[3] != k[3]:
        raise ShapeError(f"q has head_dim {q[3]} and k has head_dim {k[3]}; they must be equal")
    if k[1] != v[1]:
        raise ShapeError(f"k has {k[1]} heads and v has {v[1]}; they must be equal")
    if k[2] != v[2]:
        raise ShapeError(f"k has seqlen {k[2]} and v has seqlen {v[2]}; they must be equal")
    if q[1] % k[1] if k[1] else q[1]:
        raise ShapeError(
            f"q has {q[1]} heads and k has {k[1]}; the first must be a multiple of the second "
            f"(grouped-query attention) in layout {layout!r}"
        )
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if shape[3] < 1:
            raise ShapeError(f"{name} has head_dim {shape[3]}; it must be at least 1")
        if shape[2] > MAX_SEQLEN:
            raise ShapeError(f"{name} has seqlen {shape[2]}; it must be at most {MAX_SEQLEN}")


def _check_out(out: ArrayFacts, shape: Shape, q: ArrayFacts) -> None:
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}; it must be {shape}")
    if 0 in shape:  # NumPy gives empty arrays strides of 0
        return
    if out.shape[-1] > 1 and out.strides[-1] != q.dtype.itemsize:
        raise ShapeError(
            f"out has stride {out.strides[-1]} bytes along its last axis; that axis must be "
            "contiguous"
        )
    check_apart("out", out)


def check_apart(name: str, a: ArrayFacts) -> None:
    """Raise if two elements of an array that is to be written lie in one place.

    Raises
    ------
    ShapeError
    """
    if 0 in a.shape:  # NumPy gives empty arrays strides of 0
        return
    # Axes from the innermost out: each must step over all that lies inside it.
    reach = a.dtype.itemsize - 1
    for stride, size in sorted(
        (abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1
    ):
        if stride <= reach:
            raise ShapeError(
                f"{name} has strides {a.strides} for shape {a.shape}: elements overlap in memory"
            )
        reach += stride * (size - 1)


def _check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise ArgumentError(f"scale is {scale}; it must be finite")
    return scale


def _check_softcap(softcap: float | None, dtype: str) -> float | None:
    if softcap is None:
        return None
    if not (math.isfinite(softcap) and softcap > 0):
        raise ArgumentError(
            f"softcap is {softcap}; it must be positive and finite, or None for no cap"
        )
    # Further out float32 would overflow, and could not tell the cap from none or from zero anyway.
    return softcap if dtype == "float64" else min(max(softcap, 1e-30), 1e30)


def _band(causal: bool | str, window: Window, seqlen_q: int, seqlen_k: int) -> Band:
    diagonal = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    return Band(left, right, diagonal)


def _four_axes(shape: Shape, layout: str, missing: int = 1) -> Shape:
    """Shape or strides as (batch, heads, seqlen, head_dim)."""
    if layout == "bshd" and len(shape) > 2:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return (missing,) * (4 - len(shape)) + shape


def operand_of(name: str, facts: ArrayFacts, layout: str) -> Operand:
    """An array of a call as the kernels see it; ShapeError if its strides are no whole elements."""
    shape, strides = _four_axes(facts.shape, layout), _four_axes(facts.strides, layout, missing=0)
    return Operand(shape, _in_elements(name, facts, shape, strides), dtype_name(facts.dtype))


def _in_elements(name: str, facts: ArrayFacts, shape: Shape, strides: Shape) -> Shape:
    """Strides in elements; 0 where they mean nothing: axes of one element, arrays of none."""
    meant = 0 not in shape
    steps = [
        stride if meant and size > 1 else 0 for stride, size in zip(strides, shape, strict=True)
    ]
    if any(step % facts.dtype.itemsize for step in steps):
        raise ShapeError(
            f"{name} has strides {facts.strides} bytes, not all multiples of its item size "
            f"{facts.dtype.itemsize}; pass a copy"
        )
    return tuple(step // facts.dtype.itemsize for step in steps)


def contiguous_operand(shape: Shape, layout: str, dtype: str) -> Operand:
    """An array that is yet to be made, contiguous, as the kernels will see it."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    shape4 = _four_axes(shape, layout)
    strides4 = _four_axes(tuple(reversed(strides)), layout, missing=0)
    return Operand(
        shape4, tuple(s if n > 1 else 0 for s, n in zip(strides4, shape4, strict=True)), dtype
    )


def rows_aligned(a: Operand) -> bool:
    """Whether all rows start at multiples of 16 bytes if the first one does."""
    return all(stride * ITEMSIZE[a.dtype] % 16 == 0 for stride in a.strides[:3])


def _broadcast(name: str, facts: ArrayFacts, target: Shape) -> Operand:
    shape = (1,) * (4 - len(facts.shape)) + facts.shape
    if len(facts.shape) > 4 or any(n not in (1, t) for n, t in zip(shape, target, strict=True)):
        raise ShapeError(
            f"{name} has shape {facts.shape}; it must broadcast to (batch, heads, seqlen_q, "
            f"seqlen_k) = {target}"
        )
    strides = (0,) * (4 - len(facts.shape)) + facts.strides
    return Operand(target, _in_elements(name, facts, shape, strides), dtype_name(facts.dtype))


def _per_head(name: str, facts: ArrayFacts, batch: int | None, heads: int) -> Operand:
    allowed = [(heads,)] if batch is None else [(heads,), (batch, heads)]
    if facts.shape not in allowed:
        raise ShapeError(
            f"{name} has shape {facts.shape}; it must be {' or '.join(map(str, allowed))}"
        )
    missing = 2 - len(facts.shape)
    shape = (1,) * missing + facts.shape + (1, 1)
    strides = (0,) * missing + facts.strides + (0, 0)
    return Operand(shape, _in_elements(name, facts, shape, strides), dtype_name(facts.dtype))
