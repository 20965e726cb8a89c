"""What the NumPy backend computes with, forward and backward: blocks, threads, scores, products."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cufa.arrays import Arrays, distinct, four_axes, narrowed
from cufa.dropout import keep_block
from cufa.problem import Problem

Array = NDArray[Any]
Order = Literal["C", "F"]
#: Which batches, key/value heads, heads of a group and query rows.
Task = tuple[slice, ...]
Share = TypeVar("Share")

#: Most scores in a block: 1 MB of float32 stays in the second-level cache, and smaller blocks make
#: the threads wait for each other at Python's interpreter lock.
_BLOCK_SCORES = 1 << 18
#: Most query rows in a block of one pair of batch and head.
_BLOCK_ROWS = 512
#: Most elements in a block of q, k or v of one pair; twice as many in that of several.
_BLOCK_ELEMENTS = 1 << 17
#: On 16 processors more threads than this were slower: they wait at that lock.
_MAX_THREADS = 8
#: Scores that are worth a thread: about two milliseconds.
_SCORES_PER_THREAD = 1 << 19
#: Multiply-adds from which OpenBLAS, which most NumPy wheels bring, calls threads of its own.
_THREADED_GEMM = 1 << 18
_THREADED_GEMV = 9216


class Views(NamedTuple):
    """Every array with the axes (batch, kv_heads, group, rows, columns), in the caller's memory.

    A group is the query heads that share a key/value head; k and v have no such axis. `lse` and
    the per-head arrays have one column.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    sink: Array | None
    #: Of dropout: not an array, but no part of the problem either.
    seed: Any


def views_of(
    problem: Problem, arrays: Arrays, out: Array, lse: Array, layout: str, seed: Any
) -> Views:
    """The arrays of a call, and where its results are or go."""

    def optional(a: Array | None, rows: int, columns: int) -> Array | None:
        if a is None:
            return None
        return by_group(problem, np.broadcast_to(a, (problem.batch, problem.heads, rows, columns)))

    def per_head(a: Array | None) -> Array | None:
        return optional(None if a is None else a[..., None, None], 1, 1)

    return Views(
        q=by_group(problem, four_axes(arrays.q, layout)),
        k=four_axes(arrays.k, layout),
        v=four_axes(arrays.v, layout),
        out=by_group(problem, four_axes(out, layout)),
        lse=by_row(problem, lse),
        mask=optional(arrays.mask, problem.seqlen_q, problem.seqlen_k),
        bias=optional(arrays.bias, problem.seqlen_q, problem.seqlen_k),
        alibi_slopes=per_head(arrays.alibi_slopes),
        sink=per_head(arrays.sink),
        seed=seed,
    )


def by_group(problem: Problem, a: Array) -> Array:
    """A view of (batch, heads, rows, columns) with the heads as (kv_heads, group)."""
    return a.reshape(problem.batch, problem.kv_heads, problem.group, *a.shape[2:])


def by_row(problem: Problem, lse: Array) -> Array:
    """A view of an array of the shape of lse, with the axes of `Views`."""
    return by_group(problem, lse[(None,) * (3 - lse.ndim)][..., None])


class Tiling(NamedTuple):
    """Sizes of a block along the axes of `Views`, and of keys."""

    batch: int
    kv_heads: int
    group: int
    rows: int
    keys: int


