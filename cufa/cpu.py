"""The NumPy backend: FlashAttention-2 in blocks that stay in cache, on all processors.

Source: Dao, arXiv:2307.08691, Algorithm 1. A task owns a block of query rows, walks over the key
blocks that these rows can see, and keeps a running maximum `m`, a running sum `total` (the paper's
l) and an unnormalised output `acc`; it divides once, at the end. Memory beyond the result is one
workspace per thread.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cufa import standard
from cufa.arrays import Arrays, check_overlap, distinct, host_empty, narrowed
from cufa.dropout import keep_block
from cufa.errors import ArgumentError, UnsupportedError
from cufa.problem import Problem, Signature, make_problem

Array = NDArray[Any]
Order = Literal["C", "F"]
#: Which batches, key/value heads, heads of a group and query rows.
Task = tuple[slice, ...]

#: Most scores in a block: 1 MB of float32 stays in the second-level cache, and smaller blocks make
#: the threads wait for each other at Python's interpreter lock.
_BLOCK_SCORES = 1 << 18
#: Most query rows in a block of one pair of batch and head.
_BLOCK_ROWS = 512
#: Most elements in a block of q, k or v of one pair; twice as many in that of several.
_BLOCK_ELEMENTS = 1 << 17
ALGORITHMS = ("auto", "fa2", "standard")
#: On 16 processors more threads than this were slower: they wait at that lock.
_MAX_THREADS = 8
#: Scores that are worth a thread: about two milliseconds.
_SCORES_PER_THREAD = 1 << 19
#: Multiply-adds from which OpenBLAS, which most NumPy wheels bring, calls threads of its own.
_THREADED_GEMM = 1 << 18
_THREADED_GEMV = 9216


def run(call: Signature, arrays: Arrays, seed: Any = None) -> Any:
    """Attention on NumPy arrays; see `cufa.attention`. `seed` is that of dropout.

    Raises
    ------
    ArgumentError, DTypeError, OutOfMemoryError, ShapeError, UnsupportedError
        Before anything is written.
    """
    if call.algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"algorithm is {call.algorithm!r}, which has GPU kernels only; for NumPy inputs pass "
            "'auto' or 'fa2'"
        )
    problem = make_problem(call)
    out = arrays.out
    if out is not None:
        check_overlap(arrays)
        if not out.flags.writeable:
            raise ArgumentError("out is read-only; pass an array that can be written")
    if problem.algorithm == "standard":
        return standard.run(standard.NUMPY, problem, arrays, call.layout, seed)
    if out is None:
        out = host_empty(problem.out_shape, arrays.q.dtype)
    lse = host_empty(problem.lse_shape, problem.accumulator)
    if out.size:
        views = _views(problem, arrays, out, lse, call.layout, seed)
        _run_tasks(problem, views, _tiling(problem))
    return (out, lse) if problem.return_lse else out


class _Views(NamedTuple):
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
    #: Not an array, but no part of the problem either.
    seed: Any


def _views(
    problem: Problem, arrays: Arrays, out: Array, lse: Array, layout: str, seed: Any
) -> _Views:
    batch, heads, kv_heads = problem.batch, problem.heads, problem.kv_heads

    def four_axes(a: Array) -> Array:
        a = np.asarray(a)
        if layout == "bshd" and a.ndim > 2:
            a = a.swapaxes(-2, -3)
        return a[(None,) * (4 - a.ndim)]

    def grouped(a: Array) -> Array:
        return a.reshape(batch, kv_heads, problem.group, *a.shape[2:])

    def optional(a: Array | None, rows: int, columns: int) -> Array | None:
        return None if a is None else grouped(np.broadcast_to(a, (batch, heads, rows, columns)))

    def per_head(a: Array | None) -> Array | None:
        return optional(None if a is None else a[..., None, None], 1, 1)

    return _Views(
        q=grouped(four_axes(arrays.q)),
        k=four_axes(arrays.k),
        v=four_axes(arrays.v),
        out=grouped(four_axes(out)),
        lse=grouped(lse[(None,) * (3 - lse.ndim)][..., None]),
        mask=optional(arrays.mask, problem.seqlen_q, problem.seqlen_k),
        bias=optional(arrays.bias, problem.seqlen_q, problem.seqlen_k),
        alibi_slopes=per_head(arrays.alibi_slopes),
        sink=per_head(arrays.sink),
        seed=seed,
    )


class _Tiling(NamedTuple):
    """Sizes of a block along the axes of `_Views`, and of keys."""

    batch: int
    kv_heads: int
    group: int
    rows: int
    keys: int


def _tiling(problem: Problem) -> _Tiling:
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
    return _Tiling(min(problem.batch, pairs // kv_heads), kv_heads, group, rows, keys)


def _even_parts(size: int, limit: int) -> int:
    """Size of the parts, at most `limit`, of a length that is to be cut into nearly equal ones."""
    if size <= limit:
        return max(1, size)
    step = min(64, limit)  # whole tiles, see _matmul
    part = math.ceil(size / math.ceil(size / limit))
    return min(part + -part % step, limit - limit % step)


def _run_tasks(problem: Problem, views: _Views, tiling: _Tiling) -> None:
    """Run every task, on as many threads as there are processors and as the work is worth."""
    axes = (problem.batch, problem.kv_heads, problem.group, problem.seqlen_q)
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(axes, tiling[:4], strict=True)
    ]
    # To read a key and its value takes the time of some 16 scores.
    all_keys = problem.batch * problem.kv_heads * problem.seqlen_k
    scores = all_keys * (16 + problem.group * problem.seqlen_q)
    count = math.prod(map(len, cuts))
    threads = min(_processors(), _MAX_THREADS, count, max(1, scores // _SCORES_PER_THREAD))
    tasks, lock = product(*cuts), Lock()
    if threads == 1:
        _work(problem, views, tiling, tasks, lock)
        return
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_work, problem, views, tiling, tasks, lock) for _ in range(threads)]
        try:
            for job in jobs:
                job.result()
        finally:  # after an error or Ctrl-C no thread begins another task
            with lock:
                deque(tasks, maxlen=0)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _work(
    problem: Problem, views: _Views, tiling: _Tiling, tasks: Iterator[Task], lock: Lock
) -> None:
    """One thread: take tasks until there are none left."""
    space = _Workspace(problem, views, tiling)
    while True:
        with lock:
            task = next(tasks, None)
        if task is None:
            return
        # The error state is the thread's own. Overflow, 0 * inf and log(0) mean what IEEE says.
        with np.errstate(all="ignore"):
            _forward(problem, views, task, space)


class _Workspace:
    """Memory of one thread, used again for every block.

    Scores and all else that has their rows lie with the rows adjacent (NumPy's order "F"): sums and
    maxima over keys then run over whole vectors, and BLAS takes k and v as they are. Under a mask
    or a bias whose keys are adjacent the scores lie as that does, since to cross the two orders
    costs more than all the rest.
    """

    def __init__(self, problem: Problem, views: _Views, tiling: _Tiling) -> None:
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
        rows, keys = pairs * tiling.group * tiling.rows, pairs * tiling.keys
        dtype = np.dtype(problem.accumulator)
        self.q = np.empty(rows * problem.head_dim, dtype)
        self.k = np.empty(keys * problem.head_dim, dtype)
        self.v = np.empty(keys * problem.head_dim_v, dtype)
        self.scores = np.empty(rows * tiling.keys, dtype)
        self.acc = np.empty(rows * problem.head_dim_v, dtype)
        self.product = np.empty(rows * problem.head_dim_v, dtype)


def _block(memory: Array, shape: tuple[int, ...], order: Order) -> Array:
    """An array at the start of `memory`; `order` is that of the last two axes."""
    if order == "F":
        return _block(memory, (*shape[:-2], shape[-1], shape[-2]), "C").swapaxes(-1, -2)
    return memory[: math.prod(shape)].reshape(shape)


def _forward(problem: Problem, views: _Views, task: Task, space: _Workspace) -> None:
    """Algorithm 1 for one block of query rows: its lines 4 to 15."""
    order = space.order
    batches, kv_heads, _, rows = task
    q = views.q[task]
    split = q.shape[:4]
    folded = (*split[:2], split[2] * split[3])  # batch, kv_heads, rows of the whole group
    q_scaled = _block(space.q, (*folded, problem.head_dim), order)
    np.copyto(q_scaled.reshape(q.shape), q)
    fold_scale = 1e-4 < abs(problem.scale) <= 1  # else q * scale might leave the dtype's range
    if fold_scale:
        q_scaled *= problem.scale

    acc = _block(space.acc, (*folded, problem.head_dim_v), order)
    pv = _block(space.product, acc.shape, order)
    acc[...] = 0
    # The lowest finite number in place of the paper's -inf, since -inf - -inf is NaN.
    m = np.full((*folded, 1), np.finfo(acc.dtype).min, acc.dtype)
    total = np.zeros_like(m)

    # Weights below vanish beside the row's largest, which is 1, and are set to 0: products with
    # subnormal numbers are many times slower, and a steep ALiBi slope makes whole bands of them.
    negligible = math.log(np.finfo(acc.dtype).tiny) + 8
    first, last = _visible_keys(problem, rows)
    for start in range(first, last, space.keys):
        keys = slice(start, min(start + space.keys, last))
        k = _for_blas(views.k[batches, kv_heads, keys], space.k, space.k_order)
        v = _for_blas(views.v[batches, kv_heads, keys], space.v, "C")
        s = _block(space.scores, (*folded, keys.stop - keys.start), order)
        _matmul(q_scaled, k.swapaxes(-1, -2), s)  # S = Q K^T
        if not fold_scale:
            s *= problem.scale
        _modify_scores(problem, views, s.reshape(*split, -1), task, keys)

        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        s -= m_new
        counts = s >= negligible
        if not counts.all():
            s /= counts  # a negative number by 0: -inf
        p = np.exp(s, out=s)  # P = exp(S - m)
        rescale = np.exp(m - m_new)  # acc and total so far are relative to the previous m
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        if problem.dropout_p:  # the sum is that of all weights
            _drop(problem, views.seed, p.reshape(*split, -1), task, keys)
        _matmul(p, v, pv)
        acc *= rescale
        acc += pv
        m = m_new

    if views.sink is not None:  # a key of value 0, the last: the others must not vanish beside it
        sink = narrowed(views.sink[task[:3]], m.dtype.name)
        sink = np.broadcast_to(sink, (*split, 1)).reshape(m.shape)
        m_new = np.maximum(m, sink)
        rescale = np.exp(m - m_new)
        total = total * rescale + np.exp(sink - m_new)
        acc *= rescale
        m = m_new
    acc /= np.where(total == 0, 1, total) * (1 - problem.dropout_p)  # no key seen: 0
    views.out[task] = acc.reshape(*split, problem.head_dim_v)
    views.lse[task] = (m + np.log(total)).reshape(*split, 1)


def _for_blas(a: Array, memory: Array, order: Order) -> Array:
    """`a` as BLAS can read it: itself if dtype and order are right, else a copy in `memory`."""
    inner, outer = (-1, -2) if order == "C" else (-2, -1)
    adjacent = a.strides[inner] == a.itemsize
    if a.dtype == memory.dtype and adjacent and a.strides[outer] >= a.shape[inner] * a.itemsize:
        return a
    copy = _block(memory, a.shape, order)
    np.copyto(copy, a)
    return copy


def _matmul(a: Array, b: Array, out: Array) -> None:
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


def _visible_keys(problem: Problem, rows: slice) -> tuple[int, int]:
    """The keys that at least one row may see by its position."""
    band = problem.band
    first, last = 0, problem.seqlen_k
    if band.left is not None:
        first = max(first, rows.start + band.diagonal - band.left)
    if band.right is not None:
        last = min(last, rows.stop + band.diagonal + band.right)
    return first, last


def _modify_scores(problem: Problem, views: _Views, s: Array, task: Task, keys: slice) -> None:
    """Softcap, ALiBi, bias and masks, in this order, in place."""
    rows = task[3]
    if problem.softcap is not None:
        s /= problem.softcap
        np.tanh(s, out=s)
        s *= problem.softcap
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


def _drop(problem: Problem, seed: Any, p: Array, task: Task, keys: slice) -> None:
    """Set the weights that dropout drops to 0, in place."""
    batch, kv_heads, group = (np.arange(cut.start, cut.stop) for cut in task[:3])
    batch, head = batch[:, None, None], kv_heads[:, None] * problem.group + group
    keep = np.empty_like(p, bool)  # it lies as p does: to cross the two orders costs more
    keep[...] = keep_block(np, seed, problem.dropout_p, batch, head, task[3], keys)
    p *= keep


def _offsets(rows: slice, keys: slice, diagonal: int) -> Array:
    """How far each key lies to the right of the diagonal, shape (rows, keys), order "F"."""
    i = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None]
    j = np.arange(keys.start, keys.stop, dtype=np.int32)
    offsets: Array = np.subtract(j, i + diagonal, order="F")
    return offsets
