"""What a block of queries or keys comes to while it meets others.

The result of a single call is kept in its own dtype; several are summed in the accumulator's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.merging import merged_weights, weighted_sum, wide_place, wide_sum


class RunningOutput:
    """Output and lse of a block of queries over the keys that it has met.

    Of axes (..., heads, rows, head_dim_v) and (..., heads, rows).
    """

    def __init__(self, xp: Any, accumulator: str) -> None:
        self._xp, self._accumulator = xp, accumulator
        self._out: Any = None
        self._lse: Any = None

    def add(self, rows: slice, count: int, out: Any, lse: Any) -> None:
        """Merge the result of some of the rows, of which there are `count`, over other keys.

        `out` and `lse` may be kept, and written to.
        """
        if self._out is None and rows == slice(0, count):
            self._out, self._lse = out, lse  # most often the only one
            return
        if self._out is None or rows != slice(0, count):
            self._widen((*out.shape[:-2], count, out.shape[-1]))
        target = wide_place(self._out, self._accumulator)
        lse, kept, added = merged_weights(self._lse[..., rows], lse)
        before = self._out[..., rows, :]
        weighted_sum(before, kept[..., None], out, added[..., None], target[..., rows, :])
        self._out, self._lse[..., rows] = target, lse

    def finish(self, shape: tuple[int, ...], sink: Any) -> tuple[Any, Any]:
        """Output and lse, with a sink for each head; 0 and -inf if nothing was added. Starts anew.

        The output of a single call without a sink has that call's dtype.
        """
        if self._out is None or sink is not None:
            self._widen(shape)
        out, lse = self._out, self._lse
        if sink is not None:
            lse, kept, _ = merged_weights(lse, sink[:, None])
            out *= kept[..., None]
        self._out = self._lse = None
        return out, lse

    def _widen(self, shape: tuple[int, ...]) -> None:
        """The accumulator's dtype from now on, for rows without a result too."""
        if self._out is None:
            self._out = self._xp.zeros(shape, self._accumulator)
            self._lse = self._xp.full(shape[:-1], -np.inf, self._accumulator)
        self._out = self._out.astype(self._accumulator, copy=False)


class GradientSum:
    """The sum of what calls add to a gradient of a block, of axes (..., rows, head_dim)."""

    def __init__(self, xp: Any, accumulator: str) -> None:
        self._xp, self._accumulator = xp, accumulator
        self._total: Any = None

    def add(self, rows: slice, count: int, part: Any) -> None:
        """Add to some of the rows, of which there are `count`; `part` may be kept, and written
        to."""
        if self._total is None and rows == slice(0, count):
            self._total = part
            return
        if self._total is None:
            shape = (*part.shape[:-2], count, part.shape[-1])
            self._total = self._xp.zeros(shape, part.dtype)
            self._total[..., rows, :] = part
            return
        if rows == slice(0, count):
            self._total = wide_sum(self._total, part, self._accumulator)
        else:
            self._total = self._total.astype(self._accumulator, copy=False)
            wide_sum(self._total[..., rows, :], part, self._accumulator)

    def finish(self, shape: tuple[int, ...]) -> Any:
        """The sum, of one part in that part's dtype; 0 if nothing was added. Starts anew."""
        total, self._total = self._total, None
        return self._xp.zeros(shape, self._accumulator) if total is None else total
