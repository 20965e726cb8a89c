"""Attention over sequences that are too long for a card's memory: `LongSequenceAttention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, check_overlap, four_axes, narrowed
from cufa.errors import DTypeError
from cufa.gradients import Gradients, Saved, make_backward, sign_backward
from cufa.long.call import (
    Place,
    by_row,
    check_target,
    check_writeable,
    checked,
    plain_block_size,
    saved_blocks,
    views_of,
)
from cufa.long.plan import Block, Sizes, blocks, choose_sizes, held_bytes
from cufa.long.saved_blocks import SavedBlocks
from cufa.long.sweep import ByKeys, ByQueries, Forward, Sweep, run, targets_of
from cufa.options import plain_choice, plain_integer, shown
from cufa.problem import Causal, Problem, Window

DEVICES = ("auto", "cpu", "gpu")
#: Kinds of sweeps, and where the results of each go.
_Sweeps = dict[type[Sweep], dict[str, Any]]


class LongPlan(NamedTuple):
    """How a call is cut up."""

    #: Key/value heads that are worked on at once.
    heads: int
    #: Query rows of a block, and keys of a block.
    queries: int
    keys: int
    #: Pairs of blocks that see each other, of all heads and batches; what `progress` counts.
    pairs: int
    #: What the blocks take on a card at most, beside arrays that are there anyway.
    bytes: int


class LongSequenceAttention:
    """`cufa.attention` in blocks that go to a card one after the other, and its gradients.

    Queries and keys are cut into blocks. A block of queries meets one block of keys after the
    other, without those that no query of it sees, and results over different keys are merged as
    `cufa.merge` does. Arrays in host memory, `numpy.memmap` among them, stay there: two blocks of
    each are on the card at a time, one in use, one on its way. Without a card, and for arrays that
    are on one already, blocks are computed where they are.

    Parameters
    ----------
    block_size : int or pair of ints, default None
        Query rows of a block and keys of a block; one number is both. None: the longest blocks
        that `max_bytes` allows, which is the fastest.
    max_bytes : int, default None
        What may be taken of the card's memory, beside arrays that are there anyway; `plan` says
        what is. None: 1 GiB, or as much as `block_size` needs if that is given.
    device : {"auto", "cpu", "gpu"}, default "auto"
        Where to compute on arrays in host memory: on CuPy's current card, or in place on the CPU.
        "auto": on a card if CuPy finds one.
    progress : callable, default None
        ``progress(done, total)`` is called at the beginning, whenever a pair of blocks has been
        computed (from host memory on a card: the one before it), and with ``done == total`` when
        all results are where they belong.

    Raises
    ------
    ArgumentError, DTypeError
        An option outside its choices or range, or of the wrong kind.

    Notes
    -----
    A result of one pair of blocks, without a sink or ALiBi, is what `cufa.attention` gives. Others
    are rounded to the dtype of `q` for each call of it that they took, and summed in float32
    (float64 for float64 inputs), so that they differ from that in the last places. The same call
    gives the same bits again, but for dq on a card, which is summed in any order within a block.

    docs/long.md has the formula of the memory, and how blocks are chosen.

    Source: Dao, arXiv:2307.08691, Algorithms 1 and 2, whose blocks these are once more, one level
    up; Ye et al., arXiv:2501.01005 (merging).

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1000, 64), dtype=np.float32)
    >>> long = cufa.LongSequenceAttention(block_size=256, device="cpu")
    >>> out, lse = long(q, k, v, causal=True, return_lse=True)
    >>> long.backward(np.ones_like(out), q, k, v, out, lse, causal=True).dq.shape
    (2, 1000, 64)
    >>> long.plan(q, k, v, causal=True).pairs
    10
    """

    def __init__(
        self,
        block_size: int | tuple[int, int] | None = None,
        max_bytes: int | None = None,
        *,
        device: str = "auto",
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self._block_size = None if block_size is None else plain_block_size(block_size)
        self._max_bytes = None if max_bytes is None else plain_integer("max_bytes", max_bytes, 1)
        self._device = plain_choice("device", device, DEVICES)
        if progress is not None and not callable(progress):
            raise DTypeError(f"progress is {shown(progress)}; it must be callable, or None")
        self._progress = progress

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: Causal = False,
        window: Window = None,
        mask: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        softcap: float | None = None,
        sink: Any = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        layout: str = "bhsd",
        return_lse: bool = False,
        out: Any = None,
        checkpoint_dir: Any = None,
    ) -> Any:
        """Attention.

        Parameters
        ----------
        q, k, v : array
            As in `cufa.attention`, but NumPy's or CuPy's: all in host memory, or all on one card.
        causal, window, mask, bias, alibi_slopes, softcap, sink, scale, layout, return_lse
            As in `cufa.attention`. A mask and a bias are taken block by block too.
        dropout_p : float, default 0.0
            There is no dropout here.
        out : array, default None
            Where to put the output, such as a `numpy.memmap`: its shape and dtype, last axis
            contiguous, sharing no memory with an input.
        checkpoint_dir : path, default None
            A folder for finished blocks of queries, made if it is not there. A call that was killed
            goes on from these if it is made again, with the same inputs: all of them are read to
            tell. The files stay when all are done; delete the folder then.

        Returns
        -------
        out : array, shape (batch, heads, seqlen_q, head_dim_v) in the layout of `q`, dtype of `q`
        lse : array, shape (batch, heads, seqlen_q), only with `return_lse`
            As `cufa.attention` gives them, in host memory or on the card, where `q` is.

        Raises
        ------
        ArgumentError
            As in `cufa.attention`; `max_bytes` is too small; `checkpoint_dir` holds another run, or
            cannot be used.
        DeviceError, DTypeError, ShapeError
            As in `cufa.attention`; there is no card.
        UnsupportedError
            Dropout; ALiBi with ``causal="top_left"`` and lengths that differ; no kernel serves the
            call.
        """
        given = Arrays(q, k, v, mask, bias, alibi_slopes, sink, out)
        call, problem = checked(
            given,
            dropout_p,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
        )
        if out is not None:
            check_overlap(given, call)
            check_writeable("out", out)
        sizes = choose_sizes(problem, False, self._block_size, self._max_bytes)
        place = Place(call, q, self._device)
        with place.current():
            inputs = given._replace(out=None)._asdict()
            saved = saved_blocks(checkpoint_dir, "forward", place, call, sizes, inputs)
            out = place.empty(problem.out_shape, q.dtype) if out is None else out
            lse = place.empty(problem.lse_shape, problem.accumulator)
            results = {"out": four_axes(out, call.layout), "lse": by_row(lse)}
            views = views_of(problem, given, call.layout)
            self._run(place, problem, sizes, views, {Forward: results}, saved)
        return (out, lse) if call.return_lse else out

    def backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        causal: Causal = False,
        window: Window = None,
        mask: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        softcap: float | None = None,
        sink: Any = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        layout: str = "bhsd",
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        checkpoint_dir: Any = None,
    ) -> Gradients:
        """Gradients by q, k, v and sink, from those by the results.

        Blocks of queries meet those of keys for dq, and then the other way round for dk and dv, so
        that sums are only ever held of one block; scores are computed twice.

        Parameters
        ----------
        dout, out, lse, dlse : array
            As in `cufa.attention_backward`, of all queries; where `q` is.
        q, k, v : array
        causal, window, mask, bias, alibi_slopes, softcap, sink, dropout_p, scale, layout
            What the call was made with.
        dq, dk, dv : array, default None
            Where to put a gradient, such as a `numpy.memmap`: shape and dtype of its input, sharing
            no memory with an input or each other, no two elements in one place.
        checkpoint_dir : path, default None
            As in the call; another folder.

        Returns
        -------
        Gradients
            As `cufa.attention_backward` gives them; `dbias` is None. What a block adds to a
            gradient is rounded to the dtype of `q`, and infinite where that cannot hold it.

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
            As in the call; `dout`, `out`, `lse`, `dlse`, `dq`, `dk` or `dv` do not fit.
        """
        given = Arrays(q, k, v, mask, bias, alibi_slopes, sink)
        call, problem = checked(
            given,
            dropout_p,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            layout=layout,
        )
        saved = Saved(dout, out, lse, dlse)
        make_backward(sign_backward(call, saved, ("q", "k", "v"), False))
        inputs = {n: a for n, a in (given._asdict() | saved._asdict()).items() if a is not None}
        targets = {"q": dq, "k": dk, "v": dv}
        for name, target in targets.items():
            others = inputs | {f"d{n}": a for n, a in targets.items() if n != name}
            if target is not None:
                check_target(f"d{name}", target, inputs[name], others)
        sizes = choose_sizes(problem, True, self._block_size, self._max_bytes)
        place = Place(call, q, self._device)
        with place.current():
            finished = saved_blocks(checkpoint_dir, "backward", place, call, sizes, inputs)
            for name, target in targets.items():
                if target is None:
                    targets[name] = place.empty(inputs[name].shape, inputs[name].dtype)
            views = views_of(problem, given, call.layout)
            views |= {n: four_axes(inputs[n], call.layout) for n in ("dout", "out")}
            views |= {n: by_row(inputs[n]) for n in ("lse", "dlse") if n in inputs}
            results = {n: four_axes(a, call.layout) for n, a in targets.items()}
            by_queries = {"q": results.pop("q")}
            if sink is not None:  # what each row adds to its gradient
                rows = (problem.batch, problem.heads, problem.seqlen_q)
                by_queries["sink"] = place.empty(rows, problem.accumulator)
            sweeps: _Sweeps = {ByQueries: by_queries, ByKeys: results}
            self._run(place, problem, sizes, views, sweeps, finished)
            dsink = None
            if sink is not None:
                with np.errstate(all="ignore"):  # as in the sweeps
                    dsink = by_queries["sink"].sum((0, 2)).astype(sink.dtype)
        return Gradients(targets["q"], targets["k"], targets["v"], dsink=dsink)

    def plan(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: Causal = False,
        window: Window = None,
        mask: Any = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        softcap: float | None = None,
        sink: Any = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        layout: str = "bhsd",
        backward: bool = False,
    ) -> LongPlan:
        """How a call would be cut up; nothing is computed.

        Parameters
        ----------
        q, k, v
        causal, window, mask, bias, alibi_slopes, softcap, sink, dropout_p, scale, layout
            As in the call.
        backward : bool, default False
            Whether it is that of the gradients.

        Returns
        -------
        LongPlan
            Sizes of blocks, how many pairs of them there are, and the bytes that they take.

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
            As in the call.
        """
        backward = plain_choice("backward", backward, (False, True))
        given = Arrays(q, k, v, mask, bias, alibi_slopes, sink)
        _, problem = checked(
            given,
            dropout_p,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            layout=layout,
        )
        sizes = choose_sizes(problem, backward, self._block_size, self._max_bytes)
        kinds: list[type[Sweep]] = [ByQueries, ByKeys] if backward else [Forward]
        pairs = sum(_count_pairs(problem, sizes, kind) for kind in kinds)
        return LongPlan(*sizes, pairs, held_bytes(problem, sizes, backward))

    def _run(
        self,
        place: Place,
        problem: Problem,
        sizes: Sizes,
        views: dict[str, Any],
        sweeps: _Sweeps,
        saved: SavedBlocks | None,
    ) -> None:
        """All sweeps, without the blocks that are finished."""
        done, total = 0, sum(_count_pairs(problem, sizes, kind) for kind in sweeps)

        def met(pairs: int = 1) -> None:
            nonlocal done
            done += pairs
            if self._progress is not None:
                self._progress(done, total)

        met(0)
        for kind, results in sweeps.items():
            stage = place.stage()
            slopes, sink = (
                None
                if (a := views[name]) is None
                else stage.place(narrowed(a, problem.accumulator))
                for name in ("alibi_slopes", "sink")
            )
            sweep = kind(stage.xp, problem, views, slopes, sink, results)

            def unfinished(sweep: Sweep = sweep) -> Iterator[Block]:
                for block in blocks(problem, sizes, sweep.by_keys):
                    targets = list(targets_of(sweep, block).values())
                    if saved is not None and saved.load(sweep.file_name(block), targets):
                        met(len(block.inner))
                    else:
                        yield block

            def stored(block: Block, sweep: Sweep = sweep) -> None:
                if saved is not None:
                    saved.save(sweep.file_name(block), list(targets_of(sweep, block).values()))

            run(sweep, stage, sizes, unfinished(), met, stored)


def _count_pairs(problem: Problem, sizes: Sizes, kind: type[Sweep]) -> int:
    return sum(len(block.inner) for block in blocks(problem, sizes, kind.by_keys))
