"""The NumPy backend: FlashAttention-2 in blocks that stay in cache, on all processors.

Source: Dao, arXiv:2307.08691, Algorithm 1. A task owns a block of query rows, walks over the key
blocks that these rows can see, and keeps a running maximum `m`, a running sum `total` (the paper's
l) and an unnormalised output `acc`; it divides once, at the end. Memory beyond the result is one
workspace per thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from cufa import standard
from cufa.arrays import Arrays, check_overlap, host_empty, narrowed
from cufa.blocks import (
    Task,
    Tiling,
    Views,
    Workspace,
    block,
    cap_scores,
    cuts,
    for_blas,
    kept_weights,
    load_queries,
    matmul,
    modify_scores,
    multiply_keys,
    run_threads,
    threads_worth,
    tiling_of,
    views_of,
    visible_keys,
)
from cufa.errors import ArgumentError, UnsupportedError
from cufa.problem import Problem, Signature, make_problem

ALGORITHMS = ("auto", "fa2", "standard")


def run(call: Signature, arrays: Arrays, seed: Any = None) -> Any:
    """Attention on NumPy arrays; see `cufa.attention`. `seed` is that of dropout.

    Raises
    ------
    ArgumentError, DTypeError, OutOfMemoryError, ShapeError, UnsupportedError
        Before anything is written.
    """
    check_algorithm(call.algorithm)
    problem = make_problem(call)
    out = arrays.out
    if out is not None:
        check_overlap(arrays, call)
        if not out.flags.writeable:
            raise ArgumentError("out is read-only; pass an array that can be written")
    if problem.algorithm == "standard":
        return standard.run(standard.NUMPY, problem, arrays, call.layout, seed)
    if out is None:
        out = host_empty(problem.out_shape, arrays.q.dtype)
    lse = host_empty(problem.lse_shape, problem.accumulator)
    if out.size:
        views = views_of(problem, arrays, out, lse, call.layout, seed)
        _run_tasks(problem, views, tiling_of(problem))
    return (out, lse) if problem.return_lse else out


def check_algorithm(algorithm: str) -> None:
    """Raise if it is for GPUs alone."""
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"algorithm is {algorithm!r}, which has GPU kernels only; for NumPy inputs pass 'auto' "
            "or 'fa2'"
        )


class _Space(Workspace):
    def __init__(self, problem: Problem, views: Views, tiling: Tiling) -> None:
        super().__init__(problem, views, tiling)
        self.acc = self.of_rows(problem.head_dim_v)
        self.product = self.of_rows(problem.head_dim_v)


def _run_tasks(problem: Problem, views: Views, tiling: Tiling) -> None:
    def worker() -> Callable[[Task], None]:
        return partial(_forward, problem, views, _Space(problem, views, tiling))

    axes = cuts(problem, tiling)
    threads = min(threads_worth(problem), math.prod(map(len, axes)))
    run_threads(threads, product(*axes), worker)


def _forward(problem: Problem, views: Views, space: _Space, task: Task) -> None:
    """Algorithm 1 for one block of query rows: its lines 4 to 15."""
    order = space.order
    batches, kv_heads, _, rows = task
    split = views.q[task].shape[:4]
    q = load_queries(problem, views, task, space)
    folded = q.shape[:3]  # batch, kv_heads, rows of the whole group
    acc = block(space.acc, (*folded, problem.head_dim_v), order)
    pv = block(space.product, acc.shape, order)
    acc[...] = 0
    # The lowest finite number in place of the paper's -inf, since -inf - -inf is NaN.
    m = np.full((*folded, 1), np.finfo(acc.dtype).min, acc.dtype)
    total = np.zeros_like(m)

    # Weights below vanish beside the row's largest, which is 1, and are set to 0: products with
    # subnormal numbers are many times slower, and a steep ALiBi slope makes whole bands of them.
    negligible = math.log(np.finfo(acc.dtype).tiny) + 8
    first, last = visible_keys(problem, rows)
    for start in range(first, last, space.keys):
        keys = slice(start, min(start + space.keys, last))
        k = for_blas(views.k[batches, kv_heads, keys], space.k, space.k_order)
        v = for_blas(views.v[batches, kv_heads, keys], space.v, "C")
        s = multiply_keys(problem, q, k, space)  # S = Q K^T
        cap_scores(problem, s)
        modify_scores(problem, views, s.reshape(*split, -1), task, keys)

        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        s -= m_new
        counts = s >= negligible
        if not counts.all():
            s /= counts  # a negative number by 0: -inf
        p = np.exp(s, out=s)  # P = exp(S - m)
        rescale = np.exp(m - m_new)  # acc and total so far are relative to the previous m
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        if problem.dropout_p:  # the sum is that of all weights
            weights = p.reshape(*split, -1)
            weights *= kept_weights(problem, views, weights, task, keys)
        matmul(p, v, pv)
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
