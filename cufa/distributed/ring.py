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
from cufa.attention import attention, merged_weights
from cufa.backward import attention_backward
from cufa.distributed.calls import Call, agree_on, axis_of, options_of, rows_in, some_rows
from cufa.distributed.communicator import Communicator, Pending
from cufa.distributed.sequence import Chunk, Part, visible_parts
from cufa.gradients import Gradients, Saved
from cufa.long import alibi
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
    is on its way. A rank holds two blocks of others at most.

    Parameters
    ----------
    comm : Communicator
        Of `cufa.distributed.connect`.
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
        Another rank failed or is late; the message names it.
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
    with comm.together("ring_attention"):
        sums, scores = _Sums(call, q, sink), _Scores(call, alibi_slopes)
        for step, block in _travel(comm, call, k, v):
            for part in _parts(comm, call, step):
                sums.add(part, *_attend(call, scores, q, block, part))
        out = sums.out.astype(q.dtype)
    return (out, sums.lse) if return_lse else out


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
    float64 inputs), as they travel.
    """
    arrays = Arrays(q, k, v, alibi_slopes=alibi_slopes, sink=sink)
    saved = Saved(dout, out, lse, dlse)
    options = options_of(causal, window, softcap, scale, layout, algorithm)
    name = "ring_attention_backward"
    call = agree_on(comm, name, arrays, options, split, others, saved, deterministic)
    with comm.together(name):
        scores = _Scores(call, alibi_slopes)
        work = _Backward(call, scores, q, saved, bool(deterministic))
        home = _Home(comm, call)
        for step, block in _travel(comm, call, k, v):
            home.add(step, work.gradients(block, _parts(comm, call, step)))
        dk, dv = home.arrive()
        dsink = None if sink is None else work.of_sink(comm, k, v, sink)
        with np.errstate(over="ignore"):  # a gradient beyond the dtype's range is infinite
            dq, dk, dv = (a.astype(q.dtype) for a in (work.dq, dk, dv))
    return Gradients(dq, dk, dv, None, dsink)


def _travel(comm: Communicator, call: Call, k: Any, v: Any) -> Iterator[tuple[int, _Block]]:
    """The block of each step; while the caller computes with one, the next is on its way."""
    block = [namespace(a).ascontiguousarray(a) for a in (k, v)]
    steps = _steps(call.queries, call.keys, call.whole)
    for step in range(steps):
        pending, following = None, block
        if step + 1 < steps:
            pending, following = _pass_on(comm, call, block, 1, step + 1)
        yield step, block
        if pending:
            pending.wait()
        block = following


def _pass_on(
    comm: Communicator, call: Call, block: _Block, distance: int, step: int
) -> tuple[Pending, _Block]:
    """Begin to send a block so many ranks on, and to receive the one that belongs to a step."""
    to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
    seqlen = rows_in(call.keys[_owner(comm, step)])
    following = [_with_rows(a, seqlen, call.layout) for a in block]
    pending = comm.start([(a, to) for a in block], [(a, source) for a in following])
    return pending, following


def _owner(comm: Communicator, step: int) -> int:
    """Whose keys a rank has in a step."""
    return (comm.rank - step) % comm.size


def _parts(comm: Communicator, call: Call, step: int) -> tuple[Part, ...]:
    """What a rank computes in a step."""
    return visible_parts(call.queries[comm.rank], call.keys[_owner(comm, step)], call.whole)


@lru_cache(maxsize=256)
def _steps(
    queries: tuple[tuple[Chunk, ...], ...], keys: tuple[tuple[Chunk, ...], ...], whole: Problem
) -> int:
    """Steps until no rank sees anything of what would come next."""
    size = len(queries)
    for step in reversed(range(1, size)):
        if any(visible_parts(queries[r], keys[(r - step) % size], whole) for r in range(size)):
            return step + 1
    return 1


def _with_rows(a: Any, seqlen: int, layout: str) -> Any:
    """An array like `a`, to be filled, with so many rows."""
    shape = list(a.shape)
    shape[axis_of(layout, a.ndim)] = seqlen
    return namespace(a).empty(shape, a.dtype)


class _Scores:
    """What is done to the scores of a part."""

    def __init__(self, call: Call, slopes: Any) -> None:
        self._call, self._given = call, slopes
        self._slopes = None if slopes is None else narrowed(slopes, call.own.accumulator)

    def options(self, part: Part) -> dict[str, Any]:
        """Of `attention`."""
        options = {"window": part.window, **self._call.options("layout")}
        if part.piece.side == "across":
            return {**options, "alibi_slopes": self._given}
        if part.piece.side:
            xp = namespace(self._slopes)
            return {**options, "bias": alibi.of_keys(xp, part.piece, self._slopes)}
        return options

    def moved(self, lse: Any, part: Part, sign: int) -> Any:
        """The lse of a part with what ALiBi takes from its rows, by sign -1, or from there back."""
        if part.piece.side not in ("left", "right"):
            return lse
        xp = namespace(lse)
        of_rows = alibi.of_rows(xp, self._call.whole, part.piece, self._slopes)
        return lse + sign * of_rows[(0,) * max(0, of_rows.ndim - lse.ndim)]


def _attend(call: Call, scores: _Scores, q: Any, block: _Block, part: Part) -> tuple[Any, Any]:
    """Out and lse of one call."""
    k, v = (some_rows(a, part.keys, call.layout) for a in block)
    rows = some_rows(q, part.rows, call.layout)
    out, lse = attention(rows, k, v, return_lse=True, **scores.options(part))
    return out, scores.moved(lse, part, -1)


class _Sums:
    """Results of a rank's queries over the keys of all parts so far, the sink first."""

    def __init__(self, call: Call, q: Any, sink: Any) -> None:
        xp, own = namespace(q), call.own
        self._layout = call.layout
        self.out = xp.zeros(own.out_shape, own.accumulator)
        self.lse = xp.full(own.lse_shape, -np.inf, own.accumulator)
        self._is_empty = sink is None
        if sink is not None:  # a key of value 0
            logits = narrowed(sink, own.accumulator)[:, None]
            self.lse[...] = logits.reshape(logits.shape if q.ndim > 2 else (1,))

    def add(self, part: Part, out: Any, lse: Any) -> None:
        """As `merge` does, in place: there is as much to be added as there is to be computed."""
        here = some_rows(self.out, part.rows, self._layout)
        if self._is_empty:
            here[...], self.lse[..., part.rows] = out, lse
            self._is_empty = False
            return
        with np.errstate(all="ignore"):  # log(0), and NaN that came with the results
            both, *weights = merged_weights(namespace(lse), self.lse[..., part.rows], lse)
            kept, added = (w[..., None] for w in weights)
            if axis_of(self._layout, out.ndim) == -3:
                kept, added = kept.swapaxes(-2, -3), added.swapaxes(-2, -3)
            weighted = out.astype(here.dtype)
            weighted *= added
            here *= kept
            here += weighted
        self.lse[..., part.rows] = both


