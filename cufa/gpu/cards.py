"""CUDA cards, through CuPy: this module and `exchange` alone in gpu/ import it at once."""

from __future__ import annotations

import struct
from typing import Any

import cupy
from cupy.cuda import Device as CudaDevice
from cupy.cuda import runtime

from cufa import standard
from cufa.arrays import Arrays, check_overlap, narrowed
from cufa.gpu import build, cublas, launch
from cufa.gpu.device import Device, get_device
from cufa.gpu.params import POINTERS, Buffers
from cufa.gpu.plan import KernelKey, Step
from cufa.problem import Signature, make_problem

_pack_pointers = struct.Struct(f"={len(Buffers._fields)}Q").pack_into


class _Cards:
    """The machine whose devices are CUDA cards; work goes to CuPy's current stream."""

    def device(self, ordinal: int) -> Device:
        return get_device(ordinal)

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        return build.kernel(key, ordinal)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return cupy.ndarray(shape, dtype)  # what cupy.empty calls

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        return cupy.ascontiguousarray(a if dtype is None else narrowed(a, dtype))

    def launch(self, kernel: Any, step: Step, buffers: Buffers) -> None:
        q, k, v, o, lse, mask, bias, alibi_slopes, sink, workspace, tickets = buffers
        params: Any = step.params.copy()
        _pack_pointers(
            params,
            POINTERS,
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            o.data.ptr,
            0 if lse is None else lse.data.ptr,
            0 if mask is None else mask.data.ptr,
            0 if bias is None else bias.data.ptr,
            0 if alibi_slopes is None else alibi_slopes.data.ptr,
            0 if sink is None else sink.data.ptr,
            0 if workspace is None else workspace.data.ptr,
            0 if tickets is None else tickets.data.ptr,
        )
        kernel((step.grid,), (step.threads,), (params,), shared_mem=step.smem_bytes)


CARDS = _Cards()


def run(call: Signature, arrays: Arrays) -> Any:
    """`cufa.attention` on CuPy arrays: in the current stream of the arrays' device."""
    device = call.q.device
    if runtime.getDevice() != device:
        make_problem(call)  # its errors come before anything else
        with CudaDevice(device):
            return _run(call, arrays)
    return _run(call, arrays)


def _run(call: Signature, arrays: Arrays) -> Any:
    if call.algorithm != "standard":
        return launch.run(CARDS, call, arrays)
    problem = make_problem(call)
    if arrays.out is not None:
        check_overlap(arrays)
    return standard.run(cublas.load(), problem, arrays, call.layout)
