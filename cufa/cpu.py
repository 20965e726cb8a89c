"""The NumPy backend: FlashAttention-2 in blocks that stay in cache, several at once.

Source: Dao, arXiv:2307.08691, Algorithm 1. A task owns a block of query rows, walks over the key
blocks that these rows can see, and keeps a running maximum `m`, a running sum `total` (the paper's
l) and an unnormalised output `acc`; it divides once, at the end. Memory beyond the result is one
workspace per thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cufa.arrays import Arrays, check_overlap
from cufa.errors import ArgumentError
from cufa.problem import Problem, Signature, make_problem

Array = NDArray[Any]

#: Scores in one block: 512 KB of float32, small enough for the second-level cache.
_BLOCK_SCORES = 1 << 17
#: Query rows in one block, where there are as many.
_BLOCK_ROWS = 256
#: Elements of a key block, a value block or a query block.
_BLOCK_ELEMENTS = 1 << 18
#: Scores below which a second thread costs more than it brings.
_SCORES_PER_THREAD = 1 << 18


def run(call: Signature, arrays: Arrays) -> Any:
    """Attention on NumPy arrays; see `cufa.attention`.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError
        Before anything is allocated or written.
    """
    problem = make_problem(call)
    out = arrays.out
    if out is None:
        out = np.empty(problem.out_shape, arrays.q.dtype)
    else:
        check_overlap(out, {n: a for n, a in arrays._asdict().items() if n != "out"})
        if not out.flags.writeable:
            raise ArgumentError("out is read-only; pass an array that can be written")
    lse = np.empty(problem.lse_shape, problem.accumulator)
    if out.size:
        views = _views(problem, arrays, out, lse, call.layout)
        tiling = _tiling(problem)
        _run_tasks(problem, views, tiling)
    return (out, lse) if problem.return_lse else out


class _Views(NamedTuple):
    """Every array with the axes (batch, kv_heads, group, rows, columns), in the caller's memory.

    A group is the query heads that share a key/value head; k and v have a group of one. `lse` and
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


def _views(problem: Problem, arrays: Arrays, out: Array, lse: Array, layout: str) -> _Views:
    batch, heads, kv_heads = problem.batch, problem.heads, problem.kv_heads

    def operand(a: Array) -> Array:
        a = np.asarray(a)
        if layout == "bshd" and a.ndim > 2:
            a = a.swapaxes(-2, -3)
        return a[(None,) * (4 - a.ndim)]

    def grouped(a: Array) -> Array:
        return a.reshape(batch, kv_heads, problem.group, *a.shape[2:])

    def scores_like(a: Array | None, *shape: int) -> Array | None:
        if a is None:
            return None
        return grouped(np.broadcast_to(a, (batch, heads, *shape)))

    def per_head(a: Array | None) -> Array | None:
        return None if a is None else scores_like(np.asarray(a)[..., None, None], 1, 1)

    seqlens = problem.seqlen_q, problem.seqlen_k
    return _Views(
        q=grouped(operand(arrays.q)),
        k=operand(arrays.k)[:, :, None],
        v=operand(arrays.v)[:, :, None],
        out=grouped(operand(out)),
        lse=grouped(lse[(None,) * (3 - lse.ndim)][..., None]),
        mask=scores_like(arrays.mask, *seqlens),
        bias=scores_like(arrays.bias, *seqlens),
        alibi_slopes=per_head(arrays.alibi_slopes),
        sink=per_head(arrays.sink),
    )


class _Tiling(NamedTuple):
    """Sizes of one block along each axis."""

    batch: int
    kv_heads: int
    group: int
    rows: int
    keys: int