class _Backward:
    """Gradients of a rank's queries, as far as their parts have been computed."""

    def __init__(
        self, call: Call, scores: _Scores, q: Any, saved: Saved, deterministic: bool
    ) -> None:
        self._call, self._scores, self._q, self._saved = call, scores, q, saved
        self._deterministic = deterministic
        self.dq = namespace(q).zeros(q.shape, call.own.accumulator)

    def gradients(self, block: _Block, parts: tuple[Part, ...]) -> _Block:
        """What these queries add to the gradients of a block; adds to their own."""
        wide, sums = self.dq.dtype, list[Any]()
        for part in parts:
            found = self._of_part(block, part)
            self._add(self.dq, part.rows, found.dq)
            if not sums and found.dk.shape == block[0].shape:  # of all its keys
                sums = [a.astype(wide, copy=False) for a in (found.dk, found.dv)]
                continue
            sums = sums or _zeros(block, wide)
            for total, gradient in zip(sums, (found.dk, found.dv), strict=True):
                self._add(total, part.keys, gradient)
        return sums or _zeros(block, wide)

    def of_sink(self, comm: Communicator, k: Any, v: Any, sink: Any) -> Any:
        """The gradient of the sink, which no key has a part in."""
        none = slice(0, 0)
        k, v = (some_rows(a, none, self._call.layout) for a in (k, v))
        dout, out, lse, dlse = self._saved
        wide = narrowed(sink, self._call.own.accumulator)
        options = {**self._call.options("layout"), "sink": wide, "wrt": "sink"}
        found = attention_backward(dout, self._q, k, v, out, lse, dlse=dlse, **options)
        comm.all_reduce(found.dsink).wait()
        return found.dsink.astype(sink.dtype)

    def _of_part(self, block: _Block, part: Part) -> Gradients:
        layout, saved = self._call.layout, self._saved
        k, v = (some_rows(a, part.keys, layout) for a in block)
        q, dout, out = (some_rows(a, part.rows, layout) for a in (self._q, saved.dout, saved.out))
        dlse = None if saved.dlse is None else saved.dlse[..., part.rows]
        lse = self._scores.moved(saved.lse[..., part.rows], part, 1)
        options = {**self._scores.options(part), "deterministic": self._deterministic}
        wrt = ("q", "k", "v")
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **options)

    def _add(self, total: Any, rows: slice, gradient: Any) -> None:
        here = some_rows(total, rows, self._call.layout)
        here += gradient.astype(total.dtype)


def _zeros(block: _Block, dtype: Any) -> _Block:
    return [namespace(a).zeros(a.shape, dtype) for a in block]


class _Home:
    """Sums of the gradients of a block, which follow it round the ring and then go home."""

    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._call = comm, call
        self._steps = _steps(call.queries, call.keys, call.whole)
        self._pending: Pending | None = None
        self._sums: _Block = []

    def add(self, step: int, gradients: _Block) -> None:
        """What this rank has computed in a step; sends it on."""
        if self._pending:
            self._pending.wait()
            for total, gradient in zip(gradients, self._sums, strict=True):
                total += gradient
        self._sums = gradients
        comm, call = self._comm, self._call
        if step + 1 < self._steps:
            self._pending, self._sums = _pass_on(comm, call, gradients, 1, step + 1)
        elif step:
            self._pending, self._sums = _pass_on(comm, call, gradients, -step, 0)

    def arrive(self) -> _Block:
        """The gradients of this rank's own keys and values."""
        if self._pending:
            self._pending.wait()
        return self._sums
