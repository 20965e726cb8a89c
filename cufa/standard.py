"""Standard attention, ``algorithm="standard"``: the formula in array expressions, unfused.

Source: Vaswani et al. 2017, eq. 1. Written once for NumPy and CuPy; what differs between them, the
matrix products and the memory that is free, is a `Library`. It holds every score at once, so its
memory is O(seqlen_q * seqlen_k): the baseline that FlashAttention is measured against.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cufa.arrays import Arrays, distinct, four_axes, narrowed
from cufa.dropout import drop
from cufa.errors import OutOfMemoryError
from cufa.options import ITEMSIZE
from cufa.problem import Operand, Problem


class Library(Protocol):
    """An array library and the memory that its arrays lie in."""

    @property
    def xp(self) -> Any:
        """numpy or cupy."""

    def product(self, a: Any, b: Any) -> Any:
        """``a @ b`` on axes (batch, kv_heads, group, rows, columns), those of one element repeated.

        Contiguous, summed and returned in float32 (float64 if `b` is); `a`, which may be in that
        dtype too, may be rounded to that of `b` first.
        """

    def free_bytes(self) -> int | None:
        """What can be allocated; None if unknown."""

    def place(self) -> str:
        """Where that is."""


def run(library: Library, problem: Problem, arrays: Arrays, layout: str, seed: Any = None) -> Any:
    """`cufa.attention` on arrays that `problem` has been checked for; `seed` is that of dropout.

    Raises
    ------
    OutOfMemoryError
        The scores do not fit; see `score_bytes`. Raised before `out` is written.
    """
    needed = score_bytes(problem)
    free = library.free_bytes()
    if free is not None and needed > free:
        raise _too_large(problem, needed, f"{_gb(free)} are free on {library.place()}")
    try:
        return _attention(library, problem, arrays, layout, seed)
    except MemoryError as error:  # CuPy's own is one too
        raise _too_large(problem, needed, f"an allocation failed ({error})") from error


def score_bytes(problem: Problem) -> int:
    """Bytes that matrices of scores take at their peak.

    ``batch * heads * seqlen_q * seqlen_k * wide``, where ``wide`` is 4, or 8 for float64, and the
    largest of what comes and goes beside it: 2 for each weight, rounded to a 16-bit dtype; ``wide``
    for each product of a slope and a distance, and for each element of a bias that is not of that
    dtype; 1 for each element of a mask. Not counted: the result, copies of the inputs, matrices of
    (seqlen_q, seqlen_k) alone, which those of dropout are, and twice a bias that is narrowed from
    float64.
    """
    wide = ITEMSIZE[problem.accumulator]
    by_head = problem.seqlen_q * problem.seqlen_k
    scores = problem.batch * problem.heads * by_head
    beside = [2 * scores if ITEMSIZE[problem.dtype] == 2 else 0]
    if problem.alibi_slopes:
        beside.append(wide * _elements(problem.alibi_slopes) * by_head)
    if problem.bias and problem.bias.dtype != problem.accumulator:
        beside.append(wide * _elements(problem.bias))
    if problem.mask:
        beside.append(_elements(problem.mask))
    return wide * scores + max(beside)


def _elements(a: Operand) -> int:
    """Elements that differ in place."""
    return math.prod(n for n, stride in zip(a.shape, a.strides, strict=True) if stride)


def _too_large(problem: Problem, needed: int, reason: str) -> OutOfMemoryError:
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return OutOfMemoryError(
        f'algorithm="standard" holds scores of shape {shape}, which take {_gb(needed)}, and '
        f'{reason}; algorithm="fa2" holds none'
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB ({count} bytes)"


def _attention(library: Library, problem: Problem, arrays: Arrays, layout: str, seed: Any) -> Any:
    xp, wide = library.xp, problem.accumulator
    out = arrays.out
    if out is None:
        out = xp.empty(problem.out_shape, arrays.q.dtype)
    lse = xp.empty(problem.lse_shape, wide)
    if out.size:
        by_head = (problem.batch, problem.heads, problem.seqlen_q)
        q, k, v, out4 = (four_axes(a, layout) for a in (arrays.q, arrays.k, arrays.v, out))
        q = q.reshape(problem.batch, problem.kv_heads, problem.group, *q.shape[2:])
        k, v = k[:, :, None], v[:, :, None]  # one for all heads of a group
        with np.errstate(all="ignore"):  # overflow, 0 * inf and log(0) mean what IEEE says
            s = library.product(q, k.swapaxes(-1, -2))  # S = Q K^T
            _modify_scores(xp, problem, arrays, s.reshape(*by_head, -1))
            m, total = _softmax(xp, s)  # s becomes P = exp(S - m)
            if problem.dropout_p:
                drop(xp, seed, problem.dropout_p, s.reshape(*by_head, -1))
            o = library.product(s, v).reshape(*by_head, -1)  # O = P V
            m, total = (a.reshape(*by_head, 1) for a in (m, total))
            weight, lse4 = _normalise(xp, m, total, _per_head(arrays.sink, wide))
            o *= weight / (1 - problem.dropout_p)
            out4[...] = o.astype(out.dtype)
        lse[...] = lse4.reshape(problem.lse_shape)
    return (out, lse) if problem.return_lse else out


def _per_head(a: Any, dtype: str) -> Any:
    """ALiBi slopes or sinks, against axes (batch, heads, rows, columns)."""
    return None if a is None else narrowed(a, dtype)[..., None, None]


def _modify_scores(xp: Any, problem: Problem, arrays: Arrays, s: Any) -> None:
    """Scale, softcap, ALiBi, bias and masks, in this order, in place.

    `s` has axes (batch, heads, seqlen_q, seqlen_k).
    """
    s *= problem.scale
    if problem.softcap is not None:
        s /= problem.softcap
        xp.tanh(s, out=s)
        s *= problem.softcap
    i = xp.arange(problem.seqlen_q, dtype="int32")[:, None]
    j = xp.arange(problem.seqlen_k, dtype="int32")
    if arrays.alibi_slopes is not None:
        distance = abs(i + (problem.seqlen_k - problem.seqlen_q) - j).astype(s.dtype)
        s -= _per_head(arrays.alibi_slopes, s.dtype.name) * distance
    if arrays.bias is not None:
        s += narrowed(distinct(arrays.bias), s.dtype.name)
    if arrays.mask is not None:
        xp.copyto(s, -np.inf, where=~distinct(arrays.mask))
    band = problem.band
    if band.right is not None:
        xp.copyto(s, -np.inf, where=j > i + (band.diagonal + band.right))
    if band.left is not None:
        xp.copyto(s, -np.inf, where=j < i + (band.diagonal - band.left))


def _softmax(xp: Any, s: Any) -> tuple[Any, Any]:
    """Turn scores into ``exp(s - m)`` in place; the maximum `m` and the sum of each row.

    A row that sees no key has m minus infinity and sum 0.
    """
    if not s.shape[-1]:
        return xp.full((*s.shape[:-1], 1), -np.inf, s.dtype), xp.zeros((*s.shape[:-1], 1), s.dtype)
    m = s.max(axis=-1, keepdims=True)
    s -= xp.where(m == -np.inf, xp.zeros_like(m), m)  # -inf - -inf is NaN
    xp.exp(s, out=s)
    return m, s.sum(axis=-1, keepdims=True)


def _normalise(xp: Any, m: Any, total: Any, sink: Any) -> tuple[Any, Any]:
    """What a row of P V must be multiplied by, and lse.

    The sink comes last: weights must not vanish in 16 bits beside one that is large.
    """
    top = m if sink is None else xp.maximum(m, sink)
    top = xp.where(top == -np.inf, xp.zeros_like(top), top)
    weight = xp.exp(m - top)
    total = total * weight
    if sink is not None:
        total += xp.exp(sink - top)
    # A row that saw no key gives 0, not 0 / 0.
    return weight / xp.where(total == 0, xp.ones_like(total), total), top + xp.log(total)


class _NumPy:
    """NumPy arrays in host memory; 16-bit inputs are multiplied in float32."""

    xp = np

    def product(self, a: Any, b: Any) -> Any:
        wide = np.float64 if b.dtype == np.float64 else np.float32
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = np.empty((*lead, a.shape[-2], b.shape[-1]), wide)  # matmul's own may be transposed
        return np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False), out=out)

    def free_bytes(self) -> int | None:
        """What Linux counts as available, its caches included; elsewhere all memory there is."""
        with contextlib.suppress(OSError):
            found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
            if found:
                return int(found[1]) * 1024
        with contextlib.suppress(OSError, AttributeError, ValueError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None

    def place(self) -> str:
        return "this machine"


NUMPY = _NumPy()
