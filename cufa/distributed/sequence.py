"""How a sequence lies on the ranks, and what of each other's rows two ranks can see.

Source of the zigzag split: the context parallelism of Llama 3, arXiv:2407.21783, section 3.3.2.
Striped attention, Brandon et al., arXiv:2311.09431, deals out single rows to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from cufa.arrays import namespace
from cufa.errors import ArgumentError, ShapeError
from cufa.long.plan import Piece, pieces
from cufa.options import plain_integer
from cufa.problem import Problem

SPLITS = ("contiguous", "zigzag")


class Chunk(NamedTuple):
    """Rows of the whole sequence, and where they begin among those of their rank."""

    start: int
    length: int
    local_start: int


class Part(NamedTuple):
    """One call of attention: rows of a rank's queries and of a block's keys, counted from the start
    of the rank's arrays.

    `window` is that of the call: None where each of the queries sees all of the keys. `piece` is
    the same in the whole sequence; of joined parts, the first. ALiBi alone reads it, and with it
    parts are not joined.
    """

    rows: slice
    keys: slice
    window: tuple[int | None, int | None] | None
    piece: Piece


def zigzag_split(a: Any, rank: int, size: int, *, axis: int = -2) -> Any:
    """A rank's rows of a whole sequence, so that causal attention is equal work for all ranks.

    The sequence is cut into ``2 * size`` chunks, nearly equal; a rank has chunk `rank` and chunk
    ``2 * size - 1 - rank``: rows that see few keys, and rows that see many.

    Parameters
    ----------
    a : array
        Of the whole sequence, the same on each rank that calls this.
    rank, size : int
    axis : int, default -2
        Of the sequence; -3 in layout "bshd".

    Returns
    -------
    array
        A copy: the two chunks in this order. Lengths may differ between ranks, and be 0 where the
        sequence is shorter than ``2 * size``.

    Raises
    ------
    ArgumentError
        `rank` is not below `size`, or one of them is too small.
    DTypeError
        They are no integers.
    """
    size = plain_integer("size", size, 1)
    if not plain_integer("rank", rank, 0) < size:
        raise ArgumentError(f"rank is {rank} and size is {size}; it must be below size")
    rows = (_on_axis(a, axis, c) for c in _zigzag(a.shape[axis], size)[rank])
    return namespace(a).concatenate(list(rows), axis=axis)


def zigzag_join(parts: Sequence[Any], *, axis: int = -2) -> Any:
    """The whole sequence from the rows of all ranks: `zigzag_split` backwards.

    Parameters
    ----------
    parts : sequence of array
        Of each rank, in the order of the ranks.
    axis : int, default -2
        Of the sequence; -3 in layout "bshd", -1 of an lse.

    Returns
    -------
    array
        A copy.

    Raises
    ------
    ShapeError
        The parts do not have the lengths that `zigzag_split` makes.
    """
    lengths = [part.shape[axis] for part in parts]
    every = chunks_of("zigzag", lengths, "parts")
    placed = [
        (chunk.start, _on_axis(part, axis, chunk._replace(start=chunk.local_start)))
        for part, chunks in zip(parts, every, strict=True)
        for chunk in chunks
    ]
    placed.sort(key=lambda chunk: chunk[0])
    # Chunks of no rows begin where their neighbours do: where they stand makes no difference.
    return namespace(parts[0]).concatenate([rows for _, rows in placed], axis=axis)


def chunks_of(split: str, lengths: Sequence[int], name: str) -> tuple[tuple[Chunk, ...], ...]:
    """Where the rows of each rank lie in the whole sequence, if the ranks have so many; `name` is
    that of the argument.

    Raises
    ------
    ShapeError
        They are not those of `zigzag_split`.
    """
    if split == "contiguous":
        starts = [0, *accumulate(lengths)][:-1]
        return tuple((Chunk(start, n, 0),) for start, n in zip(starts, lengths, strict=True))
    chunks = _zigzag(sum(lengths), len(lengths))
    for rank, (length, both) in enumerate(zip(lengths, chunks, strict=True)):
        if length != (wanted := sum(chunk.length for chunk in both)):
            raise ShapeError(
                f"{name} has seqlen {length} on rank {rank}; of {sum(lengths)} rows in all, "
                f"zigzag_split gives that rank {wanted}"
            )
    return chunks


def visible_parts(
    queries: Sequence[Chunk], keys: Sequence[Chunk], whole: Problem
) -> tuple[Part, ...]:
    """The calls of attention that give what queries see of keys; none where they see nothing.

    `whole` is the problem of the whole sequences.
    """
    found: list[Part] = []
    for q in queries:
        for k in keys:
            rows, columns = (slice(c.start, c.start + c.length) for c in (q, k))
            for piece in pieces(whole, rows, columns):
                own = (_local(piece.rows, q), _local(piece.keys, k))
                _append(found, Part(*own, piece.window, piece))
    return tuple(found)


def _local(part: slice, chunk: Chunk) -> slice:
    """Rows of the whole sequence as they are counted on their rank."""
    return slice(*(n - chunk.start + chunk.local_start for n in (part.start, part.stop)))


def _append(found: list[Part], part: Part) -> None:
    """Add a part, joined with those beside it where one call can do both: large ones are faster."""
    while found and (joined := _joined(found[-1], part)):
        found.pop()
        part = joined
    if len(found) > 1 and (square := _causal_square(found[-2], found[-1], part)):
        del found[-2:]
        part = square
    found.append(part)


def _joined(a: Part, b: Part) -> Part | None:
    if a.window is not None or b.window is not None or a.piece.side:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return a._replace(keys=slice(a.keys.start, b.keys.stop))
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return a._replace(rows=slice(a.rows.start, b.rows.stop))
    return None


def _causal_square(first: Part, between: Part, last: Part) -> Part | None:
    """The causal square that two squares on the diagonal and the whole one below them make; None
    if they do not."""
    is_causal = all(
        part.window == (None, 0) and length_of(part.rows) == length_of(part.keys)
        for part in (first, last)
    )
    if not is_causal or first.piece.side or between[:3] != (last.rows, first.keys, None):
        return None
    if first.rows.stop != last.rows.start or first.keys.stop != last.keys.start:
        return None
    rows, keys = (slice(a.start, b.stop) for a, b in zip(first[:2], last[:2], strict=True))
    return first._replace(rows=rows, keys=keys)


def length_of(part: slice) -> int:
    """Elements of a slice with both ends."""
    length: int = part.stop - part.start
    return length


def _zigzag(seqlen: int, size: int) -> tuple[tuple[Chunk, ...], ...]:
    cuts = [n * seqlen // (2 * size) for n in range(2 * size + 1)]
    chunks = []
    for rank in range(size):
        early, late = rank, 2 * size - 1 - rank
        length = cuts[early + 1] - cuts[early]
        chunks.append(
            (
                Chunk(cuts[early], length, 0),
                Chunk(cuts[late], cuts[late + 1] - cuts[late], length),
            )
        )
    return tuple(chunks)


def _on_axis(a: Any, axis: int, chunk: Chunk) -> Any:
    where = [slice(None)] * a.ndim
    where[axis] = slice(chunk.start, chunk.start + chunk.length)
    return a[tuple(where)]
