"""Dropout: which weights a seed keeps, as a function of their position and of nothing else.

Source: Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox4x32-10 turns a
counter of four 32-bit words and a key of two into four random words. ``kernels/attn/dropout.cuh``
is the same for GPU kernels.

Layout. The weight of query row i and key column j of a head has a word of its own:

- key: the seed's lower word, then its upper word;
- counter: (pair(j), pair(i), head, batch), where ``pair(x) = x // 16 * 8 + x % 8`` numbers the
  pairs of positions that are 8 apart, x and x + 8;
- word: ``2 * (i // 8 % 2) + j // 8 % 2`` of the four.

So one counter serves rows i and i + 8 with columns j and j + 8. Of a 16x16 tile of weights in the
fragments of tensor cores, transposed or not, a thread holds eight: all that two counters serve. It
computes no word for another thread, whatever the tiles of its kernel, if they begin at multiples of
16. Rows and columns below 2**30, heads and batches below 2**32 are words as they are: no position
wraps.

A weight is kept if its word is at least ``threshold(p)``: integers, so that all backends agree.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cufa.errors import DTypeError, ShapeError
from cufa.options import MAX_SEQLEN, plain_probability, plain_seed, shown

_WORD = (1 << 32) - 1
#: Philox4x32: what words 0 and 2 are multiplied by, and what the key grows by in each round.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
#: Batches times heads; more would need tensors that no machine holds.
MAX_HEADS = 1 << 31
#: Weights whose words are computed at once, 20 MB of words; no fewer than a row of tiles has.
_PIECE = 1 << 20
#: Counters of a head that NumPy computes at once: their words stay in the processor's cache.
_STRIP = 1 << 13


def dropout_mask(seed: int, shape: Sequence[int], p: float) -> NDArray[np.bool_]:
    """Which weights `attention` keeps with ``dropout_p=p, dropout_seed=seed``.

    Parameters
    ----------
    seed : int
        At least 0, below 2**64.
    shape : sequence of int, (batch, heads, seqlen_q, seqlen_k)
        Without batch, or batch and heads, for arrays without these axes: the mask is that of batch
        0 and head 0. A smaller shape gives the corner of a larger one.
    p : float
        Probability that a weight is dropped, at least 0 and below 1.

    Returns
    -------
    mask : bool array of NumPy, of that shape
        True where a weight is kept, which has probability ``1 - p`` to within 2**-32. Kept weights
        are to be divided by ``1 - p``.

    Raises
    ------
    ArgumentError
        `p` or `seed` is out of range.
    DTypeError
        `seed` is no integer, `p` no number, or `shape` no sequence of integers.
    ShapeError
        `shape` has fewer than 2 axes or more than 4, or a size that is negative or too large.

    Notes
    -----
    Source: Salmon et al., SC 2011 (Philox4x32-10). The module's docstring has the layout, with
    which the same mask can be made elsewhere.

    Examples
    --------
    >>> import cufa
    >>> cufa.dropout_mask(7, (2, 4, 100, 100), 0.1).shape
    (2, 4, 100, 100)
    """
    seed, p, sizes = plain_seed("seed", seed), plain_probability("p", p), _plain_shape(shape)
    mask = np.empty((1,) * (4 - len(sizes)) + sizes, bool)
    for place, keep in _pieces(np, seed, p, mask.shape):
        mask[place] = keep
    return mask.reshape(sizes)


def drop(xp: Any, seed: int, p: float, weights: Any) -> None:
    """Set the weights that are dropped to 0, in place, and leave the others as they are.

    Parameters
    ----------
    xp : module
        numpy or cupy, of `weights`.
    seed : int
    p : float
    weights : array, shape (batch, heads, seqlen_q, seqlen_k)
    """
    for place, keep in _pieces(xp, seed, p, weights.shape):
        part = weights[place]
        part *= keep


def keep_block(
    xp: Any, seed: int, p: float, batch: Any, head: Any, rows: slice, columns: slice
) -> Any:
    """The mask of some rows and columns, of any size and from anywhere, of some heads.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    seed : int
    p : float
    batch, head : int array of `xp`
        Batches and heads, of shapes that broadcast.
    rows, columns : slice
        With start and stop. Time and memory are those of the tiles of 16x16 that they touch.

    Returns
    -------
    keep : bool array, shape (*broadcast shape of batch and head, rows, columns)
    """
    i, j = (_pairs(xp, x) for x in (rows, columns))
    per_head = [xp.asarray(x).astype("uint64")[..., None, None] for x in (head, batch)]
    leading = np.broadcast_shapes(*(x.shape for x in per_head))[:-2]
    tiles = i.size // 8, j.size // 8
    # Axes: tile, which of a pair, which pair; the same again for columns.
    keep = xp.empty((*leading, tiles[0], 2, 8, tiles[1], 2, 8), bool)
    key, least = (int(seed) & _WORD, int(seed) >> 32), np.uint64(threshold(p))
    strip = max(1, _STRIP // max(1, 8 * j.size) if xp is np else tiles[0])
    for first in range(0, tiles[0], strip):
        words = philox((j, i[8 * first : 8 * (first + strip), None], *per_head), key)
        for place, word in enumerate(words):
            part = keep[..., first : first + strip, place // 2, :, :, place % 2, :]
            part[...] = (word >= least).reshape(part.shape)
    keep = keep.reshape(*leading, 2 * i.size, 2 * j.size)
    top, left = rows.start % 16, columns.start % 16
    height, width = (x.stop - x.start for x in (rows, columns))
    return keep[..., top : top + height, left : left + width]


def threshold(p: float) -> int:
    """What a word must at least be for its weight to be kept, below 2**32: p, in units of 2**-32.

    The nearest integer; where that is 2**32, since p is nearly 1, one less.
    """
    return min(round(p * 2.0**32), _WORD)


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """The four words of each counter.

    Parameters
    ----------
    counter : four uint64 arrays
        Below 2**32, of shapes that broadcast; computed without broadcasting as long as may be.
    key : two ints
        Below 2**32.
    """
    a, b, c, d = counter
    for n in range(_ROUNDS):
        key_a, key_b = (
            np.uint64((k + n * s) & _WORD) for k, s in zip(key, _KEY_STEPS, strict=True)
        )
        ab, cd = (x * np.uint64(m) for x, m in zip((a, c), _MULTIPLIERS, strict=True))
        a, b, c, d = _upper(cd) ^ key_a ^ b, _lower(cd), _upper(ab) ^ key_b ^ d, _lower(ab)
    return a, b, c, d  # each depends on all four, so all are of the full shape


def _upper(x: Any) -> Any:
    return x >> np.uint64(32)


def _lower(x: Any) -> Any:
    return x & np.uint64(_WORD)


def _pairs(xp: Any, positions: slice) -> Any:
    """The numbers of all pairs in the tiles of 16 that these positions touch."""
    return xp.arange(positions.start // 16 * 8, -(-positions.stop // 16) * 8, dtype="uint64")


def _pieces(
    xp: Any, seed: int, p: float, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], Any]]:
    """Parts of a mask of four axes, each with its place, that cover it once."""
    batch, heads, seqlen_q, seqlen_k = shape
    height, width = (max(1, -(-n // 16)) * 16 for n in (seqlen_q, seqlen_k))  # in whole tiles
    row_step = max(16, _PIECE // width // 16 * 16)
    head_step = max(1, _PIECE // (min(row_step, height) * width))
    batch_step = max(1, head_step // max(1, heads))
    for of_batches, of_heads, rows in product(
        _cut(batch, batch_step), _cut(heads, head_step), _cut(seqlen_q, row_step)
    ):
        b, h = (xp.arange(x.start, x.stop) for x in (of_batches, of_heads))
        keep = keep_block(xp, seed, p, b[:, None], h, rows, slice(0, seqlen_k))
        yield (of_batches, of_heads, rows), keep


def _cut(size: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def _plain_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise DTypeError(f"shape is {shown(shape)}; it must be a sequence of integers") from None
    if not 2 <= len(sizes) <= 4:
        raise ShapeError(
            f"shape is {sizes}; it must have 2 axes (seqlen_q, seqlen_k), 3 (heads first) or 4 "
            "(batch and heads first)"
        )
    if min(sizes) < 0:
        raise ShapeError(f"shape is {sizes}; sizes must be at least 0")
    if max(sizes[-2:]) > MAX_SEQLEN:
        raise ShapeError(f"shape is {sizes}; seqlens must be at most {MAX_SEQLEN}")
    check_heads(*(1, 1, *sizes)[-4:-2])
    return sizes


def check_heads(batch: int, heads: int) -> None:
    """Raise if there are more heads than counters tell apart.

    Raises
    ------
    ShapeError
    """
    if batch * heads > MAX_HEADS:
        raise ShapeError(
            f"there are {batch} batches of {heads} heads; with dropout there may be {MAX_HEADS} "
            "heads in all"
        )
