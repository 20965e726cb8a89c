"""The exact gradients of one call of attention, and how far rounding may lead from them.

Imports NumPy, the oracle and the bounds of the forward pass only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from cufa import reference
from cufa.bounds import (
    VANISHING,
    Array,
    Error,
    dot_growth,
    exact,
    fractions,
    rounding,
    score_errors,
    score_sizes,
    smallest,
    smallest_normal,
    spacing,
    to_numpy,
)
from cufa.reference import Gradients, four_axes, per_query_head


class ExactGradients(NamedTuple):
    """Gradients in float64 and, for each element, the error that the dtypes excuse."""

    gradients: Gradients
    bounds: Gradients
    #: Of each gradient, that of its input; None where there is none.
    dtypes: tuple[np.dtype[Any] | None, ...]

    def only(self, wrt: Collection[str]) -> ExactGradients:
        """Those by some inputs, such as "q"; None in the place of the others."""
        others: dict[str, Any] = {
            f: None for f in Gradients._fields if f.removeprefix("d") not in wrt
        }
        gradients, bounds = (a._replace(**others) for a in (self.gradients, self.bounds))
        return self._replace(gradients=gradients, bounds=bounds)


def exact_gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    algorithm: str = "auto",
    **options: Any,
) -> ExactGradients:
    """The oracle's answer to one call of `cufa.attention_backward`, with bounds on its errors.

    Parameters
    ----------
    dout, q, k, v : array
        NumPy arrays of one float dtype.
    algorithm : str
        The answer is the same for all.
    dlse, bias, sink, dropout_p, dropout_seed, **options
        Those of `cufa.reference.gradients`.

    Notes
    -----
    The bound is what a backward pass may lose that computes P again from scores and a saved lse,
    keeps P, dP, dS and sums in the accumulator and rounds P, dS and the results to the dtype of
    `q`. `out` and lse are saved as the forward pass gives them: off by the bounds of
    `cufa.bounds.exact`. With that module's ``eps`` and ``u``, and its bounds on scores, weights and
    sums:

    - P: ``p * expm1(delta)``, at most 1, for a score and an lse that are off by ``delta`` together;
      ``u * p``; half of the dtype's smallest number, or `VANISHING` times the accumulator's
      smallest normal one.
    - dP: ``(sqrt(head_dim_v) + 4) * eps * |dO| @ |V|^T``; the root as with scores.
    - Dropout: P in dV, and dP, are 0 or divided by ``1 - dropout_p``, and their errors likewise.
    - D: the error of `out` times ``|dO|``, and ``eps`` times what it adds up.
    - dS = P * (dP - D): the errors of its factors, each times the other factor and their product;
      ``(u + 4 * eps) * |dS|``; what may vanish.
    - The cap's derivative, ``1 - t**2`` with ``t = tanh(x)``: ``2 * |t| * (1 - t**2)`` and half of
      its own greatest slope, 2, times the square, of x's error; ``10 * eps``; at most 1. P times
      it, and dS behind it, may be rounded to the dtype: ``u`` and half the smallest number again.
    - dQ, dK, dV: the errors of P or dS times the other factor, ``(sqrt(n) + 8) * eps`` times what a
      sum of n products adds up, two units in the last place of the largest element of the row, the
      accumulator's smallest number for each product, in dV times what dropout multiplies by; in dQ
      the scale times its smallest normal one for each key, which sums over blocks may lose.
    - dbias and dsink: the same for sums of dS and of ``exp(sink - lse) * D``.
    """
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    gradients = reference.gradients(
        dout, q, k, v, dlse=dlse, bias=bias, sink=sink, **dropout, **options
    )
    with np.errstate(all="ignore"):
        errors = _Errors(dout, q, k, v, dlse, bias, sink, dropout, options)
        bounds = Gradients(
            dq=errors.of_queries() + _last_places(gradients.dq, q.dtype, by_row=True),
            dk=errors.of_keys() + _last_places(gradients.dk, k.dtype, by_row=True),
            dv=errors.of_values() + _last_places(gradients.dv, v.dtype, by_row=True),
            dbias=None
            if bias is None
            else errors.of_bias() + _last_places(gradients.dbias, bias.dtype),
            dsink=None
            if sink is None
            else errors.of_sink() + _last_places(gradients.dsink, sink.dtype),
        )
    dtypes = tuple(None if a is None else a.dtype for a in (q, k, v, bias, sink))
    return ExactGradients(gradients, bounds, dtypes)


def worst_gradient_error(gradients: Any, expected: ExactGradients) -> Error:
    """How far gradients, of the shapes expected, are from the exact ones, at their worst."""
    worst = Error(0.0, 0.0)
    for got, want, bound in zip(gradients, *expected[:2], strict=True):
        if want is None or bound is None:
            continue
        with np.errstate(invalid="ignore"):
            off = abs(to_numpy(got).astype(np.float64) - want)
        absolute = float(off[np.isfinite(want)].max(initial=0))
        fraction = float(fractions(got, want, bound).max(initial=0))
        worst = Error(max(worst.absolute, absolute), max(worst.fraction, fraction))
    return worst


def _last_places(gradient: Any, dtype: np.dtype[Any], by_row: bool = False) -> Array:
    """Two units in the last place of each element, or of the largest of its row."""
    size = abs(gradient)
    units: Array = 2 * spacing(dtype, size.max(-1, keepdims=True, initial=0) if by_row else size)
    return units


class _Errors:
    """Factors of the gradients on axes (batch, heads, rows, columns), and how far each is off."""

    def __init__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        dlse: Any,
        bias: Any,
        sink: Any,
        dropout: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.layout = options.get("layout", "bhsd")
        self.given = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
        self.eps, self.vanishing, self.unit = rounding(q.dtype)
        self.vanishing = max(self.vanishing, VANISHING * smallest_normal(q.dtype))
        self.least = smallest(q.dtype)
        of_scores = {**options, "bias": bias}
        forward = exact(q, k, v, sink=sink, **dropout, **of_scores)
        s = reference.scores(q, k, **of_scores)
        self.shape, row = s.shape, (*s.shape[:3], 1)
        lse, self.lse_off = (np.reshape(a, row) for a in (forward.lse, forward.lse_bound))
        self.counts: Any = 1
        self.kept_scale = 1 / (1 - dropout["dropout_p"])
        if p := dropout["dropout_p"]:
            self.counts = reference.kept(dropout["dropout_seed"], p, s.shape) * self.kept_scale
        empty = lse == -np.inf
        self.base = np.where(empty, 0, lse)
        self.dout = np.where(empty, 0, four_axes(dout, self.layout))
        dlse = np.zeros(row) if dlse is None else np.where(empty, 0, np.reshape(dlse, row))
        self._weights(s, score_errors(q, k, self.base, **of_scores) + self.lse_off)
        self._row_sums(four_axes(forward.out, self.layout), forward.out_bound, dlse)
        self._score_gradients(options)

    def _weights(self, s: Array, off: Array) -> None:
        p = np.exp(s - self.base)
        self.p = p
        self.p_off = np.where(p == 0, 0, np.minimum(p * np.expm1(off), 1))
        self.p_off += self.unit * p + self.vanishing * (p > 0)

    def _row_sums(self, out: Array, out_bound: Array, dlse: Array) -> None:
        """D = rowsum(dO * O) - dlse."""
        size = abs(self.dout)
        self.d = (self.dout * out).sum(-1, keepdims=True) - dlse
        dots = (size * abs(out)).sum(-1, keepdims=True)
        self.d_off = (size * four_axes(out_bound, self.layout)).sum(-1, keepdims=True)
        self.d_off += self.eps * ((math.sqrt(out.shape[-1]) + 4) * dots + 2 * abs(dlse))

    def _score_gradients(self, options: dict[str, Any]) -> None:
        """dS, and what it is once it has passed the cap and the scale."""
        eps, q, k, v = self.eps, self.given["q"], self.given["k"], self.by_head("v")
        change = self.counts * (self.dout @ v.swapaxes(2, 3)) - self.d  # dP - D
        off = (dot_growth(self.dout, v) + 4) * eps * (abs(self.dout) @ abs(v).swapaxes(2, 3))
        off = self.counts * off + self.d_off
        self.ds = self.p * change
        self.ds_off = self.p * off + self.p_off * (abs(change) + off)
        self.ds_off += (self.unit + 4 * eps) * abs(self.ds) + self.vanishing * (self.p > 0)

        scale, softcap = options.get("scale"), options.get("softcap")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
        self.scale = scale
        self.by_product, self.by_product_off = scale * abs(self.ds), scale * self.ds_off
        if softcap is not None:
            plain = {"scale": options.get("scale"), "layout": self.layout}
            t = np.tanh(reference.scores(q, k, **plain) / softcap)
            size, _ = score_sizes(q, k, **plain)
            grown = dot_growth(q, self.given["k"], self.layout)
            x_off = (grown + 4) * eps * size / softcap
            slope = 1 - t**2
            slope_off = np.minimum(2 * abs(t) * slope * x_off + x_off**2 + 10 * eps, 1)
            self.by_product_off = slope * self.by_product_off + slope_off * (
                self.by_product + self.by_product_off
            )
            self.by_product = slope * self.by_product
            rounded = scale * self.vanishing * (self.p > 0) * (1 + abs(change))
            self.by_product_off += self.unit * self.by_product + rounded

    def of_queries(self) -> Array:
        bound = self._product(self.by_product, self.by_product_off, self.by_head("k"))
        bound += self.scale * self.shape[3] * smallest_normal(self.given["q"].dtype)
        return self._back(bound, "q")

    def of_keys(self) -> Array:
        ds, off = (a.swapaxes(2, 3) for a in (self.by_product, self.by_product_off))
        return self._back(self._product(ds, off, four_axes(self.given["q"], self.layout)), "k")

    def of_values(self) -> Array:
        p, off = ((self.counts * a).swapaxes(2, 3) for a in (self.p, self.p_off))
        return self._back(self._product(p, off, self.dout, self.kept_scale), "v")

    def of_bias(self) -> Array:
        bias = self.given["bias"]
        shape = (1,) * (4 - bias.ndim) + bias.shape
        axes = tuple(axis for axis in range(4) if shape[axis] != self.shape[axis])
        return self._sum(abs(self.ds), self.ds_off, axes).reshape(bias.shape)

    def of_sink(self) -> Array:
        logit = np.asarray(self.given["sink"], np.float64).reshape(1, -1, 1, 1)
        weight = np.exp(logit - self.base)
        off = weight * np.expm1(self.lse_off + 4 * self.eps * (abs(logit) + abs(self.base)))
        off = np.where(weight == 0, 0, np.minimum(off, 1) + self.vanishing)
        off = weight * self.d_off + off * (abs(self.d) + self.d_off)
        return self._sum(weight * abs(self.d), off, (0, 2, 3)).ravel()

    def by_head(self, name: str) -> Array:
        """Keys or values, one for each query head."""
        return per_query_head(four_axes(self.given[name], self.layout), self.shape[1])

    def _product(self, a: Array, off: Array, b: Array, after: float = 1) -> Array:
        """Error of ``a @ b``, without the rounding of the result, for an `a` that is off. Of a
        factor in `a`, `after` may be applied to the product instead."""
        # Query heads that share a key are summed as one: as many more terms as there are heads,
        # though the root of their number counts, not it.
        sums = (math.sqrt(a.shape[-1] * max(1, self.shape[1])) + 8) * self.eps
        bound: Array = off @ abs(b) + sums * (abs(a) @ abs(b)) + a.shape[-1] * self.least * after
        return bound

    def _sum(self, a: Array, off: Array, axes: tuple[int, ...]) -> Array:
        terms = math.prod(a.shape[axis] for axis in axes)
        sums = (math.sqrt(terms) + 8) * self.eps
        total: Array = off.sum(axis=axes) + sums * a.sum(axis=axes) + terms * self.least
        return total

    def _back(self, bound: Array, name: str) -> Array:
        """Summed over what shares a key, in the shape of the input."""
        given = self.given[name]
        heads = four_axes(given, self.layout).shape[1]
        if heads != self.shape[1]:
            group = self.shape[1] // max(heads, 1)
            bound = bound.reshape(bound.shape[0], heads, group, *bound.shape[2:]).sum(2)
        turned = self.layout == "bshd" and given.ndim > 2
        back: Array = (bound.swapaxes(1, 2) if turned else bound).reshape(given.shape)
        return back
