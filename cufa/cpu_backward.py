"""The gradients of attention on NumPy arrays, in the blocks of the forward pass.

Source: Dao, arXiv:2307.08691, Algorithm 2, with its loops exchanged. A share owns some pairs of
batch and key/value head; it walks over blocks of query rows and, for each, over the key blocks that
these rows can see. P comes again from the scores and lse, so nothing of O(seqlen_q * seqlen_k) is
held. dQ of the rows is finished in a block; dK and dV are summed up over all rows. Where there are
fewer pairs than threads the rows of a pair are dealt out among several shares, each with sums of
its own. Memory beyond the results: these sums, a number for each row, a workspace per thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, four_axes, host_empty, narrowed
from cufa.blocks import (
    Array,
    Task,
    Tiling,
    Views,
    Workspace,
    block,
    by_group,
    by_row,
    cap_scores,
    cuts,
    for_blas,
    kept_weights,
    load_queries,
    matmul,
    modify_scores,
    multiply_keys,
    run_threads,
    scale_is_folded,
    threads_worth,
    tiling_of,
    views_of,
    visible_keys,
)
from cufa.gradients import BackwardSignature, Gradients, Saved, check_algorithm, make_backward
from cufa.problem import Problem


def run(call: BackwardSignature, arrays: Arrays, saved: Saved, seed: Any = None) -> Gradients:
    """Gradients on NumPy arrays; see `cufa.attention_backward`. `seed` is that of dropout.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
        Before anything is computed.
    """
    problem = make_backward(call)
    check_algorithm(problem.algorithm)
    layout = call.forward.layout
    results = {name: _empty_like(getattr(arrays, name)) for name in call.wrt}
    views = views_of(problem, arrays, saved.out, saved.lse, layout, seed)
    tiling = tiling_of(problem) if saved.out.size else Tiling(1, 1, 1, 1, 1)
    pairs = math.prod(len(cut) for cut in cuts(problem, tiling)[:2])
    blocks = math.prod(len(cut) for cut in cuts(problem, tiling)[2:])
    threads = min(threads_worth(problem), max(1, pairs * blocks))
    sums_of_bias = _bias_sums(problem, arrays.bias) if "bias" in results else None
    if call.deterministic and sums_of_bias is not None and _is_shared(problem, sums_of_bias):
        threads = 1  # else the order of a sum is that in which threads come
    parts = min(blocks, math.ceil(threads / max(1, pairs)))
    by_key = (parts, problem.batch, problem.kv_heads, problem.seqlen_k)
    wide = problem.accumulator
    passing = _Passing(
        dout=by_group(problem, four_axes(saved.dout, layout)),
        dlse=None if saved.dlse is None else by_row(problem, saved.dlse),
        delta=np.zeros(views.lse.shape, wide),
        dq=by_group(problem, four_axes(results["q"], layout)) if "q" in results else None,
        dk=np.zeros((*by_key, problem.head_dim), wide) if "k" in results else None,
        dv=np.zeros((*by_key, problem.head_dim_v), wide) if "v" in results else None,
        dbias=sums_of_bias,
        lock=Lock(),
    )
    if saved.out.size:
        _run_shares(problem, views, passing, tiling, parts, threads)

    with np.errstate(all="ignore"):  # a gradient beyond the dtype's range is infinite
        for name, sums in (("k", passing.dk), ("v", passing.dv)):
            if sums is not None:
                four_axes(results[name], layout)[...] = sums[0] if parts == 1 else sums.sum(0)
        if passing.dbias is not None:
            results["bias"][...] = passing.dbias.reshape(results["bias"].shape)
        if "sink" in results:
            results["sink"][...] = _sink_gradient(problem, views, passing.delta)
    return Gradients(**{f"d{name}": result for name, result in results.items()})


class _Passing(NamedTuple):
    """What goes back, with the axes of `Views`, and where it is gathered."""

    dout: Array
    dlse: Array | None
    #: D = rowsum(dO * O) - dlse, written by each task for its rows.
    delta: Array
    dq: Array | None
    #: Sums over rows in the accumulator's dtype, axes (part, batch, kv_heads, keys, columns).
    dk: Array | None
    dv: Array | None
    #: Of one element along axes that the bias is repeated along; to be added to under `lock`.
    dbias: Array | None
    lock: Lock


class _Space(Workspace):
    def __init__(self, problem: Problem, views: Views, tiling: Tiling) -> None:
        super().__init__(problem, views, tiling)
        self.dout = self.of_rows(problem.head_dim_v)
        self.dscores = self.of_rows(tiling.keys)
        self.slope = self.of_rows(tiling.keys if problem.softcap is not None else 0)
        self.dq = self.of_rows(problem.head_dim)
        self.dq_block = self.of_rows(problem.head_dim)
        self.dk_block = self.of_keys(problem.head_dim)
        self.dv_block = self.of_keys(problem.head_dim_v)


def _empty_like(a: Array) -> Array:
    return host_empty(a.shape, a.dtype)


def _bias_sums(problem: Problem, bias: Array) -> Array:
    shape = (1,) * (4 - bias.ndim) + bias.shape
    heads = (1, 1) if shape[1] == 1 else (problem.kv_heads, problem.group)
    return np.zeros((shape[0], *heads, *shape[2:]), problem.accumulator)


def _is_shared(problem: Problem, dbias: Array) -> bool:
    """Whether several tasks add to one element of a bias's gradient."""
    axes = (problem.batch, problem.kv_heads, problem.group, problem.seqlen_q)
    return dbias.shape[:4] != axes


