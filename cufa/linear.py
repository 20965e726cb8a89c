"""Products with a matrix of parameters, and their gradients, on NumPy or CuPy arrays."""

from __future__ import annotations

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
        What its dtype cannot hold is infinite.
    """
    with np.errstate(all="ignore"):  # as in attention
        y = _product(_rows(x), weight)
        if bias is not None:
            y += bias
        return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[1])


def linear_backward(dy: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """Gradients of a loss by `x` and `weight` of `linear`, from those by its result."""
    with np.errstate(all="ignore"):
        dx = _product(_rows(dy), weight.T).astype(x.dtype, copy=False)
        dweight = _product(_rows(x).T, _rows(dy)).astype(x.dtype, copy=False)
    return dx.reshape(x.shape), dweight


def bias_backward(dy: Any) -> Any:
    """The gradient by `bias` of `linear`: summed in float32, or float64."""
    with np.errstate(all="ignore"):
        wide = _rows(dy).astype(_accumulator(dy), copy=False)
        return wide.sum(axis=0).astype(dy.dtype, copy=False)


def _rows(a: Any) -> Any:
    """All axes but the last in one; no copy if they lie one after the other."""
    return a.reshape(-1, a.shape[-1]) if a.size else a.reshape(0, a.shape[-1])


def _product(a: Any, b: Any) -> Any:
    """``a @ b`` of matrices, with sums in float32, or float64.

    NumPy's products of 16-bit numbers are slow: there it is of float32 numbers, and not rounded.
    CuPy's go to cuBLAS as they are.
    """
    if namespace(a) is np:
        wide = _accumulator(a)
        a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
    return a @ b


def _accumulator(a: Any) -> str:
    return "float64" if a.dtype == np.float64 else "float32"
