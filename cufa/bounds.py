"""The exact answer to one call of attention, and how far rounding may lead from it.

Imports NumPy and the oracle only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cufa import reference

Array = NDArray[np.float64]

#: Weights below this many times the smallest normal number may count as zero: e**8, and what comes
#: of rounding its logarithm.
VANISHING = 3000

#: A score that is further above an earlier maximum is not weighed by that: float32 ends at e**88.7.
FARTHEST = 89


class Error(NamedTuple):
    """How far a result is from the exact answer, at its worst."""

    #: Largest error of an element of `out`, of those that are finite in the exact answer.
    absolute: float
    #: Largest error of an element of `out` or lse as a fraction of its bound; wrong if above 1.
    fraction: float


class Exact(NamedTuple):
    """An answer in float64 and, for each element, the error that its dtype excuses."""

    out: Array
    lse: Array
    out_bound: Array
    lse_bound: Array
    #: Of the arrays that the answer belongs to.
    dtype: np.dtype[Any]


def exact(
    q: Any,
    k: Any,
    v: Any,
    *,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    algorithm: str = "auto",
    **options: Any,
) -> Exact:
    """The oracle's answer to one call of `cufa.attention`, with a bound on each element's error.

    Parameters
    ----------
    q, k, v : array
        NumPy arrays of one float dtype.
    algorithm : str, default "auto"
        The answer is the same for all; "standard" may take results that are denormal for zero.
    sink, dropout_p, dropout_seed, **options
        Those of `cufa.reference.attention`.

    Notes
    -----
    The bound is what an algorithm may lose that keeps scores, sums and lse in the accumulator
    (float32, or float64 for float64 inputs) and rounds weights and result to the dtype of `q`. With
    ``eps`` the distance of the accumulator's numbers at 1, and ``u`` the dtype's unit roundoff:

    - Scores: a dot product of d terms, in any order, is off by ``sqrt(d) * eps * |q| @ |k|``: the
      probable bound of Higham and Mary 2019. The certain one has ``d / 2`` in place of the root and
      would let TF32 pass for float32; it is met, and stands, only where all terms are one number,
      so that their roundings are alike too. Scale, cap, ALiBi, bias, the change to base 2 and the
      subtraction of the maximum are a few roundings more: ``4 * eps`` times the size of what they
      handle.
    - Weights by an old maximum, in 16 bits: Hopper's kernel weighs a block of keys by the maximum
      of later ones, by which the row's largest score may be up to `FARTHEST` high; that difference
      is rounded, and so is the one by which weights get small again: ``eps`` times the height of
      the largest score above that of the last key seen, at most.
    - Weights: ``p * expm1(delta)`` for scores that are off by ``delta``, the key's own error and,
      through the sum, the average one.
    - Sums over keys: ``(sqrt(seqlen_k) + 8) * eps * p @ |v|``; 8 for exponentials and rescaling.
    - Weights rounded to 16 bits: ``u * p @ |v|``, and half of the smallest number for each, or the
      accumulator's smallest normal number, below which weights may be flushed to zero. In float64
      those of the oracle are, while what a kernel has summed by an earlier maximum is not.
    - A sum of rounded weights, by which Hopper's kernel may divide: all that again, with ``|out|``
      in place of ``|v|``.
    - Results below the normal numbers: the accumulator's smallest number for each key, since a
      product with so small a value is rounded to a multiple of it.
    - The result: two units in the last place of the largest element of its row. Of algorithm
      "standard" the accumulator's smallest normal number too: what an array library computes
      below it may be zero, as with CuPy, which compiles its kernels so.
    - Dropout: the errors of the weights that are kept, times what these are multiplied by; that is
      exact but for a rounding or two, of the 8 above. What vanishes does so before, and as zero
      may count weights below 3000 of the accumulator's smallest normal numbers: they are nothing
      beside the row's largest, but dropout may leave nothing else.
    - lse: the average ``delta``, the sum's ``(sqrt(seqlen_k) + 8) * eps``, and ``4 * eps * |lse|``.

    Measuring another implementation's error instead would be a lottery: on a small problem that one
    may be exact by luck, and with scores of hundreds in 16 bits it is wrong altogether.
    """
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    out, lse = reference.attention(q, k, v, sink=sink, **dropout, **options)
    scores = reference.scores(q, k, **options)
    layout, rank = options.get("layout", "bhsd"), q.ndim
    out4 = reference.four_axes(out, layout)
    lse4 = lse.reshape((1,) * (4 - rank) + lse.shape)[..., None]
    values = abs(reference.per_query_head(reference.four_axes(v, layout), scores.shape[1]))
    eps, tiniest, unit = rounding(q.dtype)
    fa3 = may_take_fa3(q.dtype, algorithm)
    sums = (math.sqrt(scores.shape[3]) + 8) * eps

    with np.errstate(all="ignore"):
        unseen = scores.max(-1, keepdims=True, initial=-np.inf) == -np.inf
        base = np.where(unseen, 0, lse4)
        p = np.exp(scores - base)
        delta = score_errors(q, k, base, **options)
        if fa3:
            delta = delta + eps * height_above_last(np, scores)
        delta = np.where(p == 0, 0, delta)
        average = (p * delta).sum(-1, keepdims=True)
        moved = np.where(p == 0, 0, np.minimum(p * np.expm1(delta + average), 1))
        counts: Any = 1
        if dropout_p:
            counts = reference.kept(dropout_seed, dropout_p, scores.shape) / (1 - dropout_p)
            tiniest = max(tiniest, VANISHING * smallest_normal(q.dtype))
        bound = (counts * moved) @ values
        lost = scores > -np.inf if q.dtype == np.float64 else p > 0
        bound += (sums + unit) * ((counts * p) @ values) + tiniest * ((counts * lost) @ values)
        finite = np.where(np.isfinite(out4), abs(out4), 0)
        if fa3:
            bound += (unit + tiniest * lost.sum(-1, keepdims=True)) * finite
        bound += 2 * spacing(q.dtype, finite.max(-1, keepdims=True, initial=0))
        vanishing = scores.shape[3] * smallest(q.dtype)
        if algorithm == "standard":
            vanishing += smallest_normal(q.dtype)
        bound += vanishing / (1 - dropout_p)
        bound = np.where(unseen, 0, bound)
        lse_bound = average + sums + 4 * eps * abs(lse4)

    bound = bound.swapaxes(1, 2) if layout == "bshd" and rank > 2 else bound
    return Exact(out, lse, bound.reshape(out.shape), lse_bound.reshape(lse.shape), q.dtype)


def merged(whole: Exact, *parts: Exact, layout: str = "bhsd") -> Exact:
    """`whole` with the bounds of `cufa.merge`, of two parts or of one after another, in place of
    those of one call.

    Parameters
    ----------
    whole : Exact
        Over all keys.
    *parts : Exact
        Each over some of the keys; together over all.
    layout : {"bhsd", "bshd"}
        Of all of them.

    Notes
    -----
    A part that is off by its bound is off by as much times its weight, ``exp(lse_a - lse)``. To the
    bounds of the whole, which have the rounding of the result, come for each part:

    - its own bound, times its weight;
    - what the errors of all lse move its weight by, relative to it, times its weight and output;
    - in an array library that takes for zero what it computes below the accumulator's smallest
      normal number, as CuPy does: that number times its output, for the weight; and that number
      again, for the product of the two;
    - where there are more than two, a few roundings for each merge that it goes through.
    """

    def by_row(values: Array) -> Array:
        turned = layout == "bshd" and whole.out.ndim > 2
        return (values.swapaxes(-1, -2) if turned else values)[..., None]

    base = np.where(whole.lse == -np.inf, 0, whole.lse)
    moved: Any = 4 * rounding(whole.dtype)[0] * (len(parts) - 2)
    for part in parts:
        moved = moved + np.where(part.lse == -np.inf, 0, part.lse_bound)
    lost, bound = smallest_normal(whole.dtype), whole.out_bound
    for part in parts:
        weight, size = by_row(np.exp(part.lse - base)), abs(part.out)
        bound = bound + weight * (part.out_bound + by_row(moved) * size)
        bound += lost * (size + (size > 0))
    return whole._replace(out_bound=bound, lse_bound=whole.lse_bound + moved)


def worst_error(result: Any, expected: Exact) -> Error:
    """How far ``out`` or ``(out, lse)``, of the shapes expected, is from the exact answer."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    fraction = fractions(out, expected.out, expected.out_bound).max(initial=0)
    if lse is not None:
        fraction = max(fraction, fractions(lse, expected.lse, expected.lse_bound).max(initial=0))
    with np.errstate(invalid="ignore"):
        off = abs(to_numpy(out).astype(np.float64) - expected.out)
    return Error(float(off[np.isfinite(expected.out)].max(initial=0)), float(fraction))


