"""Sweeps over pairs of blocks: what is loaded for each, computed, summed up and stored.

Three sweeps have one form: a block of queries meets blocks of keys, for the output or for dq, or a
block of keys meets blocks of queries, for dk and dv. What the first holds is finished when it has
met all, and goes where the caller wants it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from cufa.arrays import distinct, narrowed
from cufa.attention import attention
from cufa.backward import attention_backward
from cufa.long import alibi
from cufa.long.plan import Block, Piece, Sizes, pieces
from cufa.long.sums import GradientSum, RunningOutput
from cufa.problem import Problem

#: What is to be in memory for one pair of blocks, and what is: arrays of queries, of keys, of both.
Loaded = dict[str, tuple[Any, ...]]
#: An array that is finished, and where it goes.
Copy = tuple[Any, Any]


class Wanted(NamedTuple):
    """The arrays of one pair of blocks, where the caller has them."""

    #: Of each kind of arrays, what tells its block from others.
    names: dict[str, tuple[int, ...]]
    views: Loaded


class Stage(Protocol):
    """Where blocks are computed, and how they get there and back."""

    #: NumPy or CuPy.
    xp: Any

    def place(self, a: Any) -> Any:
        """A small array there."""

    def reserve(self, largest: Loaded) -> None:
        """Before all else: the arrays of the largest blocks."""

    def load(self, wanted: Wanted) -> None:
        """Begin to bring blocks there; those in use stay as they are."""

    def take(self, wanted: Wanted) -> Loaded:
        """Those that were loaded last, from now on in use."""

    def launched(self) -> None:
        """What is to be done with them has begun."""

    def store(self, copies: list[Copy], stored: Callable[[], None]) -> None:
        """Begin to bring results back; then call `stored`."""

    def finish(self) -> None:
        """Wait until all is stored."""

    def close(self) -> None:
        """Wait until nothing is copied any more."""


class InPlace:
    """Blocks are computed where they are: views of the caller's arrays, nothing is copied."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def place(self, a: Any) -> Any:
        return a

    def reserve(self, largest: Loaded) -> None:
        pass

    def load(self, wanted: Wanted) -> None:
        pass

    def take(self, wanted: Wanted) -> Loaded:
        return wanted.views

    def launched(self) -> None:
        pass

    def store(self, copies: list[Copy], stored: Callable[[], None]) -> None:
        for target, source in copies:
            target[...] = source
        stored()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Sweep(ABC):
    """What is computed of each pair of blocks.

    Parameters
    ----------
    problem : Problem
    views : dict
        Arrays of axes (batch, heads, seqlen, ...) by name; mask and bias of the scores' shape.
    slopes, sink : array or None
        On the stage: (batch, heads) and (heads,), in the accumulator's dtype.
    results : dict
        Where results go, with the axes of `views`.
    """

    #: Whether blocks of keys meet blocks of queries.
    by_keys = False
    #: Arrays of a block of queries, as far as there are; q is the first.
    of_queries: tuple[str, ...] = ("q",)

    def __init__(
        self,
        xp: Any,
        problem: Problem,
        views: dict[str, Any],
        slopes: Any,
        sink: Any,
        results: dict[str, Any],
    ) -> None:
        self.xp, self.problem, self.views = xp, problem, views
        self.slopes, self.sink, self.results = slopes, sink, results

    @abstractmethod
    def add(self, block: Block, piece: Piece, arrays: dict[str, Any], options: Any) -> None:
        """Compute a piece, and add it to what the block has so far."""

    @abstractmethod
    def finish(self, block: Block, arrays: dict[str, Any]) -> dict[str, Any]:
        """What the block has come to, by the names of `results`, to begin with nothing again.

        `arrays` are the block's own, and those that it met last.
        """

    def file_name(self, block: Block) -> str:
        """Of a block's results, one of its own among all sweeps."""
        return f"{'keys' if self.by_keys else 'queries'}-{block.name}"

    def heads(self, block: Block) -> slice:
        """Query heads of a block."""
        group = self.problem.group
        return slice(block.kv_heads.start * group, block.kv_heads.stop * group)

    def rows_and_keys(self, block: Block, inner: slice) -> tuple[slice, slice]:
        """Queries and keys of a pair of blocks."""
        return (inner, block.outer) if self.by_keys else (block.outer, inner)

    def wanted(self, block: Block, inner: slice) -> Wanted:
        """What a pair of blocks needs."""
        rows, keys = self.rows_and_keys(block, inner)
        batch, kv_heads, heads = block.batch, block.kv_heads, self.heads(block)
        place = (batch, kv_heads.start)
        return Wanted(
            {
                "queries": (*place, rows.start, rows.stop),
                "keys": (*place, keys.start, keys.stop),
                "scores": (*place, rows.start, rows.stop, keys.start, keys.stop),
            },
            {
                "queries": tuple(self.views[n][batch, heads, rows] for n in self.names("queries")),
                "keys": tuple(self.views[n][batch, kv_heads, keys] for n in self.names("keys")),
                "scores": tuple(
                    distinct(self.views[n][batch, heads, rows, keys]) for n in self.names("scores")
                ),
            },
        )

    def largest(self, sizes: Sizes) -> Loaded:
        """The arrays of the largest pair of blocks."""
        rows, keys = slice(0, sizes.queries), slice(0, sizes.keys)
        outer, inner = (keys, rows) if self.by_keys else (rows, keys)
        return self.wanted(Block(0, slice(0, sizes.heads), outer, (inner,)), inner).views

    def names(self, kind: str) -> Iterator[str]:
        """Of the arrays of one kind, in the order of `Loaded`."""
        known = {"queries": self.of_queries, "keys": ("k", "v"), "scores": ("mask", "bias")}
        return (name for name in known[kind] if self.views.get(name) is not None)

    def by_name(self, loaded: Loaded) -> dict[str, Any]:
        """The arrays of a pair of blocks."""
        pairs = (zip(self.names(kind), arrays, strict=True) for kind, arrays in loaded.items())
        return {name: a for pair in pairs for name, a in pair}

    def meet(self, block: Block, inner: slice, loaded: Loaded) -> None:
        """Compute one pair of blocks."""
        rows, keys = self.rows_and_keys(block, inner)
        arrays = self.by_name(loaded)
        for piece in pieces(self.problem, rows, keys):
            r, c = _within(piece.rows, rows), _within(piece.keys, keys)
            cut = {n: arrays[n][:, r] for n in self.names("queries")}
            cut |= {n: arrays[n][:, c] for n in self.names("keys")}
            scores = {n: _cut_scores(arrays[n], r, c) for n in self.names("scores")}
            options = {
                "window": piece.window,
                "scale": self.problem.scale,
                "softcap": self.problem.softcap,
                **scores,
            }
            if self.slopes is not None:
                slopes = self.slopes[block.batch, self.heads(block)]
                if piece.side == "across":
                    options["alibi_slopes"] = slopes
                else:
                    by_key = alibi.of_keys(self.xp, piece, slopes)
                    bias = scores.get("bias")
                    options["bias"] = (
                        by_key if bias is None else narrowed(bias, by_key.dtype.name) + by_key
                    )
            self.add(block, piece, cut, options)

    def move_lse(self, block: Block, piece: Piece, lse: Any, sign: int) -> Any:
        """The lse of a piece from that of its call to that of the whole problem, or back, as
        `alibi.moved` says."""
        slopes = self.slopes[block.batch, self.heads(block)]
        of_rows = alibi.of_rows(self.xp, self.problem, piece, slopes)
        return alibi.moved(self.xp, lse, of_rows, sign)


