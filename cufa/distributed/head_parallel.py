"""Head-parallel attention: split over ranks by sequence outside, and by heads within.

Source: Jacobs et al., arXiv:2309.14509 (DeepSpeed Ulysses), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, four_axes, namespace, narrowed
from cufa.attention import attention
from cufa.backward import attention_backward
from cufa.distributed.calls import Call, agree_on, as_given, options_of, rows_in
from cufa.distributed.communicator import Communicator
from cufa.distributed.sequence import Chunk, length_of
from cufa.gradients import Gradients, Saved
from cufa.problem import Causal, Shape


class Share(NamedTuple):
    """Query heads of a rank, and the key/value heads that they read."""

    heads: slice
    kv_heads: slice


def head_parallel_attention(
    comm: Communicator,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    split: str = "contiguous",
    return_lse: bool = False,
    algorithm: str = "auto",
    **others: Any,
) -> Any:
    """Attention over a sequence that is split over ranks; each rank calls it with its own rows.

    The ranks exchange rows for heads: each gets the whole sequence of some heads, computes their
    attention, and gives the rows of the result back. Parameters, results and errors are those of
    `ring_attention`; docs/scaling.md says which to choose.

    Parameters
    ----------
    comm, q, k, v, causal, window, alibi_slopes, softcap, sink, scale, layout, split, return_lse
    algorithm
        As in `ring_attention`. Every rank has equal work if the number of ranks divides
        `kv_heads`, or `kv_heads` it and it `heads`; key/value heads that several ranks need go to
        each of them.

    Returns
    -------
    out : array, shape (batch, heads, seqlen_q, head_dim_v) in `layout`, dtype of `q`
        Of this rank's queries.
    lse : array, shape (batch, heads, seqlen_q), only with `return_lse`

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, RankError, RankTimeoutError, ShapeError
    UnsupportedError
        As `ring_attention`.
    """
    arrays = Arrays(q, k, v, alibi_slopes=alibi_slopes, sink=sink)
    options = options_of(causal, window, softcap, scale, layout, algorithm)
    name = "head_parallel_attention"
    call = agree_on(comm, name, arrays, options, split, others)
    with comm.together(name):
        turn = _Turn(comm, call)
        q_, k_, v_ = turn.to_heads([*turn.of_queries(q), *turn.of_keys(k, v)])
        by_head = {"alibi_slopes": turn.own_part(alibi_slopes), "sink": turn.own_part(sink)}
        own = attention(q_, k_, v_, return_lse=True, **by_head, **turn.options)
        out, lse = turn.to_rows([(a, turn.queries) for a in (own[0], own[1][..., None])])
        out, lse = turn.in_axes_of(q, out), lse.reshape(call.own.lse_shape)
    return (out, lse) if return_lse else out


def head_parallel_attention_backward(
    comm: Communicator,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    split: str = "contiguous",
    algorithm: str = "auto",
    deterministic: bool = False,
    **others: Any,
) -> Gradients:
    """Gradients of a loss by the inputs of `head_parallel_attention`, each rank's rows on it.

    Parameters, results and errors are those of `ring_attention_backward`.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, None, dsink)``; `dsink` is the sum over all ranks, on each of them.

    Notes
    -----
    Where several ranks have the same key/value head, their gradients by it, rounded to the dtype
    of `q`, are summed in float32 (float64 for float64 inputs).
    """
    arrays = Arrays(q, k, v, alibi_slopes=alibi_slopes, sink=sink)
    saved = Saved(dout, out, lse, dlse)
    options = options_of(causal, window, softcap, scale, layout, algorithm)
    name = "head_parallel_attention_backward"
    call = agree_on(comm, name, arrays, options, split, others, saved, deterministic)
    with comm.together(name):
        turn = _Turn(comm, call)
        given = [*turn.of_queries(q, dout, out), *turn.of_keys(k, v), *turn.of_rows(lse, dlse)]
        q_, dout_, out_, k_, v_, *numbers = turn.to_heads(given)
        lse_, dlse_ = (*(a[..., 0] for a in numbers), None)[:2]
        by_head = {"alibi_slopes": turn.own_part(alibi_slopes), "sink": turn.own_part(sink)}
        more = {"dlse": dlse_, "deterministic": deterministic, **by_head, **turn.options}
        found = attention_backward(dout_, q_, k_, v_, out_, lse_, **more)
        sides = (turn.queries, turn.keys, turn.keys)
        rows = turn.to_rows(list(zip(found[:3], sides, strict=True)))
        dsink = None if sink is None else turn.all_parts(found.dsink).astype(sink.dtype)
        with np.errstate(over="ignore"):  # a gradient beyond the dtype's range is infinite
            dq, dk, dv = (turn.in_axes_of(q, a).astype(q.dtype) for a in rows)
    return Gradients(dq, dk, dv, None, dsink)


def shares_of(heads: int, kv_heads: int, size: int) -> list[Share]:
    """Which heads each rank has: key/value heads as evenly as can be, or, where there are more
    ranks, the query heads of each shared by some of them."""
    group = heads // max(kv_heads, 1)
    if size <= kv_heads or not kv_heads:
        cuts = [rank * kv_heads // size for rank in range(size + 1)]
        return [Share(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(cuts)]
    of_rank = [rank * kv_heads // size for rank in range(size)]
    found = []
    for rank, kv_head in enumerate(of_rank):
        first, sharing = of_rank.index(kv_head), of_rank.count(kv_head)
        a, b = (kv_head * group + (n - first) * group // sharing for n in (rank, rank + 1))
        found.append(Share(slice(a, b), slice(kv_head, kv_head + (a < b))))
    return found


class _Side(NamedTuple):
    """Of queries or of keys: the heads that each rank has within, and its rows outside."""

    heads: list[slice]
    chunks: tuple[tuple[Chunk, ...], ...]
    #: In all.
    total_heads: int
    seqlen: int


class _Turn:
    """Rows of all heads turned into all rows of some heads, and back.

    Arrays have the axes (batch, heads, seqlen, columns).
    """

    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._call, whole = comm, call, call.whole
        shares = shares_of(whole.heads, whole.kv_heads, comm.size)
        self.queries = _Side([s.heads for s in shares], call.queries, whole.heads, whole.seqlen_q)
        self.keys = _Side([s.kv_heads for s in shares], call.keys, whole.kv_heads, whole.seqlen_k)
        #: Of `attention` on whole sequences.
        self.options = call.options("causal", "window")

    def to_heads(self, arrays: Sequence[tuple[Any, _Side]]) -> list[Any]:
        """The whole sequence of this rank's heads, from each rank's rows of all heads."""
        outgoing, shapes = [], []
        for a, side in arrays:
            outgoing.append([a[:, heads] for heads in side.heads])
            count = length_of(side.heads[self._comm.rank])
            shapes.append([(a.shape[0], count, rows_in(c), a.shape[3]) for c in side.chunks])
        found = []
        for (a, side), pieces in zip(arrays, self._swap(outgoing, shapes), strict=True):
            shape = (*pieces[0].shape[:2], side.seqlen, a.shape[3])
            whole = namespace(a).empty(shape, a.dtype)
            for piece, chunks in zip(pieces, side.chunks, strict=True):
                for chunk in chunks:
                    rows = piece[:, :, chunk.local_start : chunk.local_start + chunk.length]
                    whole[:, :, chunk.start : chunk.start + chunk.length] = rows
            found.append(whole)
        return found

    def to_rows(self, arrays: Sequence[tuple[Any, _Side]]) -> list[Any]:
        """This rank's rows of all heads; of a head that several ranks have, the sum over these, in
        the accumulator's dtype."""
        outgoing, shapes = [], []
        for whole, side in arrays:
            outgoing.append([_rows_at(whole, chunks) for chunks in side.chunks])
            seqlen = rows_in(side.chunks[self._comm.rank])
            shapes.append(
                [(whole.shape[0], length_of(h), seqlen, whole.shape[3]) for h in side.heads]
            )
        found = []
        for (whole, side), pieces in zip(arrays, self._swap(outgoing, shapes), strict=True):
            shape = (whole.shape[0], side.total_heads, pieces[0].shape[2], whole.shape[3])
            shared = side is self.keys
            dtype = self._call.whole.accumulator if shared else whole.dtype
            xp = namespace(whole)
            rows = xp.zeros(shape, dtype) if shared else xp.empty(shape, dtype)
            for piece, heads in zip(pieces, side.heads, strict=True):
                if shared:
                    rows[:, heads] += piece.astype(dtype)
                else:
                    rows[:, heads] = piece
            found.append(rows)
        return found

    def of_queries(self, *arrays: Any) -> list[tuple[Any, _Side]]:
        """Arrays with the axes of q, as `to_heads` takes them."""
        return [(four_axes(a, self._call.layout), self.queries) for a in arrays]

    def of_keys(self, *arrays: Any) -> list[tuple[Any, _Side]]:
        """Arrays with the axes of k."""
        return [(four_axes(a, self._call.layout), self.keys) for a in arrays]

    def of_rows(self, *arrays: Any) -> list[tuple[Any, _Side]]:
        """Arrays with the axes of lse, those that there are."""
        own = self._call.own
        shape = (own.batch, own.heads, own.seqlen_q, 1)
        return [(a.reshape(shape), self.queries) for a in arrays if a is not None]

    def in_axes_of(self, given: Any, a: Any) -> Any:
        """A contiguous array with the axes of the caller's."""
        return as_given(a if given.ndim == 4 else a[0], given, self._call.layout)

    def own_part(self, a: Any) -> Any:
        """Of numbers for each head, on the last axis, those of this rank's heads, in the
        accumulator's dtype."""
        if a is None:
            return None
        own = self.queries.heads[self._comm.rank]
        return narrowed(a[..., own], self._call.whole.accumulator)

    def all_parts(self, a: Any) -> Any:
        """`own_part` backwards: the numbers of all heads, on every rank."""
        every = namespace(a).zeros(self.queries.total_heads, a.dtype)
        every[self.queries.heads[self._comm.rank]] = a
        self._comm.all_reduce(every).wait()
        return every

    def _swap(
        self, outgoing: Sequence[Sequence[Any]], shapes: Sequence[Sequence[Shape]]
    ) -> list[list[Any]]:
        """Of each array, give every rank its piece and get one, of the shape given, from it."""
        comm, sends, receives, found = self._comm, [], [], []
        for pieces, of_rank in zip(outgoing, shapes, strict=True):
            xp, incoming = namespace(pieces[0]), []
            for rank, (piece, shape) in enumerate(zip(pieces, of_rank, strict=True)):
                if rank == comm.rank:
                    incoming.append(piece)
                    continue
                incoming.append(xp.empty(shape, piece.dtype))
                sends.append((xp.ascontiguousarray(piece), rank))
                receives.append((incoming[-1], rank))
            found.append(incoming)
        comm.start(sends, receives).wait()
        return found


def _rows_at(whole: Any, chunks: Sequence[Chunk]) -> Any:
    """The rows of a rank in an array of all rows."""
    rows = [whole[:, :, chunk.start : chunk.start + chunk.length] for chunk in chunks]
    return namespace(whole).concatenate(rows, axis=2)