def fractions(got: Any, want: Array, bound: Array) -> Array:
    """Error of each element as a fraction of its bound; above 1 is wrong.

    Where the exact answer is NaN or infinite, 0 if the result is the same, else infinity. Where it
    may be beyond what the result's dtype can hold, infinity of its sign is right too.
    """
    got = to_numpy(got)
    most = largest(got.dtype)
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = abs(got - want)
        part = off / bound
        part = np.where(np.isnan(part), np.where(off <= bound, 0, np.inf), part)  # 0 / 0, NaN
        beyond = np.isinf(got) & (got * want > 0) & (abs(want) + bound >= most)
        part = np.where(beyond, 0, part)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return np.where(np.isfinite(want), part, np.where(same, 0, np.inf))


def to_numpy(a: Any) -> NDArray[Any]:
    """`a`, an array of NumPy or CuPy, in host memory."""
    return np.asarray(a.get() if hasattr(a, "get") else a)


def may_take_fa3(dtype: np.dtype[Any], algorithm: str) -> bool:
    """Whether a call may go to Hopper's kernel: "auto" does not tell."""
    return dtype.itemsize == 2 and algorithm in ("auto", "fa3")


def height_above_last(xp: Any, scores: Any) -> Any:
    """Of each row, up to `FARTHEST`: how far the largest score is above that of the last key seen.

    `xp` is numpy or cupy; the last axis is that of the keys, and has one element in the result.
    """
    keys = scores.shape[-1]
    if keys == 0:
        return xp.zeros((*scores.shape[:-1], 1))
    seen = scores > -np.inf
    last = keys - 1 - seen[..., ::-1].argmax(-1, keepdims=True)
    height = scores.max(-1, keepdims=True) - xp.take_along_axis(scores, last, -1)
    return xp.where(seen.any(-1, keepdims=True), xp.minimum(height, FARTHEST), 0)


