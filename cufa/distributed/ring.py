"""Ring attention: the sequence split over ranks, keys and values passed on from rank to rank.

Sources: Liu et al., arXiv:2310.01889 (ring attention); Dao, arXiv:2307.08691 (partial results that
are put together by their log-sum-exp, and gradients from the saved one).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from cufa.arrays import Arrays, namespace, narrowed
from cufa.attention import attention
from cufa.backward import attention_backward
from cufa.distributed.calls import Call, agree_on, as_given, by_heads, options_of, rows_in
from cufa.distributed.communicator import Communicator, Pending
from cufa.distributed.sequence import Chunk, Part, visible_parts
from cufa.gradients import Gradients, Saved
from cufa.long import alibi
from cufa.long.sums import GradientSum, RunningOutput
from cufa.merging import plain_sum, wide_sum
from cufa.options import numpy_dtype
from cufa.problem import Causal, Problem

#: Keys and values of one rank, or the sums of their gradients.
_Block = list[Any]


def ring_attention(
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

    Keys and values travel round the ring of ranks; while a rank computes with one block, the next
    is on its way. A rank holds three blocks of others at most.

    Parameters
    ----------
    comm : Communicator
        From `cufa.distributed.connect`.
    q, k, v : array
        This rank's rows of the whole sequence, as `cufa.attention` takes arrays. Ranks may have
        different numbers of rows, and none; all else is the same on all ranks.
    causal, window, softcap, scale, layout, algorithm
        As in `cufa.attention`, of the whole sequence: with ``causal=True`` the last query of all
        sees every key. Where a window or `causal` hides the rest, the ring stops early.
    alibi_slopes : float array, shape (heads,) or (batch, heads), default None
    sink : float array, shape (heads,), default None
        The same on all ranks.
    split : {"contiguous", "zigzag"}, default "contiguous"
        Which rows of the whole sequence a rank has. "contiguous": those that follow the rows of the
        rank before it. "zigzag": those of `zigzag_split`, of queries as of keys; with `causal` all
        ranks then have equal work.
    return_lse : bool, default False
        Whether to return the lse too, which `ring_attention_backward` takes.

    Returns
    -------
    out : array, shape (batch, heads, seqlen_q, head_dim_v) in `layout`, dtype of `q`
        Of this rank's queries.
    lse : array, shape (batch, heads, seqlen_q), only with `return_lse`

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
        As `cufa.attention` does; or ranks differ in what must be the same. On every rank.
    RankError, RankTimeoutError
        Another rank failed or is late; the message names it, or those that it may be.
    UnsupportedError
        mask, bias or dropout; `alibi_slopes` with ``causal="top_left"`` and not as many queries as
        keys; or as `cufa.attention`.

    Notes
    -----
    Partial results are rounded to the dtype of `q`, put together in float32 (float64 for float64
    inputs) and rounded again at the end.
    """
    arrays = Arrays(q, k, v, alibi_slopes=alibi_slopes, sink=sink)
    options = options_of(causal, window, softcap, scale, layout, algorithm)
    call = agree_on(comm, "ring_attention", arrays, options, split, others)
    with comm.together("ring_attention"), np.errstate(all="ignore"):  # log(0), and NaN that came
        running = RunningOutput(namespace(q), call.own.accumulator)
        scores, rows = _Scores(call, alibi_slopes), by_heads(q, layout)
        for step, block in _travel(comm, call, k, v):
            for part in _parts(call, comm.rank, step):
                running.add(part.rows, rows.shape[-2], *_attend(scores, rows, block, part))
        shape = (*rows.shape[:-1], v.shape[-1])
        sink = None if sink is None else narrowed(sink, call.own.accumulator)
        out, lse = running.finish(shape, sink)
        out = as_given(out.astype(q.dtype, copy=False), q, layout)
    return (out, lse.reshape(call.own.lse_shape)) if return_lse else out


