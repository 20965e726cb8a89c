"""Attention in float64 for single query rows, where the arrays are, and how far rounding may lead.

The formula is that of `cufa.reference` and the bound that of `cufa.bounds`, one row at a time and
in expressions that NumPy and CuPy share and that need no cuBLAS. Only results come to the host.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cufa.arrays import Arrays, four_axes
from cufa.bounds import (
    growths,
    height_above_last,
    may_take_fa3,
    rounding,
    smallest,
    spacing,
)
from cufa.problem import Problem

Array = NDArray[np.float64]
#: Batch, head, query.
Row = tuple[int, int, int]


class Rows(NamedTuple):
    """What is true of some rows, and what was given: axes (rows,) and (rows, head_dim_v)."""

    #: Of the finite scores of visible keys; infinite if there are none.
    score_min: Array
    score_max: Array
    #: Whether there is a key whose score is not minus infinity: 1 or 0.
    seen: Array
    #: ``exp(entropy)`` of the weights of the keys; NaN if there are none.
    effective_keys: Array
    lse: Array
    lse_bound: Array
    #: NaN if none was given, as `given_out`.
    given_lse: Array
    out: Array
    out_bound: Array
    given_out: Array


def exact_rows(
    xp: Any, problem: Problem, arrays: Arrays, lse: Any, layout: str, sample: list[Row]
) -> Rows:
    """The sampled rows of the call that `problem` describes, and those of `arrays.out` and `lse`.

    One row takes O(keys * (head_dim + head_dim_v)) time and memory, ``keys`` being those that
    causal and window leave.
    """
    formula = _Formula(xp, problem, arrays, lse, layout)
    d_v, dtype = problem.head_dim_v, arrays.q.dtype
    facts = len(Rows._fields) - 3
    table = np.empty((0, facts + 3 * d_v))
    if sample:
        with np.errstate(all="ignore"):  # overflow, 0 * inf and log(0) mean what IEEE says
            lines = xp.stack([formula.row(*row) for row in sample])
        table = np.asarray(lines.get() if hasattr(lines, "get") else lines)
    out, bound, given = np.split(table[:, facts:], 3, axis=1)
    found = Rows._make([*table[:, :facts].T, out, bound, given])
    largest = np.where(np.isfinite(out), abs(out), 0).max(1, keepdims=True, initial=0)
    bound = bound + 2 * spacing(dtype, largest) + problem.seqlen_k * smallest(dtype)
    bound = np.where(found.seen[:, None] == 0, 0, bound)
    return found._replace(out_bound=bound)


class _Formula:
    """The arrays of a call by batch, head and query."""

    def __init__(self, xp: Any, problem: Problem, arrays: Arrays, lse: Any, layout: str) -> None:
        batch, heads = problem.batch, problem.heads
        scores = (batch, heads, problem.seqlen_q, problem.seqlen_k)

        def spread(a: Any, shape: tuple[int, ...]) -> Any:
            return None if a is None else xp.broadcast_to(a, shape)

        self.xp, self.problem = xp, problem
        self.eps, self.tiniest, self.unit = rounding(arrays.q.dtype)
        self.fa3 = may_take_fa3(arrays.q.dtype, problem.algorithm)
        self.sums = (math.sqrt(problem.seqlen_k) + 8) * self.eps
        self.q, self.k, self.v = (four_axes(a, layout) for a in (arrays.q, arrays.k, arrays.v))
        self.mask, self.bias = spread(arrays.mask, scores), spread(arrays.bias, scores)
        self.slopes = spread(arrays.alibi_slopes, (batch, heads))
        self.sink = spread(arrays.sink, (batch, heads))
        self.out = None if arrays.out is None else four_axes(arrays.out, layout)
        self.lse = None if lse is None else lse.reshape(scores[:3])

    def row(self, b: int, h: int, i: int) -> Any:
        """The fields of `Rows` one after the other, `out_bound` without the result's rounding."""
        xp, problem, d_v = self.xp, self.problem, self.problem.head_dim_v
        given_lse = self._number(np.nan if self.lse is None else self.lse[b, h, i])
        given = xp.full(d_v, np.nan) if self.out is None else self.out[b, h, i].astype("float64")
        sink = self._number(-np.inf if self.sink is None else self.sink[b, h])
        keys = self._visible(i)
        if keys.start >= keys.stop:
            nothing = [self._number(x) for x in (np.inf, -np.inf, 0, np.nan)]
            facts = [*nothing, sink, self._lse_bound(0, sink), given_lse]
            return xp.concatenate([xp.stack(facts), xp.zeros(2 * d_v), given])

        s, dots, later = self._scores(b, h, i, keys)
        top = xp.maximum(s.max(), sink)
        top = xp.where(top == -np.inf, 0, top)
        lse = top + xp.log(xp.exp(s - top).sum() + xp.exp(sink - top))
        base = xp.where(s.max() == -np.inf, 0, lse)
        p = xp.exp(s - base)
        delta = dots + 4 * (later + abs(base))
        if self.fa3:
            delta = delta + height_above_last(xp, s)
        lost = s > -np.inf if self.q.dtype == np.float64 else p > 0
        average, off = self._weight_bounds(p, xp.where(p == 0, 0, self.eps * delta), lost)

        finite, share = xp.isfinite(s), p / p.sum()
        facts = [
            xp.where(finite, s, np.inf).min(),
            xp.where(finite, s, -np.inf).max(),
            (s.max() != -np.inf).astype("float64"),
            xp.exp(-(share * xp.log(xp.where(share > 0, share, 1))).sum()),
            lse,
            self._lse_bound(average, lse),
            given_lse,
        ]
        v = self.v[b, h // problem.group, keys].astype("float64")
        out, bound = (p[:, None] * v).sum(0), (off[:, None] * abs(v)).sum(0)
        if self.fa3:
            bound = bound + (self.unit + self.tiniest * lost.sum()) * abs(out)
        return xp.concatenate([xp.stack(facts), out, bound, given])

    def _visible(self, i: int) -> slice:
        """The keys that causal and window leave to a query."""
        band, seqlen_k = self.problem.band, self.problem.seqlen_k
        first = 0 if band.left is None else max(0, i + band.diagonal - band.left)
        last = seqlen_k if band.right is None else min(seqlen_k, i + band.diagonal + band.right + 1)
        return slice(first, last)

    def _scores(self, b: int, h: int, i: int, keys: slice) -> tuple[Any, Any, Any]:
        """Scores of a row; errors of its dot products by eps, and sizes of what comes after."""
        xp, problem = self.xp, self.problem
        q = self.q[b, h, i].astype("float64")
        k = self.k[b, h // problem.group, keys].astype("float64")
        s = problem.scale * (k * q).sum(-1)
        size = abs(problem.scale) * (abs(k) * abs(q)).sum(-1)
        probable, certain = growths(problem.head_dim)
        alike = (q == q[0]).all() & (k == k[:, :1]).all(-1)
        dots = (xp.where(alike, certain, probable) + 4) * size
        later = xp.zeros_like(s)
        if problem.softcap is not None:
            s = problem.softcap * xp.tanh(s / problem.softcap)
            later = xp.minimum(problem.softcap, size)
        if self.slopes is not None:
            j = xp.arange(keys.start, keys.stop)
            distance = abs(i + problem.seqlen_k - problem.seqlen_q - j).astype("float64")
            slope = self._number(self.slopes[b, h])
            s, later = s - slope * distance, later + abs(slope) * distance
        if self.bias is not None:
            bias = self.bias[b, h, i, keys].astype("float64")
            s, later = s + bias, later + abs(bias)
        if self.mask is not None:
            s = xp.where(self.mask[b, h, i, keys], s, -np.inf)
        return s, dots, later

    def _weight_bounds(self, p: Any, delta: Any, lost: Any) -> tuple[Any, Any]:
        """The average error of a row's scores, and how far each of its weights may be off, by
        those of its scores and by whether it may vanish."""
        xp = self.xp
        average = (p * delta).sum()
        moved = xp.where(p == 0, 0, xp.minimum(p * xp.expm1(delta + average), 1))
        return average, moved + (self.sums + self.unit) * p + self.tiniest * lost

    def _lse_bound(self, average: Any, lse: Any) -> Any:
        return average + self.sums + 4 * self.eps * abs(lse)

    def _number(self, x: Any) -> Any:
        """A number, or an array of one, as a float64 array without axes."""
        return self.xp.asarray(x).astype("float64")