def _run_shares(
    problem: Problem, views: Views, passing: _Passing, tiling: Tiling, parts: int, threads: int
) -> None:
    batches, kv_heads, groups, rows = cuts(problem, tiling)
    blocks = list(product(groups, rows))

    def worker() -> Callable[[tuple[int, slice, slice]], None]:
        return partial(work, _Space(problem, views, tiling))

    def work(space: _Space, share: tuple[int, slice, slice]) -> None:
        part, *pairs = share
        for of_group in blocks[part::parts]:  # dealt out in turn: causal rows cost unequally
            _backward(problem, views, passing, space, part, (*pairs, *of_group))

    run_threads(threads, product(range(parts), batches, kv_heads), worker)


def _backward(
    problem: Problem, views: Views, passing: _Passing, space: _Space, part: int, task: Task
) -> None:
    """Algorithm 2 for one block of query rows: its lines 8 to 16 for every block of keys."""
    batches, kv_heads, _, rows = task
    split = views.q[task].shape[:4]
    kept_scale = 1 / (1 - problem.dropout_p)  # not of dO, which may be as large as its dtype holds
    q = load_queries(problem, views, task, space)  # rows of the whole group in one axis
    dout, base, delta = _load_rows(problem, views, passing, task, space)
    dq = block(space.dq, q.shape, space.order)
    dq[...] = 0

    first, last = visible_keys(problem, rows)
    for start in range(first, last, space.keys):
        keys = slice(start, min(start + space.keys, last))
        k = for_blas(views.k[batches, kv_heads, keys], space.k, space.k_order)
        v = for_blas(views.v[batches, kv_heads, keys], space.v, "C")
        s = multiply_keys(problem, q, k, space)  # S = Q K^T
        cap_scores(problem, s)
        slope = _slope_of_cap(s, problem.softcap, space) if problem.softcap else None
        modify_scores(problem, views, s.reshape(*split, -1), task, keys)
        p = _weights(s, base)  # P = exp(S - lse)
        ds = block(space.dscores, s.shape, space.order)
        kept = None
        if problem.dropout_p:
            kept = kept_weights(problem, views, p.reshape(*split, -1), task, keys).reshape(p.shape)
        if passing.dv is not None:
            weights = p if kept is None else np.multiply(p, kept, out=ds)
            dv_block = block(space.dv_block, v.shape, "C")
            matmul(weights.swapaxes(-1, -2), dout, dv_block)
            if kept is not None:
                dv_block *= kept_scale
            passing.dv[part, batches, kv_heads, keys] += dv_block  # dV += P^T dO
        matmul(dout, v.swapaxes(-1, -2), ds)  # dP = dO V^T
        if kept is not None:
            ds *= kept
            ds *= kept_scale
        ds -= delta
        ds *= p  # dS = P * (dP - D)
        if passing.dbias is not None:
            _add_to_bias(passing, ds.reshape(*split, -1), (*task, keys))
        if slope is not None:
            ds *= slope
        if not scale_is_folded(problem):
            ds *= problem.scale
        if passing.dq is not None:
            dq_block = block(space.dq_block, q.shape, space.order)
            matmul(ds, k, dq_block)
            dq += dq_block  # dQ += dS K
        if passing.dk is not None:
            dk_block = block(space.dk_block, k.shape, "C")
            matmul(ds.swapaxes(-1, -2), q, dk_block)
            passing.dk[part, batches, kv_heads, keys] += dk_block  # dK += dS^T Q

    if passing.dq is not None:
        if scale_is_folded(problem):  # into the queries, which dQ has not met
            dq *= problem.scale
        passing.dq[task] = dq.reshape(*split, problem.head_dim)