def _tiling(problem: Problem) -> _Tiling:
    """Blocks of about `_BLOCK_SCORES` scores.

    The query heads of a group are folded into the rows, since they read the same keys; what is
    still too small (decoding, short sequences) is filled up with key/value heads and batches.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    group = min(problem.group, _BLOCK_ROWS)
    rows = min(problem.seqlen_q, max(1, _BLOCK_ROWS // group))
    keys = max(1, min(problem.seqlen_k, _BLOCK_SCORES // (group * rows), _BLOCK_ELEMENTS // width))
    pair_scores = group * rows * keys
    pair_elements = max(group * rows, keys) * width
    pairs = max(1, min(_BLOCK_SCORES // pair_scores, _BLOCK_ELEMENTS // pair_elements))
    kv_heads = min(problem.kv_heads, pairs)
    return _Tiling(min(problem.batch, max(1, pairs // kv_heads)), kv_heads, group, rows, keys)


def _run_tasks(problem: Problem, views: _Views, tiling: _Tiling) -> None:
    """Run every task, on as many threads as there are processors and as the work is worth."""
    axes = (problem.batch, problem.kv_heads, problem.group, problem.seqlen_q)
    slices = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(axes, tiling[:4], strict=True)
    ]
    tasks = product(*slices)
    count = int(np.prod([len(s) for s in slices]))
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    threads = min(_processors(), count, scores // _SCORES_PER_THREAD)
    if threads <= 1:
        _work(problem, views, tiling, tasks, Lock())
        return
    lock = Lock()
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_work, problem, views, tiling, tasks, lock) for _ in range(threads)]
        for job in jobs:
            job.result()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _work(
    problem: Problem,
    views: _Views,
    tiling: _Tiling,
    tasks: Iterator[tuple[slice, ...]],
    lock: Lock,
) -> None:
    """One thread: take tasks until there are none left."""
    space = _Workspace(problem, tiling)
    while True:
        with lock:
            task = next(tasks, None)
        if task is None:
            return
        # The error state belongs to the thread. Overflow, 0 * inf and log(0) mean what IEEE says.
        with np.errstate(all="ignore"):
            _forward(problem, views, task, tiling.keys, space)


class _Workspace:
    """Memory of one thread, used again for every block."""

    def __init__(self, problem: Problem, tiling: _Tiling) -> None:
        pairs = tiling.batch * tiling.kv_heads
        rows = pairs * tiling.group * tiling.rows
        keys = pairs * tiling.keys
        dtype = np.dtype(problem.accumulator)
        self.scores = np.empty(rows * tiling.keys, dtype)
        self.q = np.empty(rows * problem.head_dim, dtype)
        self.k = np.empty(keys * problem.head_dim, dtype)
        self.v = np.empty(keys * problem.head_dim_v, dtype)
        self.acc = np.empty(rows * problem.head_dim_v, dtype)
        self.pv = np.empty(rows * problem.head_dim_v, dtype)


def _shaped(memory: Array, *shape: int) -> Array:
    return memory[: int(np.prod(shape))].reshape(shape)


def _forward(
    problem: Problem, views: _Views, task: tuple[slice, ...], block_keys: int, space: _Workspace
) -> None:
    """Algorithm 1 for one block of queries: lines 3 to 15."""
    pair, rows = task[:2], task[3]
    q = views.q[task]
    shape = q.shape[:-1]
    pairs, folded = shape[:2], shape[2] * shape[3]
    q_block = _shaped(space.q, *q.shape)
    np.copyto(q_block, q)
    q_block *= problem.scale
    q_block = q_block.reshape(*pairs, folded, problem.head_dim)

    acc = _shaped(space.acc, *pairs, folded, problem.head_dim_v)
    acc[...] = 0
    m = np.full((*pairs, folded, 1), -np.inf, acc.dtype)
    total = np.zeros_like(m)
    if views.sink is not None:  # a key of score `sink` and value 0
        m.reshape(*shape, 1)[...] = views.sink[task[:3]]
        total[...] = 1

    first, last = _visible_keys(problem, rows)
    for start in range(first, last, block_keys):
        keys = slice(start, min(start + block_keys, last))
        k = _operand(views.k[pair[0], pair[1], 0, keys], space.k)
        v = _operand(views.v[pair[0], pair[1], 0, keys], space.v)
        s = _shaped(space.scores, *pairs, folded, keys.stop - keys.start)
        np.matmul(q_block, k.swapaxes(-1, -2), out=s)  # S = Q K^T
        _modify_scores(problem, views, s.reshape(*shape, -1), task, keys)

        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        base = np.where(m_new == -np.inf, 0, m_new)  # -inf - -inf would be NaN
        np.subtract(s, base, out=s)
        p = np.exp(s, out=s)  # P = exp(S - m)
        rescale = np.exp(m - base)  # acc and total so far are relative to the previous m
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        acc *= rescale
        acc += np.matmul(p, v, out=_shaped(space.pv, *acc.shape))
        m = m_new

    acc /= np.where(total == 0, 1, total)  # a row that saw no key gives 0
    views.out[task] = acc.reshape(*shape, problem.head_dim_v)
    views.lse[task] = (m + np.log(total)).reshape(*shape, 1)


def _operand(a: Array, memory: Array) -> Array:
    """`a` as BLAS can read it: itself where possible, else a copy in `memory`."""
    row = a.shape[-1] * a.itemsize
    if a.dtype == memory.dtype and a.strides[-1] == a.itemsize and a.strides[-2] >= row:
        return a
    copy = _shaped(memory, *a.shape)
    np.copyto(copy, a)
    return copy


def _visible_keys(problem: Problem, rows: slice) -> tuple[int, int]:
    """The keys that at least one row may see by its position."""
    band = problem.band
    first, last = 0, problem.seqlen_k
    if band.left is not None:
        first = max(first, rows.start + band.diagonal - band.left)
    if band.right is not None:
        last = min(last, rows.stop + band.diagonal + band.right)
    return first, last


def _modify_scores(
    problem: Problem, views: _Views, s: Array, task: tuple[slice, ...], keys: slice
) -> None:
    """Softcap, ALiBi, bias and masks, in this order, in place."""
    rows = task[3]
    if problem.softcap is not None:
        # Beyond the dtype's range a cap is no cap, and infinity * tanh(0) would be NaN.
        cap = min(problem.softcap, float(np.finfo(s.dtype).max))
        s /= cap
        np.tanh(s, out=s)
        s *= cap
    if views.alibi_slopes is not None:
        shift = problem.seqlen_k - problem.seqlen_q
        distance = np.abs(_offsets(rows, keys, shift)).astype(s.dtype)
        s -= views.alibi_slopes[task[:3]].astype(s.dtype) * distance
    if views.bias is not None:
        s += views.bias[(*task, keys)].astype(s.dtype)
    if views.mask is not None:
        np.copyto(s, -np.inf, where=~views.mask[(*task, keys)])
    band = problem.band
    if band.right is not None and keys.stop - 1 > rows.start + band.diagonal + band.right:
        np.copyto(s, -np.inf, where=_offsets(rows, keys, band.diagonal) > band.right)
    if band.left is not None and keys.start < rows.stop - 1 + band.diagonal - band.left:
        np.copyto(s, -np.inf, where=_offsets(rows, keys, band.diagonal) < -band.left)


def _offsets(rows: slice, keys: slice, diagonal: int) -> Array:
    """How far each key lies to the right of the diagonal, shape (rows, keys)."""
    i = np.arange(rows.start, rows.stop)[:, None]
    j = np.arange(keys.start, keys.stop)
    return j - i - diagonal