def run(
    sweep: Sweep,
    stage: Stage,
    sizes: Sizes,
    blocks: Iterable[Block],
    met: Callable[[], None],
    stored: Callable[[Block], None],
) -> None:
    """Have all blocks meet; `met` is called after each pair, `stored` when a block's results are
    where they belong."""
    pairs = ((block, inner) for block in blocks for inner in block.inner)
    try:
        ahead = next(pairs, None)
        if ahead is not None:
            stage.reserve(sweep.largest(sizes))
            stage.load(sweep.wanted(*ahead))
        while ahead is not None:
            (block, inner), ahead = ahead, next(pairs, None)
            loaded = stage.take(sweep.wanted(block, inner))
            with np.errstate(all="ignore"):  # overflow and NaN mean what IEEE says
                sweep.meet(block, inner, loaded)
                if inner is block.inner[-1]:
                    found = sweep.finish(block, sweep.by_name(loaded))
                    copies = [(a, found[name]) for name, a in targets_of(sweep, block).items()]
                    stage.store(copies, partial(stored, block))
            stage.launched()
            if ahead is not None:
                stage.load(sweep.wanted(*ahead))
            else:
                stage.finish()
            met()
    finally:
        stage.close()


def targets_of(sweep: Sweep, block: Block) -> dict[str, Any]:
    """Where the results of a block go: views of `results`, shape (heads, rows, ...)."""
    heads = block.kv_heads if sweep.by_keys else sweep.heads(block)
    return {name: a[block.batch, heads, block.outer] for name, a in sweep.results.items()}


