"""Long sequences in blocks: how large, which pairs of them see each other, and what they hold.

Plain arithmetic on a `Problem`. Queries and keys are cut into blocks, heads into groups of
key/value heads; one pair of blocks of one group of one batch is worked on at a time. A pair is cut
once more into pieces, each of them a call of `cufa.attention` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from cufa.errors import ArgumentError
from cufa.options import ITEMSIZE
from cufa.problem import Problem

#: What is held at most if neither `max_bytes` nor `block_size` is given.
DEFAULT_BYTES = 1 << 30
#: Query rows of all heads together that keep a card busy: some 340 tiles of 192 rows for the 132
#: multiprocessors of an H200. With fewer, several key/value heads are worked on at once.
_ROWS_AT_ONCE = 1 << 16
#: Blocks are of whole tiles of any kernel.
_STEP = 128
#: For what an allocator rounds up: arrays to 512 bytes, rows of the backward pass to whole tiles.
_ROUNDING_BYTES = 1 << 20


class Sizes(NamedTuple):
    """Of a pair of blocks: key/value heads, query rows and keys."""

    heads: int
    queries: int
    keys: int


class Piece(NamedTuple):
    """Rows and keys of one call of `cufa.attention`, and its `window`.

    ALiBi's distances are those of the call itself where `side` is "across"; where all keys are to
    the "left" of ALiBi's diagonal, or to its "right", they are a sum of a number for each key and
    one for each row.
    """

    rows: slice
    keys: slice
    window: tuple[int | None, int | None] | None
    side: str


class Block(NamedTuple):
    """What is finished at once: rows of queries, or keys, and the blocks of the others to meet."""

    batch: int
    kv_heads: slice
    outer: slice
    #: At least one; an empty one if there is nothing to see.
    inner: tuple[slice, ...]

    @property
    def name(self) -> str:
        """Of its own among the blocks of a sweep."""
        return f"{self.batch}-{self.kv_heads.start}-{self.outer.start}"


def held_bytes(problem: Problem, sizes: Sizes, backward: bool) -> int:
    """Memory that blocks of these sizes take on a card, beside arrays that are there anyway.

    Notes
    -----
    With e bytes an element of the inputs and a of a sum, for each query row of each head, forward:

    - q, two blocks of it: ``2 d e``;
    - a partial output and lse, and those that are on their way to the host: ``2 (d_v e + a)``;
    - their sum, and what it was before, or a product that is added to it: ``2 d_v a``; numbers of a
      row: ``8 a``;

    and for each key of each key/value head two blocks of k and v: ``2 (d + d_v) e``. Backward there
    are two blocks of dout, out, lse and dlse too, two of dq and its sum, of dk and dv likewise. A
    mask or a bias is there twice, with as many elements as it has in a pair of blocks; Hopper's
    kernel needs up to 17/32 byte for each score that is under a mask. ALiBi slopes take two numbers
    for each key and query head; beside a bias, three for each score that differs from others by it.
    1 MiB is for rounding.
    """
    e, a = ITEMSIZE[problem.dtype], ITEMSIZE[problem.accumulator]
    d, d_v, group = problem.head_dim, problem.head_dim_v, problem.group
    rows, keys = min(sizes.queries, problem.seqlen_q), min(sizes.keys, problem.seqlen_k)
    if backward:
        row = 2 * ((d + 2 * d_v) * e + 2 * a) + 2 * d * e + 2 * max(d, d_v) * a + 8 * a
        key = 4 * (d + d_v) * e + 2 * (d + d_v) * a
    else:
        row = 2 * d * e + 2 * (d_v * e + a) + 2 * d_v * a + 8 * a
        key = 2 * (d + d_v) * e
    if problem.alibi_slopes:
        key += 2 * group * a
    heads = sizes.heads * group

    def scores(strides: tuple[int, ...]) -> int:
        axes = zip(strides[1:], (heads, rows, keys), strict=True)
        return math.prod(n for stride, n in axes if stride)

    held = sizes.heads * (group * rows * row + keys * key)
    if problem.mask:
        tiles = _up(rows, _STEP) * math.ceil(keys / 32) * (heads if problem.mask.strides[1] else 1)
        held += 2 * scores(problem.mask.strides) + 17 * tiles
    if problem.bias:
        held += 2 * scores(problem.bias.strides) * ITEMSIZE[problem.bias.dtype]
        if problem.alibi_slopes:
            wide = max(a, ITEMSIZE[problem.bias.dtype])
            held += 3 * heads * keys * wide * (rows if problem.bias.strides[2] else 1)
    return held + _ROUNDING_BYTES


def choose_sizes(
    problem: Problem,
    backward: bool,
    block_size: tuple[int, int] | None,
    max_bytes: int | None,
) -> Sizes:
    """Blocks of the size given, else the longest, and as few heads at once as keep a card busy.

    Fewer heads leave room for longer blocks; and the keys are copied once for each block of
    queries, so that the longer these are the less is copied.

    Raises
    ------
    ArgumentError
        The smallest blocks take more than `max_bytes`.
    """
    if max_bytes is None and block_size is None:
        max_bytes = DEFAULT_BYTES
    best: Sizes | None = None
    for heads in range(1, max(1, problem.kv_heads) + 1):
        if block_size is None:
            assert max_bytes is not None
            sizes = _largest(problem, backward, heads, max_bytes)
        else:
            sizes = _clipped(problem, Sizes(heads, *block_size))
        if max_bytes is not None and held_bytes(problem, sizes, backward) > max_bytes:
            break
        if best is not None and sizes[1:] != best[1:]:
            break  # memory is short: more heads would only make the blocks shorter
        best = sizes
        if heads * problem.group * sizes.queries >= _ROWS_AT_ONCE:
            break
    if best is None:
        sizes = _clipped(problem, Sizes(1, *(block_size or (_STEP, _STEP))))
        raise ArgumentError(
            f"max_bytes is {max_bytes}; a block of {sizes.queries} queries and one of {sizes.keys} "
            f"keys, of one key/value head, take {held_bytes(problem, sizes, backward)} bytes; "
            f"pass at least as many{', or a smaller block_size' if block_size else ''}"
        )
    return best


def _largest(problem: Problem, backward: bool, heads: int, max_bytes: int) -> Sizes:
    """The largest blocks that fit, of nearly equal parts; the smallest if none do."""
    lengths = problem.seqlen_q, problem.seqlen_k
    fits, too_many = 1, 1 + math.ceil(max(*lengths, 1) / _STEP)  # in steps
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        sizes = Sizes(heads, middle * _STEP, middle * _STEP)
        if held_bytes(problem, sizes, backward) <= max_bytes:
            fits = middle
        else:
            too_many = middle
    queries, keys = (_even_part(length, fits * _STEP) for length in lengths)
    return Sizes(heads, queries, keys)


def _even_part(length: int, most: int) -> int:
    """Size of the blocks, at most `most`, of a length that is cut into as few as can be."""
    if length <= most:
        return max(1, length)
    return _up(math.ceil(length / math.ceil(length / most)), _STEP)


def _clipped(problem: Problem, sizes: Sizes) -> Sizes:
    queries = min(sizes.queries, max(1, problem.seqlen_q))
    return Sizes(sizes.heads, queries, min(sizes.keys, max(1, problem.seqlen_k)))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def blocks(problem: Problem, sizes: Sizes, by_keys: bool) -> Iterator[Block]:
    """Blocks of queries with the blocks of keys that they see; or, by keys, the other way round.

    Every second block meets its others from the last to the first: those that the block before has
    left in memory are the ones to begin with.
    """
    lengths = (problem.seqlen_q, problem.seqlen_k)
    (outer_length, inner_length), (outer_size, inner_size) = lengths, sizes[1:]
    if by_keys:
        outer_length, inner_length = inner_length, outer_length
        outer_size, inner_size = inner_size, outer_size
    low, high = _reach(problem, by_keys)
    for batch in range(problem.batch):
        for kv_heads in cuts(problem.kv_heads, sizes.heads):
            for number, outer in enumerate(cuts(outer_length, outer_size)):
                first = 0 if low is None else max(0, outer.start + low)
                last = inner_length if high is None else min(inner_length, outer.stop + high)
                start = first // inner_size * inner_size if first < last else last
                inner = [*cuts(last, inner_size, start, inner_length)]
                order = inner[::-1] if number % 2 else inner
                yield Block(batch, kv_heads, outer, tuple(order) or (slice(0, 0),))


def _reach(problem: Problem, by_keys: bool) -> tuple[int | None, int | None]:
    """Outer n .. m - 1 and inner n + low .. m + high - 1 see something of each other."""
    band = problem.band
    low = None if band.left is None else band.diagonal - band.left
    high = None if band.right is None else band.diagonal + band.right
    if not by_keys:
        return low, high
    return (None if high is None else -high), (None if low is None else -low)


def cuts(stop: int, size: int, start: int = 0, end: int | None = None) -> Iterator[slice]:
    """Blocks that begin before `stop`, each of `size` but for the last one before `end`."""
    end = stop if end is None else end
    return (slice(at, min(at + size, end)) for at in range(start, stop, size))


def pieces(problem: Problem, rows: slice, keys: slice) -> list[Piece]:
    """The calls of `cufa.attention` that a pair of blocks takes, without those that see nothing.

    A call has its own diagonal: its last query and its last key are on it. Rows and keys are left
    out at the end as far as they see nothing of each other, so that the bounds of the band about
    that diagonal are not negative.
    """
    if problem.alibi_slopes is None:
        parts = [(rows, keys, "")]
    else:
        parts = _about_alibi(problem, rows, keys)
    found = (_bounded(problem, *part) for part in parts)
    return [piece for piece in found if piece is not None]


def _about_alibi(problem: Problem, rows: slice, keys: slice) -> list[tuple[slice, slice, str]]:
    """Parts of a pair that ALiBi's diagonal does not cross, and one that ends on it."""
    shift = problem.seqlen_k - problem.seqlen_q  # key i + shift has distance 0 from row i
    begin = min(max(rows.start, keys.start - shift), rows.stop)  # rows before are left of all keys
    end = max(min(rows.stop, keys.stop - shift), begin)  # rows from here on are right of them
    middle = slice(begin, end)
    return [
        (slice(rows.start, begin), keys, "right"),
        (middle, slice(keys.start, end + shift), "across"),
        (middle, slice(end + shift, keys.stop), "right"),
        (slice(end, rows.stop), keys, "left"),
    ]


def _bounded(problem: Problem, rows: slice, keys: slice, side: str) -> Piece | None:
    """A piece with the band about its own diagonal; None if no row sees a key."""
    band = problem.band
    row_end, key_end = rows.stop, keys.stop
    if band.right is not None:
        key_end = min(key_end, row_end + band.diagonal + band.right)
    if band.left is not None:
        row_end = min(row_end, key_end - band.diagonal + band.left)
    seen = rows.start < row_end and keys.start < key_end
    if band.right is not None:
        seen = seen and keys.start <= row_end - 1 + band.diagonal + band.right
    if band.left is not None:
        seen = seen and key_end - 1 >= rows.start + band.diagonal - band.left
    if not seen:
        return None
    rows, keys = slice(rows.start, row_end), slice(keys.start, key_end)
    # The band's diagonal lies so many keys to the right of the piece's own.
    offset = row_end + band.diagonal - key_end
    left = None if band.left is None else band.left - offset
    right = None if band.right is None else band.right + offset
    if left is not None and left >= keys.stop - keys.start - 1:
        left = None  # it hides nothing
    if right is not None and right >= rows.stop - rows.start - 1:
        right = None
    return Piece(rows, keys, None if left is right is None else (left, right), side)