def ring_attention_backward(
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
    """Gradients of a loss by the inputs of `ring_attention`, each rank's rows on that rank.

    Keys and values travel again, each block with the sums of its gradients, which come home last.

    Parameters
    ----------
    comm : Communicator
    dout, out, lse, dlse : array
        As in `cufa.attention_backward`, of this rank's queries; `dlse` on all ranks or on none.
    q, k, v, causal, window, alibi_slopes, softcap, sink, scale, layout, split, algorithm
        What `ring_attention` was called with.
    deterministic : bool, default False
        As in `cufa.attention_backward`.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, None, dsink)``; `dsink` is the sum over all ranks, on each of them.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, RankError, RankTimeoutError, ShapeError
    UnsupportedError
        As `ring_attention`.

    Notes
    -----
    The parts of a gradient are rounded to the dtype of `q` and summed in float32 (float64 for
    float64 inputs), as they travel. A rank's own part of its dk and dv is added last. A part that
    the dtype of `q` cannot hold is infinite, and so is a sum in which it stands, or NaN.
    """
    arrays = Arrays(q, k, v, alibi_slopes=alibi_slopes, sink=sink)
    saved = Saved(dout, out, lse, dlse)
    options = options_of(causal, window, softcap, scale, layout, algorithm)
    name = "ring_attention_backward"
    call = agree_on(comm, name, arrays, options, split, others, saved, deterministic)
    with comm.together(name), np.errstate(all="ignore"):  # as attention: overflow is infinite
        scores = _Scores(call, alibi_slopes)
        work = _Backward(call, scores, q, saved, bool(deterministic))
        relay = _GradientRelay(comm, call)
        for step, block in _travel(comm, call, k, v):
            relay.add(step, work.gradients(block, _parts(call, comm.rank, step)))
        # While the last transfer runs; a sum over ranks comes behind it.
        dq = work.dq().astype(q.dtype, copy=False)
        dsink = None if sink is None else work.of_sink(comm, k, v, sink)
        dq, dk, dv = (as_given(a, q, layout) for a in (dq, *relay.finish(q.dtype)))
    return Gradients(dq, dk, dv, None, dsink)


def _travel(comm: Communicator, call: Call, k: Any, v: Any) -> Iterator[tuple[int, _Block]]:
    """The block of each step; while the caller computes with one, the next is on its way."""
    block = [namespace(a).ascontiguousarray(by_heads(a, call.layout)) for a in (k, v)]
    steps = _steps(call.queries, call.keys, call.whole)
    for step in range(steps):
        pending, following = None, block
        if step + 1 < steps:
            pending, following = _pass_on(comm, call, block, 1, step + 1, k.dtype)
        yield step, block
        if pending:
            pending.wait()
        block = following


def _pass_on(
    comm: Communicator, call: Call, block: _Block, distance: int, step: int, dtype: Any
) -> tuple[Pending, _Block]:
    """Begin to send a block so many ranks on, and to receive that of a step from as many ranks
    back, in a dtype of its own."""
    to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
    seqlen = rows_in(call.keys[_owner(comm.rank, step, comm.size)])
    following = [namespace(a).empty((*a.shape[:-2], seqlen, a.shape[-1]), dtype) for a in block]
    pending = comm.start([(a, to) for a in block], [(a, source) for a in following])
    return pending, following


def _owner(rank: int, step: int, size: int) -> int:
    """Whose keys a rank has in a step."""
    return (rank - step) % size


def _parts(call: Call, rank: int, step: int) -> tuple[Part, ...]:
    """What a rank computes in a step."""
    keys = call.keys[_owner(rank, step, len(call.keys))]
    return visible_parts(call.queries[rank], keys, call.whole)


@lru_cache(maxsize=256)
def _steps(
    queries: tuple[tuple[Chunk, ...], ...], keys: tuple[tuple[Chunk, ...], ...], whole: Problem
) -> int:
    """Steps of the ring, until no rank sees any key of what would come next."""
    size = len(queries)
    for step in reversed(range(1, size)):
        owners = (_owner(rank, step, size) for rank in range(size))
        if any(visible_parts(q, keys[o], whole) for q, o in zip(queries, owners, strict=True)):
            return step + 1
    return 1


class _Scores:
    """What is done to the scores of a part."""

    def __init__(self, call: Call, slopes: Any) -> None:
        self._call, self._given = call, slopes
        self._slopes = None if slopes is None else narrowed(slopes, call.own.accumulator)

    def options(self, part: Part) -> dict[str, Any]:
        """Options of `attention`, ALiBi among them."""
        options = {"window": part.window, **self._call.options()}
        if part.piece.side == "across":
            return {**options, "alibi_slopes": self._given}
        if part.piece.side:
            xp = namespace(self._slopes)
            return {**options, "bias": alibi.of_keys(xp, part.piece, self._slopes)}
        return options

    def moved(self, lse: Any, part: Part, sign: int) -> Any:
        """The lse of a part from that of its call to that of the whole problem, or back, as
        `alibi.moved` says."""
        if part.piece.side not in ("left", "right"):
            return lse
        xp = namespace(lse)
        of_rows = alibi.of_rows(xp, self._call.whole, part.piece, self._slopes)
        if of_rows.ndim > lse.ndim:  # slopes with an axis for a batch that arrays have not
            of_rows = of_rows[0]
        return alibi.moved(xp, lse, of_rows, sign)


def _attend(scores: _Scores, rows: Any, block: _Block, part: Part) -> tuple[Any, Any]:
    """Out and lse of one call."""
    k, v = (a[..., part.keys, :] for a in block)
    q = rows[..., part.rows, :]
    out, lse = attention(q, k, v, return_lse=True, **scores.options(part))
    return out, scores.moved(lse, part, -1)


class _Backward:
    """Gradients of a rank's queries, as far as their parts have been computed."""

    def __init__(
        self, call: Call, scores: _Scores, q: Any, saved: Saved, deterministic: bool
    ) -> None:
        self._call, self._scores, self._deterministic = call, scores, deterministic
        self._q, self._dout, self._out = (
            by_heads(a, call.layout) for a in (q, saved.dout, saved.out)
        )
        rows = self._q.shape[:-1]
        self._lse = saved.lse.reshape(rows)
        self._dlse = None if saved.dlse is None else saved.dlse.reshape(rows)
        self._dq = self._sum()

    def dq(self) -> Any:
        """Of axes (..., heads, rows, head_dim)."""
        return self._dq.finish(self._q.shape)

    def gradients(self, block: _Block, parts: tuple[Part, ...]) -> _Block:
        """What these queries add to the gradients of a block, of one part in the dtype of `q`; adds
        to their own."""
        sums = [self._sum() for _ in block]
        for part in parts:
            found = self._of_part(block, part)
            self._dq.add(part.rows, self._q.shape[-2], found.dq)
            for total, gradient in zip(sums, (found.dk, found.dv), strict=True):
                total.add(part.keys, block[0].shape[-2], gradient)
        return [total.finish(a.shape) for total, a in zip(sums, block, strict=True)]

    def of_sink(self, comm: Communicator, k: Any, v: Any, sink: Any) -> Any:
        """The gradient of the sink, which no key has a part in."""
        k, v = (by_heads(a, self._call.layout)[..., :0, :] for a in (k, v))
        wide = narrowed(sink, self._call.own.accumulator)
        options = {"dlse": self._dlse, "sink": wide, "wrt": "sink", **self._call.options()}
        rows = (self._out, self._lse)
        dsink = attention_backward(self._dout, self._q, k, v, *rows, **options).dsink
        comm.all_reduce(dsink).wait()
        return dsink.astype(sink.dtype)

    def _of_part(self, block: _Block, part: Part) -> Gradients:
        k, v = (a[..., part.keys, :] for a in block)
        q, dout, out = (a[..., part.rows, :] for a in (self._q, self._dout, self._out))
        lse = self._scores.moved(self._lse[..., part.rows], part, 1)
        dlse = None if self._dlse is None else self._dlse[..., part.rows]
        options = {**self._scores.options(part), "deterministic": self._deterministic}
        wrt = ("q", "k", "v")
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **options)

    def _sum(self) -> GradientSum:
        return GradientSum(namespace(self._q), self._call.own.accumulator)