def score_errors(q: Any, k: Any, base: Array, **options: Any) -> Array:
    """How far the difference of every score and `base`, as large as lse, may be off."""
    product, later = score_sizes(q, k, **options)
    errors = (dot_growth(q, k, **options) + 4) * product + 4 * (later + abs(base))
    return rounding(q.dtype)[0] * errors


def dot_growth(a: Any, b: Any, layout: str = "bhsd", **_: Any) -> Array:
    """Of the dot product of each row of `a` and of `b`: its error, in ``eps * |a| @ |b|``."""
    a, b = (reference.four_axes(x, layout) for x in (a, b))
    b = reference.per_query_head(b, a.shape[1])
    rows, columns = ((x == x[..., :1]).all(-1) for x in (a, b))
    probable, certain = growths(a.shape[-1])
    return np.where(rows[..., :, None] & columns[..., None, :], certain, probable)


def growths(terms: int) -> tuple[float, float]:
    """The error of a dot product, in ``eps * |a| @ |b|``: the probable one, and the certain one."""
    probable = math.sqrt(terms)
    return probable, max(terms / 2, probable)


def score_sizes(
    q: Any,
    k: Any,
    layout: str = "bhsd",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    **_: Any,
) -> tuple[Array, Array]:
    """Of every score: the magnitudes that its dot product adds up, and those that come after it."""
    q, k = (abs(np.asarray(a, np.float64)) for a in (q, k))
    scale = None if scale is None else abs(scale)
    product = reference.scores(q, k, scale=scale, layout=layout)
    later = np.minimum(softcap, product) if softcap else np.zeros((1, 1, 1, 1))
    if bias is not None:
        later = later + abs(np.asarray(bias, np.float64))
    if alibi_slopes is not None:
        i, j = np.ogrid[: product.shape[2], : product.shape[3]]
        slopes = abs(np.asarray(alibi_slopes, np.float64))[..., None, None]
        later = later + slopes * abs(i + product.shape[3] - product.shape[2] - j)
    return product, later


def rounding(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """The distance of the accumulator's numbers at 1, what may vanish, the roundoff of weights."""
    wide = _accumulator(dtype)
    if dtype.itemsize > 2:
        return float(wide.eps), smallest_normal(dtype), 0.0
    vanishing = max(smallest_normal(dtype), float(spacing(dtype, 0)) / 2)
    return float(wide.eps), vanishing, float(spacing(dtype, 1)) / 2


def smallest(dtype: np.dtype[Any]) -> float:
    """The accumulator's smallest number above 0."""
    return float(_accumulator(dtype).smallest_subnormal)


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """The accumulator's smallest number with all its digits; some hardware has none below it."""
    return float(_accumulator(dtype).tiny)


def _accumulator(dtype: np.dtype[Any]) -> np.finfo[Any]:
    return np.finfo("float64" if dtype == np.float64 else "float32")


def spacing(dtype: np.dtype[Any], value: Any) -> Any:
    """Distance of the numbers of `dtype` at `value`, at least 0, or at its largest if beyond."""
    last_step = np.nextafter(np.array(largest(dtype), dtype), np.array(0, dtype))
    value = np.minimum(value, float(last_step))
    return np.spacing(np.asarray(value).astype(dtype)).astype(np.float64)


def largest(dtype: np.dtype[Any]) -> float:
    """The largest finite number of `dtype`."""
    return float(np.nextafter(np.array(np.inf, dtype), np.array(0, dtype)))
