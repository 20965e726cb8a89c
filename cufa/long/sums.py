"""What a block of queries or keys comes to while it meets others, in the accumulator's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.attention import merged_weights


class RunningOutput:
    """Output and lse of a block of queries over the keys that it has met.

    Of axes (..., heads, rows, head_dim_v) and (..., heads, rows).
    """

    def __init__(self, xp: Any, accumulator: str) -> None:
        self._xp, self._accumulator = xp, accumulator
        self._out: Any = None
        self._lse: Any = None

    def add(self, rows: slice, count: int, out: Any, lse: Any) -> None:
        """Merge the result of some of the rows, of which there are `count`, over other keys."""
        if self._out is None and rows == slice(0, count):
            self._out, self._lse = out, lse  # most often the only one: as attention has given it
            return
        self._widen((*out.shape[:-2], count, out.shape[-1]))
        target = self._out[..., rows, :]
        merged, kept, added = merged_weights(self._xp, self._lse[..., rows], lse)
        weighted = out.astype(self._accumulator)
        weighted *= added[..., None]
        target *= kept[..., None]
        target += weighted
        self._lse[..., rows] = merged

    def finish(self, shape: tuple[int, ...], sink: Any) -> tuple[Any, Any]:
        """What there is, with a sink for each head; to begin anew."""
        if self._out is None or sink is not None:
            self._widen(shape)
        out, lse = self._out, self._lse
        if sink is not None:
            lse, kept, _ = merged_weights(self._xp, lse, sink[:, None])
            out *= kept[..., None]
        self._out = self._lse = None
        return out, lse

    def _widen(self, shape: tuple[int, ...]) -> None:
        """The accumulator's dtype from now on."""
        if self._out is None:
            self._out = self._xp.zeros(shape, self._accumulator)
            self._lse = self._xp.full(shape[:-1], -np.inf, self._accumulator)
        self._out = self._out.astype(self._accumulator, copy=False)


class GradientSum:
    """The sum of what pieces add to a gradient of a block, of axes (..., rows, head_dim)."""

    def __init__(self, xp: Any, accumulator: str) -> None:
        self._xp, self._accumulator = xp, accumulator
        self._total: Any = None

    def add(self, where: slice, count: int, part: Any) -> None:
        """Add to some of the rows, of which there are `count`."""
        if self._total is None and where == slice(0, count):
            self._total = part
            return
        if self._total is None:
            shape = (*part.shape[:-2], count, part.shape[-1])
            self._total = self._xp.zeros(shape, self._accumulator)
        self._total = self._total.astype(self._accumulator, copy=False)
        target = self._total[..., where, :]  # CuPy would copy the sum once more into an item
        target += part.astype(self._accumulator, copy=False)

    def finish(self, shape: tuple[int, ...]) -> Any:
        """What there is; to begin anew."""
        total, self._total = self._total, None
        return self._xp.zeros(shape, self._accumulator) if total is None else total