def _load_rows(
    problem: Problem, views: Views, passing: _Passing, task: Task, space: _Space
) -> tuple[Array, Array, Array]:
    """dO, what to subtract from the scores, and D, of the rows of the whole group in one axis."""
    given, lse = passing.dout[task], views.lse[task]
    folded = (*given.shape[:2], given.shape[2] * given.shape[3])
    dout = block(space.dout, (*folded, problem.head_dim_v), space.order)
    np.copyto(dout.reshape(given.shape), given)
    delta = (dout.reshape(given.shape) * views.out[task]).sum(axis=-1, keepdims=True)
    if passing.dlse is not None:
        delta -= passing.dlse[task]
    # What comes back to a row without keys goes nowhere, NaN too; nor does it where scores are the
    # lowest numbers: a weight of 1 and many of 1 / seqlen_k have the same lse there.
    unseen = lse < -0.69 * np.finfo(lse.dtype).max
    base = np.where(unseen, np.inf, lse).reshape(*folded, 1)
    if unseen.any():
        delta[unseen] = 0
        dout[unseen.reshape(folded)] = 0
    passing.delta[task] = delta
    return dout, base, delta.reshape(*folded, 1)


def _weights(s: Array, base: Array) -> Array:
    """P = exp(S - lse), in place of the scores."""
    s -= base
    np.minimum(s, 0, out=s)  # more is lse's rounding, which in large scores may be large too
    vanishing = s < math.log(np.finfo(s.dtype).tiny) + 8  # see `cufa.cpu`
    if vanishing.any():
        np.copyto(s, -np.inf, where=vanishing)
    return np.exp(s, out=s)


def _slope_of_cap(capped: Array, softcap: float, space: _Space) -> Array:
    """``1 - tanh(s / softcap)**2``, the derivative of the cap, from capped scores."""
    slope = block(space.slope, capped.shape, space.order)
    np.divide(capped, softcap, out=slope)
    np.square(slope, out=slope)
    np.subtract(1, slope, out=slope)
    return slope


def _add_to_bias(passing: _Passing, ds: Array, at: tuple[slice, ...]) -> None:
    dbias = passing.dbias
    assert dbias is not None
    repeated = tuple(axis for axis, n in enumerate(dbias.shape) if n == 1)
    where = tuple(slice(0, 1) if n == 1 else cut for n, cut in zip(dbias.shape, at, strict=True))
    sums = ds.sum(axis=repeated, keepdims=True)
    with passing.lock:
        dbias[where] += sums


def _sink_gradient(problem: Problem, views: Views, delta: Array) -> Array:
    """The sink is a key of value 0: dP is 0, and P is exp(sink - lse)."""
    sink = narrowed(views.sink, problem.accumulator)
    base = np.where(views.lse == -np.inf, np.inf, views.lse)
    weights = np.exp(np.minimum(sink - base, 0))
    gradient: Array = -(weights * delta).sum(axis=(0, 3, 4)).ravel()
    return gradient