class Forward(Sweep):
    """Output and lse of a block of queries: those over each block of keys, merged."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._running = RunningOutput(self.xp, self.problem.accumulator)

    def add(self, block: Block, piece: Piece, arrays: dict[str, Any], options: Any) -> None:
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        out, lse = attention(q, k, v, return_lse=True, **options)
        if piece.side in ("left", "right"):
            lse = self.move_lse(block, piece, lse, -1)
        rows = _within(piece.rows, block.outer)
        self._running.add(rows, block.outer.stop - block.outer.start, out, lse)

    def finish(self, block: Block, arrays: dict[str, Any]) -> dict[str, Any]:
        q, v = arrays["q"], arrays["v"]
        shape = (*q.shape[:2], v.shape[2])
        sink = None if self.sink is None else self.sink[self.heads(block)]
        out, lse = self._running.finish(shape, sink)
        return {"out": out.astype(q.dtype, copy=False), "lse": lse}


class ByQueries(Sweep):
    """dq of a block of queries, the sum over blocks of keys; and what its rows add to dsink."""

    of_queries = ("q", "dout", "out", "lse", "dlse")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dq = GradientSum(self.xp, self.problem.accumulator)

    def add(self, block: Block, piece: Piece, arrays: dict[str, Any], options: Any) -> None:
        rows = _within(piece.rows, block.outer)
        dq = _gradients(self, block, piece, arrays, options, ("q",)).dq
        self._dq.add(rows, block.outer.stop - block.outer.start, dq)

    def finish(self, block: Block, arrays: dict[str, Any]) -> dict[str, Any]:
        q = arrays["q"]
        found = {"q": self._dq.finish(q.shape).astype(q.dtype, copy=False)}
        if "sink" in self.results:
            found["sink"] = self._of_sink(block, arrays)
        return found

    def _of_sink(self, block: Block, arrays: dict[str, Any]) -> Any:
        """``-exp(sink - lse) * D`` of each row; the sum over all rows is the gradient."""
        wide, lse = self.problem.accumulator, arrays["lse"]
        product = arrays["dout"].astype(wide)
        product *= arrays["out"].astype(wide, copy=False)
        delta = product.sum(-1)
        if "dlse" in arrays:
            delta = delta - arrays["dlse"]
        sink = self.sink[self.heads(block)][:, None]
        base = self.xp.where(lse == -np.inf, np.inf, lse)
        weights = self.xp.exp(self.xp.minimum(sink - base, 0))
        return -(weights * delta).astype(wide, copy=False)


class ByKeys(Sweep):
    """dk and dv of a block of keys, the sums over blocks of queries."""

    by_keys = True
    of_queries = ByQueries.of_queries

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sums = {name: GradientSum(self.xp, self.problem.accumulator) for name in self.results}

    def add(self, block: Block, piece: Piece, arrays: dict[str, Any], options: Any) -> None:
        keys = _within(piece.keys, block.outer)
        found = _gradients(self, block, piece, arrays, options, tuple(self._sums))
        for name, total in self._sums.items():
            total.add(keys, block.outer.stop - block.outer.start, getattr(found, f"d{name}"))

    def finish(self, block: Block, arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: total.finish(arrays[name].shape).astype(arrays[name].dtype, copy=False)
            for name, total in self._sums.items()
        }


def _gradients(
    sweep: Sweep,
    block: Block,
    piece: Piece,
    arrays: dict[str, Any],
    options: Any,
    wrt: tuple[str, ...],
) -> Any:
    """What a piece adds to the gradients: with the output and lse over all keys, its share."""
    if piece.side in ("left", "right"):  # the lse of scores that lack what ALiBi takes of the row
        arrays = {**arrays, "lse": sweep.move_lse(block, piece, arrays["lse"], 1)}
    return attention_backward(**arrays, **options, wrt=wrt)


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _cut_scores(a: Any, rows: slice, keys: slice) -> Any:
    """Rows and keys of an array that has one element along axes that it is repeated along."""
    rows, keys = (
        slice(None) if n == 1 else cut for n, cut in zip(a.shape[1:], (rows, keys), strict=True)
    )
    return a[:, rows, keys]
