"""Results of attention over disjoint sets of keys, combined; sums of gradients.

With CuPy each of these functions is one kernel of `cufa.gpu.passes`: array expressions would pass
over the memory once for each operation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import is_cupy, namespace


def merged_weights(lse_a: Any, lse_b: Any) -> tuple[Any, Any, Any]:
    """The lse over the keys of two calls together, and what the output of each counts in it.

    With arrays that can be broadcast, of one dtype, float32 or float64: ``lse`` is
    ``logaddexp(lse_a, lse_b)``, and the weights are ``exp(lse_a - lse)`` and ``exp(lse_b - lse)``,
    or 0 where neither call has a key.
    """
    if is_cupy(lse_a):
        return tuple(_passes().merged_weights(lse_a, lse_b))
    top = np.maximum(lse_a, lse_b)
    base = np.where(top == -np.inf, np.zeros_like(top), top)  # -inf - -inf is NaN
    weight_a, weight_b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = weight_a + weight_b
    lse = base + np.log(total)
    total = np.where(total == 0, np.ones_like(total), total)  # no key in either: 0, not 0 / 0
    return lse, weight_a / total, weight_b / total


def weighted_sum(a: Any, weight_a: Any, b: Any, weight_b: Any, out: Any) -> None:
    """``a * weight_a + b * weight_b`` into `out`, which may be `a`; computed in the weights' dtype.

    `a`, `b` and `out` have one shape, to which the weights are broadcast.
    """
    if is_cupy(a):
        _passes().weighted_sum(a, weight_a, b, weight_b, out)
        return
    wide = weight_a.dtype
    product = b.astype(wide)
    product *= weight_b
    total = out if out.dtype == wide else np.empty(out.shape, wide)
    np.multiply(a.astype(wide, copy=False), weight_a, out=total)
    total += product
    if total is not out:
        out[...] = total


def plain_sum(a: Any, b: Any, out: Any, accumulator: str) -> None:
    """``a + b`` into `out`, which may be `a`, all of one shape; computed in the accumulator's
    dtype."""
    if is_cupy(a):
        _passes().plain_sum[accumulator](a, b, out)
        return
    a, b = (x.astype(accumulator, copy=False) for x in (a, b))
    np.add(a, b, out=out)


def wide_sum(a: Any, b: Any, accumulator: str) -> Any:
    """``a + b`` in the accumulator's dtype; in the place of `a`, if it has that dtype."""
    total = wide_place(a, accumulator)
    plain_sum(a, b, total, accumulator)
    return total


def wide_place(a: Any, accumulator: str) -> Any:
    """Where the sum of `a` and something else can go: `a`, if it has the accumulator's dtype."""
    return a if a.dtype == accumulator else namespace(a).empty_like(a, accumulator)


def _passes() -> ModuleType:
    from cufa.gpu import passes

    return passes
