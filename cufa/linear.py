"""Products with a matrix of parameters, and their gradients, on NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cufa.arrays import namespace


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """``x @ weight + bias``, in the dtype of `x`.

    Parameters
    ----------
    x : array, shape (..., inner)
    weight : array, shape (inner, outer)
    bias : array, shape (outer,), default None

    Returns
    -------
    y : array, shape (..., outer)
        What its dtype cannot hold is infinite. On CuPy the product is rounded before `bias` is
        added.
    """
    with np.errstate(all="ignore"):  # as in attention
        y = _product(_rows(x), weight)
        if bias is not None:
            y += bias
        return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[1])


def input_gradient(dys: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The gradient of a loss by what several `linear` have for `x`, from those by their results.

    Parameters
    ----------
    dys : sequence of arrays, shape (..., outer)
    weights : sequence of arrays, shape (inner, outer)
        As many. `outer` may be another for each.

    Returns
    -------
    dx : array, shape (..., inner)
        One product of copies that lie side by side: whatever it is a sum of, it is rounded once.
    """
    dy, weight = _side_by_side([_rows(dy) for dy in dys]), _side_by_side(weights)
    with np.errstate(all="ignore"):
        dx = _product(dy, weight.T).astype(dy.dtype, copy=False)
    return dx.reshape(*dys[0].shape[:-1], len(weight))


def weight_gradient(dy: Any, x: Any) -> Any:
    """The gradient by `weight` of `linear`, from that by its result."""
    with np.errstate(all="ignore"):
        return _product(_rows(x).T, _rows(dy)).astype(x.dtype, copy=False)


def bias_gradient(dy: Any) -> Any:
    """The gradient by `bias` of `linear`: summed in float32, or float64."""
    with np.errstate(all="ignore"):
        wide = _rows(dy).astype(_accumulator(dy), copy=False)
        return wide.sum(axis=0).astype(dy.dtype, copy=False)


def _rows(a: Any) -> Any:
    """All axes but the last in one; no copy if they lie one after the other."""
    return a.reshape(-1, a.shape[-1]) if a.size else a.reshape(0, a.shape[-1])


def _side_by_side(matrices: Sequence[Any]) -> Any:
    """In one matrix, unless there is but one; with as many rows."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    columns = sum(a.shape[1] for a in matrices)
    out, start = namespace(first).empty((len(first), columns), first.dtype), 0
    for a in matrices:
        out[:, start : start + a.shape[1]] = a
        start += a.shape[1]
    return out


def _product(a: Any, b: Any) -> Any:
    """``a @ b`` of matrices, with sums in float32, or float64.

    NumPy's products of 16-bit numbers are slow: there it is of float32 numbers, and not rounded.
    On CuPy it is rounded, once.
    """
    if namespace(a) is np:
        wide = _accumulator(a)
        return a.astype(wide, copy=False) @ b.astype(wide, copy=False)
    from cufa.gpu import cublas

    return cublas.load().matmul(a, b)


def _accumulator(a: Any) -> str:
    return "float64" if a.dtype == np.float64 else "float32"
