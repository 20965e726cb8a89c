"""Outputs, parameters and one launch per step: the only module that imports CuPy at once."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
from cupy.cuda import Device as CudaDevice
from cupy.cuda import runtime

from cufa.arrays import Arrays, are_aligned, check_overlap, describe, narrowed
from cufa.gpu import build
from cufa.gpu.device import get_device
from cufa.gpu.params import POINTERS
from cufa.gpu.plan import make_plan
from cufa.problem import Problem, Signature, make_problem

_pack_pointers = struct.Struct(f"={len(POINTERS)}Q").pack_into


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    smem_bytes: int
    params: Any  # without pointers


class _Ready(NamedTuple):
    """A call that lacks only its pointers."""

    problem: Problem
    launches: tuple[_Launch, ...]
    #: Arguments to be copied first, contiguous, with the dtype they are to have (None: their own).
    conversions: dict[str, str | None]


def run(call: Signature, arrays: Arrays) -> Any:
    """`cufa.attention` on CuPy arrays: in the current stream of the arrays' device."""
    device = call.q.device
    if runtime.getDevice() != device:
        make_problem(call)  # its errors come before anything else
        with CudaDevice(device):
            return run(call, arrays)
    if arrays.out is not None:
        make_problem(call)  # likewise
        check_overlap(arrays)
    ready = _prepare(call)
    if ready.conversions:
        return run(*_convert(call, arrays, ready.conversions))
    return _launch(ready, arrays)


@lru_cache(maxsize=4096)
def _prepare(call: Signature) -> _Ready:
    problem = make_problem(call)
    plan = make_plan(problem, get_device(call.q.device))
    conversions = _conversions(problem)
    if conversions:
        return _Ready(problem, (), conversions)
    launches = tuple(
        _Launch(
            build.kernel(step.key, call.q.device),
            (step.grid,),
            (step.key.config.threads,),
            step.key.smem_bytes,
            step.params,
        )
        for step in plan.steps
    )
    return _Ready(problem, launches, conversions)


def _conversions(problem: Problem) -> dict[str, str | None]:
    """Rows must be contiguous; slopes and sinks come in the accumulator's type."""
    wanted: dict[str, str | None] = {
        name: None
        for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        if 0 not in operand.shape and operand.shape[3] > 1 and operand.strides[3] != 1
    }
    for name, per_head in (("alibi_slopes", problem.alibi_slopes), ("sink", problem.sink)):
        if per_head is not None and per_head.dtype != problem.accumulator:
            wanted[name] = problem.accumulator
    return wanted


def _convert(
    call: Signature, arrays: Arrays, conversions: dict[str, str | None]
) -> tuple[Signature, Arrays]:
    copies: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, dtype in conversions.items():
        a = getattr(arrays, name)
        copies[name] = cupy.ascontiguousarray(a if dtype is None else narrowed(a, dtype))
        facts[name] = describe(name, copies[name])
    arrays = arrays._replace(**copies)
    return call._replace(aligned=are_aligned(arrays), **facts), arrays


def _launch(ready: _Ready, arrays: Arrays) -> Any:
    problem = ready.problem
    q, k, v, mask, bias, alibi_slopes, sink, out = arrays
    if out is None:
        out = cupy.empty(problem.out_shape, q.dtype)
    lse = cupy.empty(problem.lse_shape, problem.accumulator) if problem.return_lse else None
    for kernel, grid, block, smem_bytes, template in ready.launches:
        params = template.copy()
        _pack_pointers(  # in the order of POINTERS
            params,
            0,
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            out.data.ptr,
            0 if lse is None else lse.data.ptr,
            0 if mask is None else mask.data.ptr,
            0 if bias is None else bias.data.ptr,
            0 if alibi_slopes is None else alibi_slopes.data.ptr,
            0 if sink is None else sink.data.ptr,
        )
        kernel(grid, block, (params,), shared_mem=smem_bytes)
    return out if lse is None else (out, lse)
