"""What puts results over different keys together: `cufa.merge`, and blocks that meet others.

Sources: Ye et al., arXiv:2501.01005 (merging attention states, FlashInfer); Dao, arXiv:2307.08691
(the same between the blocks of one kernel).

CuPy would take a pass over the memory for each of these operations; `cufa.gpu.passes` has them in
one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import is_cupy


def merged_weights(lse_a: Any, lse_b: Any) -> tuple[Any, Any, Any]:
    """The lse over the keys of two calls together, and what the output of each counts in it.

    Computed from the difference to the larger lse, so that no exponential overflows.
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
    """``a * weight_a + b * weight_b`` into `out`, which may be `a`; computed in the dtype of the
    weights, which are broadcast."""
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


def plain_sum(a: Any, b: Any, accumulator: str, out: Any) -> None:
    """``a + b`` into `out`, which may be `a`; computed in the accumulator's dtype."""
    if is_cupy(a):
        _passes().plain_sum[accumulator](a, b, out)
        return
    a, b = (x.astype(accumulator, copy=False) for x in (a, b))
    np.add(a, b, out=out, casting="same_kind")


def _passes() -> ModuleType:
    from cufa.gpu import passes

    return passes
