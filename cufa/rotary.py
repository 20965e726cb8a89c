"""Rotary positions: queries and keys turned by angles that grow with their position.

Source: Su et al., arXiv:2104.09864, equation 15. Its pairs of elements are neighbours; here, as in
Llama's weights, element i is paired with i + head_dim / 2. The two differ by the order of the
columns of the matrices that make queries and keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import namespace


class Turns(NamedTuple):
    """Cosine and sine of each angle, (seqlen, 1, head_dim / 2), to be broadcast over heads."""

    cos: Any
    sin: Any

    def back(self) -> Turns:
        """By the opposite angles: the inverse, which is also the transpose."""
        return Turns(self.cos, -self.sin)


def turns(like: Any, seqlen: int, head_dim: int, base: float, offset: int) -> Turns:
    """Of positions `offset`, `offset` + 1, ..., in the library and the accumulator of `like`.

    Pair i of position n is turned by ``n * base**(-2 * i / head_dim)``, an angle in radians that is
    computed in float64.
    """
    xp = namespace(like)
    wide = np.float64 if like.dtype == np.float64 else np.float32
    speeds = base ** (-xp.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = xp.arange(offset, offset + seqlen, dtype=np.float64)[:, None, None] * speeds
    return Turns(xp.cos(angles).astype(wide), xp.sin(angles).astype(wide))


def rotate(a: Any, turn: Turns) -> Any:
    """`a` (..., seqlen, heads, head_dim) with each pair turned, computed in the dtype of `turn`."""
    half = a.shape[-1] // 2
    wide = a.astype(turn.cos.dtype, copy=False)
    first, second = wide[..., :half], wide[..., half:]
    out = namespace(a).empty(a.shape, a.dtype)
    with np.errstate(all="ignore"):  # what its dtype cannot hold is infinite
        out[..., :half] = first * turn.cos - second * turn.sin
        out[..., half:] = second * turn.cos + first * turn.sin
    return out