class _GradientRelay:
    """Sums of the gradients of a block: they follow it round the ring and then go home, where what
    its own rank adds has waited for them."""

    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._call = comm, call
        self._steps = _steps(call.queries, call.keys, call.whole)
        self._pending: Pending | None = None
        self._own: _Block = []
        self._sums: _Block = []

    def add(self, step: int, gradients: _Block) -> None:
        """What this rank has computed in a step; sends it on."""
        if step == 0:
            self._own = gradients
            return
        comm, call, wide = self._comm, self._call, self._call.own.accumulator
        if self._pending:
            self._pending.wait()
            both = zip(self._sums, gradients, strict=True)
            gradients = [wide_sum(total, gradient, wide) for total, gradient in both]
        own_dtype = self._dtype(comm.rank, step)
        gradients = [a.astype(own_dtype, copy=False) for a in gradients]
        # After the last step straight to the owner.
        distance, following = (-step, 0) if step + 1 == self._steps else (1, step + 1)
        coming = self._dtype((comm.rank - distance) % comm.size, step)
        self._pending, self._sums = _pass_on(comm, call, gradients, distance, following, coming)

    def finish(self, dtype: Any) -> _Block:
        """The gradients of this rank's own keys and values."""
        if self._pending is None:
            return [a.astype(dtype, copy=False) for a in self._own]
        self._pending.wait()
        found = [namespace(a).empty(a.shape, dtype) for a in self._own]
        for a, b, total in zip(self._own, self._sums, found, strict=True):
            plain_sum(a, b, total, self._call.own.accumulator)
        return found

    def _dtype(self, rank: int, step: int) -> Any:
        """In which a rank sends its sums on, so that another can tell: that of what `GradientSum`
        gives for one part, before anything has been added to it, else the accumulator's."""
        own, is_part = self._call.own, step == 1 and len(_parts(self._call, rank, step)) == 1
        return numpy_dtype(own.dtype if is_part else own.accumulator)