def tiling_of(problem: Problem) -> Tiling:
    """Blocks of at most `_BLOCK_SCORES` scores, or half as many of float64.

    The query heads of a group are folded into the rows, since they read the same keys. What is
    still too small (decoding, short sequences, narrow windows) is filled with heads and batches.
    """
    most_scores = _BLOCK_SCORES // (2 if problem.accumulator == "float64" else 1)
    longest = max(1, _BLOCK_ELEMENTS // max(problem.head_dim, problem.head_dim_v))
    rows_limit = min(_BLOCK_ROWS, longest)
    group = min(problem.group, rows_limit)
    rows = rows_limit // group
    span = problem.seqlen_k  # keys that the rows of one block see
    if problem.band.left is not None and problem.band.right is not None:
        width = problem.band.left + problem.band.right + 1
        rows = min(rows, max(128, width))  # more rows would see few of each other's keys
        span = min(span, rows + width)
    rows = _even_parts(problem.seqlen_q, rows)
    keys = _even_parts(span, max(1, min(most_scores // _BLOCK_ROWS, longest)))
    most_pairs = 2 * longest // max(group * rows, keys)
    pairs = max(1, min(most_scores // (group * rows * keys), most_pairs))
    kv_heads = min(problem.kv_heads, pairs)
    return Tiling(min(problem.batch, pairs // kv_heads), kv_heads, group, rows, keys)


def _even_parts(size: int, limit: int) -> int:
    """Size of the parts, at most `limit`, of a length that is to be cut into nearly equal ones."""
    if size <= limit:
        return max(1, size)
    step = min(64, limit)  # whole tiles, see matmul
    part = math.ceil(size / math.ceil(size / limit))
    return min(part + -part % step, limit - limit % step)


def cuts(problem: Problem, tiling: Tiling) -> list[list[slice]]:
    """The slices of a `Task` that there are, along each of its axes."""
    axes = (problem.batch, problem.kv_heads, problem.group, problem.seqlen_q)
    return [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(axes, tiling[:4], strict=True)
    ]


def threads_worth(problem: Problem) -> int:
    """As many threads as there are processors and as the work is worth."""
    # To read a key and its value takes the time of some 16 scores.
    all_keys = problem.batch * problem.kv_heads * problem.seqlen_k
    scores = all_keys * (16 + problem.group * problem.seqlen_q)
    return min(_processors(), _MAX_THREADS, max(1, scores // _SCORES_PER_THREAD))


def run_threads(
    threads: int, shares: Iterable[Share], worker: Callable[[], Callable[[Share], None]]
) -> None:
    """Have every share worked on; each thread calls `worker` for what it works with."""
    left, lock = iter(shares), Lock()

    def thread() -> None:
        work = worker()
        while True:
            with lock:
                share = next(left, None)
            if share is None:
                return
            # The error state is the thread's own. Overflow, 0 * inf and log(0) mean what IEEE says.
            with np.errstate(all="ignore"):
                work(share)

    if threads == 1:
        thread()
        return
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(thread) for _ in range(threads)]
        try:
            for job in jobs:
                job.result()
        finally:  # after an error or Ctrl-C no thread begins another share
            with lock:
                deque(left, maxlen=0)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workspace:
    """Memory of one thread, used again for every block.

    Scores and all else that has their rows lie with the rows adjacent (NumPy's order "F"): sums and
    maxima over keys then run over whole vectors, and BLAS takes k and v as they are. Under a mask
    or a bias whose keys are adjacent the scores lie as that does, since to cross the two orders
    costs more than all the rest.
    """

    def __init__(self, problem: Problem, views: Views, tiling: Tiling) -> None:
        crossing = any(
            a is not None and a.shape[-2] > 1 and 0 < abs(a.strides[-1]) < abs(a.strides[-2])
            for a in (views.mask, views.bias)
        )
        self.order: Order = "C" if crossing else "F"
        # BLAS is slow at q @ k.T in order "C", but for a few rows a copy of k is not worth it.
        many_rows = tiling.group * tiling.rows > 64
        self.k_order: Order = "F" if crossing and many_rows else "C"
        self.keys = tiling.keys
        pairs = tiling.batch * tiling.kv_heads
        self.most_rows, self.most_keys = pairs * tiling.group * tiling.rows, pairs * tiling.keys
        self.dtype = np.dtype(problem.accumulator)
        self.q = self.of_rows(problem.head_dim)
        self.k = self.of_keys(problem.head_dim)
        self.v = self.of_keys(problem.head_dim_v)
        self.scores = self.of_rows(tiling.keys)

    def of_rows(self, columns: int) -> Array:
        """Memory for so many numbers for each row of a block."""
        return np.empty(self.most_rows * columns, self.dtype)

    def of_keys(self, columns: int) -> Array:
        """Memory for so many numbers for each key of a block."""
        return np.empty(self.most_keys * columns, self.dtype)


def block(memory: Array, shape: tuple[int, ...], order: Order) -> Array:
    """An array at the start of `memory`; `order` is that of the last two axes."""
    if order == "F":
        return block(memory, (*shape[:-2], shape[-1], shape[-2]), "C").swapaxes(-1, -2)
    return memory[: math.prod(shape)].reshape(shape)


def scale_is_folded(problem: Problem) -> bool:
    """Whether queries are multiplied by the scale; else they might leave the dtype's range."""
    return 1e-4 < abs(problem.scale) <= 1


def load_queries(problem: Problem, views: Views, task: Task, space: Workspace) -> Array:
    """The queries of a task, rows of the whole group in one axis, times the scale if that folds."""
    q = views.q[task]
    folded = (*q.shape[:2], q.shape[2] * q.shape[3])
    loaded = block(space.q, (*folded, problem.head_dim), space.order)
    np.copyto(loaded.reshape(q.shape), q)
    if scale_is_folded(problem):
        loaded *= problem.scale
    return loaded


def multiply_keys(problem: Problem, q: Array, k: Array, space: Workspace) -> Array:
    """S = scale * Q K^T, of queries as `load_queries` gives them."""
    s = block(space.scores, (*q.shape[:3], k.shape[2]), space.order)
    matmul(q, k.swapaxes(-1, -2), s)
    if not scale_is_folded(problem):
        s *= problem.scale
    return s


def for_blas(a: Array, memory: Array, order: Order) -> Array:
    """`a` as BLAS can read it: itself if dtype and order are right, else a copy in `memory`."""
    inner, outer = (-1, -2) if order == "C" else (-2, -1)
    adjacent = a.strides[inner] == a.itemsize
    if a.dtype == memory.dtype and adjacent and a.strides[outer] >= a.shape[inner] * a.itemsize:
        return a
    copy = block(memory, a.shape, order)
    np.copyto(copy, a)
    return copy


def matmul(a: Array, b: Array, out: Array) -> None:
    """Write ``a @ b`` to `out` in tiles so small that BLAS computes each in the calling thread.

    For more, OpenBLAS calls threads of its own and serves one caller at a time: ours would wait.
    """
    if out.strides[-1] != out.itemsize:
        a, b, out = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2)
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    limit = (_THREADED_GEMM if rows > 1 and columns > 1 else _THREADED_GEMV - 1) // inner
    # As near to a square as powers of two allow: it is read the fewest times.
    tile_columns = _tile(columns, max(1 << limit.bit_length() // 2, limit // rows))
    tile_rows = _tile(rows, limit // tile_columns)
    for r in _cuts(rows, tile_rows):
        for c in _cuts(columns, tile_columns):
            x, y, z = a[..., r, :], b[..., c], out[..., r, c]
            m, n = min(tile_rows, x.shape[-2]), min(tile_columns, y.shape[-1])
            x = x.reshape(*x.shape[:-2], -1, 1, m, inner)
            y = y.reshape(*y.shape[:-1], -1, n).swapaxes(-2, -3)[..., None, :, :, :]
            z = z.reshape(*z.shape[:-2], -1, m, z.shape[-1] // n, n).swapaxes(-2, -3)
            np.matmul(x, y, out=z)


def _tile(size: int, limit: int) -> int:
    """Length of a tile: a multiple of 16 where there is room, since BLAS computes in such steps."""
    limit = max(1, limit if limit < 16 else limit - limit % 16)
    return min(size, limit)


def _cuts(size: int, step: int) -> list[slice]:
    """The whole steps of a length, and the rest."""
    whole = size - size % step
    return [slice(0, whole)] + ([slice(whole, size)] if whole < size else [])


def visible_keys(problem: Problem, rows: slice) -> tuple[int, int]:
    """The keys that at least one row may see by its position."""
    band = problem.band
    first, last = 0, problem.seqlen_k
    if band.left is not None:
        first = max(first, rows.start + band.diagonal - band.left)
    if band.right is not None:
        last = min(last, rows.stop + band.diagonal + band.right)
    return first, last


def cap_scores(problem: Problem, s: Array) -> None:
    """Softcap, in place."""
    if problem.softcap is not None:
        s /= problem.softcap
        np.tanh(s, out=s)
        s *= problem.softcap


def modify_scores(problem: Problem, views: Views, s: Array, task: Task, keys: slice) -> None:
    """ALiBi, bias and masks, in this order, in place; `s` has the axes of `Views`."""
    rows = task[3]
    if views.alibi_slopes is not None:
        shift = problem.seqlen_k - problem.seqlen_q
        distance = _offsets(rows, keys, shift).astype(s.dtype)
        np.abs(distance, out=distance)
        s -= narrowed(views.alibi_slopes[task[:3]], s.dtype.name) * distance
    if views.bias is not None:
        s += narrowed(distinct(views.bias[(*task, keys)]), s.dtype.name)
    if views.mask is not None:
        # Infinity where a key takes part, else -infinity. A masked copy is slower: it branches at
        # every element. fmin and not minimum, since a hidden score may be NaN.
        limit = distinct(views.mask[(*task, keys)]).astype(s.dtype)
        limit -= 0.5
        limit *= np.inf
        np.fmin(s, limit, out=s)
    band = problem.band
    if band.right is not None and keys.stop - 1 > rows.start + band.diagonal + band.right:
        np.copyto(s, -np.inf, where=_offsets(rows, keys, band.diagonal) > band.right)
    if band.left is not None and keys.start < rows.stop - 1 + band.diagonal - band.left:
        np.copyto(s, -np.inf, where=_offsets(rows, keys, band.diagonal) < -band.left)


def kept_weights(problem: Problem, views: Views, p: Array, task: Task, keys: slice) -> Array:
    """Where dropout keeps the weights `p`, which have the axes of `Views`."""
    batch, kv_heads, group = (np.arange(cut.start, cut.stop) for cut in task[:3])
    batch, head = batch[:, None, None], kv_heads[:, None] * problem.group + group
    keep = np.empty_like(p, bool)  # it lies as p does: to cross the two orders costs more
    keep[...] = keep_block(np, views.seed, problem.dropout_p, batch, head, task[3], keys)
    return keep


def _offsets(rows: slice, keys: slice, diagonal: int) -> Array:
    """How far each key lies to the right of the diagonal, shape (rows, keys), order "F"."""
    i = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None]
    j = np.arange(keys.start, keys.stop, dtype=np.int32)
    offsets: Array = np.subtract(j, i + diagonal, order="F")
    return offsets
