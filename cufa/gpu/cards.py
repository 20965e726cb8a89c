"""CUDA cards, through CuPy: this module, `exchange`, `streaming` and `nccl` alone import it at
once."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import cupy
from cupy.cuda import Device as CudaDevice
from cupy.cuda import Memory, MemoryPointer, driver, get_current_stream, runtime

from cufa import standard
from cufa.arrays import Arrays, check_overlap, narrowed
from cufa.gpu import build, cublas, launch
from cufa.gpu.device import Device, get_device
from cufa.gpu.params import (
    BACKWARD_PARAMS,
    GRADIENT_POINTERS,
    POINTERS,
    SEED,
    Buffers,
    GradientBuffers,
)
from cufa.gpu.plan import KernelKey, Step
from cufa.gpu.tensor_map import MAP_BYTES
from cufa.gradients import BackwardSignature, Gradients, Saved, make_backward_problem
from cufa.problem import Signature, make_problem

_pack_params = struct.Struct(f"{BACKWARD_PARAMS.itemsize}s").pack_into
_pack_pointers = struct.Struct(f"={len(Buffers._fields)}Q").pack_into
_pack_gradients = struct.Struct(f"={len(GradientBuffers._fields)}Q").pack_into
_pack_word = struct.Struct("=Q").pack_into
#: Streams that cannot be captured: handles of CUDA's legacy default stream.
_LEGACY = (0, 1)


class _Arguments:
    """What a launch hands to the driver: the struct of parameters, the only argument of a kernel,
    and behind it the list of the arguments' addresses. Both have been read when it returns."""

    def __init__(self) -> None:
        size = BACKWARD_PARAMS.itemsize  # the larger struct; kernels take as much as theirs has
        self.memory = ctypes.create_string_buffer(size + 8)
        address = ctypes.addressof(self.memory)
        _pack_word(self.memory, size, address)
        self.addresses = address + size


class _Thread(threading.local):
    """What the calls of one thread use again."""

    def __init__(self) -> None:
        #: Ticket counters, by device and stream. What is in one stream runs in order, so kernels
        #: there may share a counter. A thread that ends gives its counters back to CuPy's pool,
        #: which knows their streams.
        self.counters: dict[tuple[int, int], Any] = {}
        #: Those that no launch is using: one, or more if a launch was interrupted by another.
        self.arguments: list[_Arguments] = []
        # The driver, unlike the runtime, launches nothing in a thread that has no context yet.
        runtime.setDevice(runtime.getDevice())


_thread = _Thread()
#: Counters of a page.
_PAGE = 128
#: Pages of counters for kernels in CUDA graphs, kept for good: a graph may be launched at any time.
_pages: list[Any] = []
#: Their counters that no graph has yet, by device.
_spare: defaultdict[int, list[Any]] = defaultdict(list)


def _new_page(device: int) -> None:
    """A graph may run in any stream, so its counter lies where no other stream's work has been:
    outside CuPy's pool."""
    page = cupy.ndarray((_PAGE,), "uint32", MemoryPointer(Memory(4 * _PAGE), 0))
    _pages.append(page)
    _spare[device] += [page[n : n + 1] for n in range(_PAGE)]


def _counter_of_graph(device: int) -> Any:
    """For one launch that is being captured; the graph sets it to 0 whenever it runs."""
    while True:
        try:
            counter = _spare[device].pop()  # another thread may have taken the last one
            break
        except IndexError:
            _new_page(device)
    counter.data.memset_async(0, counter.nbytes)
    return counter


@lru_cache(maxsize=1024)
def _with_maps(step: Step, *addresses: int) -> bytes:
    """The parameters of a step, maps of q, k and v at these addresses filled in."""
    maps = zip(step.maps, addresses, strict=True)
    made = [tensor_map.encoded(address) for tensor_map, address in maps]
    return b"".join(made) + step.packed[MAP_BYTES * len(made) :]


def _is_captured(stream: int) -> bool:
    """Whether a stream is being captured."""
    return stream not in _LEGACY and bool(runtime.streamIsCapturing(stream))


def _memory_of_call() -> AbstractContextManager[None]:
    """Where arrays made within come from, temporary ones too, that end with the call: CuPy's
    allocator, or, while the stream is captured, the graph.

    What is had and given back in stream order during a capture belongs to the graph. CuPy's pool
    may give its own to others before the graph runs, and each time it runs.
    """
    if _is_captured(get_current_stream().ptr):
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)  # type: ignore[no-any-return]
    return nullcontext()


class _Cards:
    """The machine whose devices are CUDA cards; work goes to CuPy's current stream."""

    def device(self, ordinal: int) -> Device:
        return get_device(ordinal)

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        return build.kernel(key, ordinal)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return cupy.ndarray(shape, dtype)  # what cupy.empty calls

    def workspace(self, size: int, dtype: Any) -> Any:
        with _memory_of_call():
            return self.empty((size,), dtype)

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        with _memory_of_call():
            return cupy.ascontiguousarray(a if dtype is None else narrowed(a, dtype))

    def tickets(self) -> Any:
        device, stream = runtime.getDevice(), get_current_stream().ptr
        if _is_captured(stream):
            return _counter_of_graph(device)
        found = _thread.counters.get((device, stream))
        if found is None:
            found = _thread.counters[device, stream] = cupy.zeros(1, "uint32")
            if not _spare[device]:
                _new_page(device)  # now, since memory can hardly be had during a capture
        return found

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        q, k, v, o, lse, mask, bias, alibi_slopes, sink, workspace, tickets = buffers
        q_ptr, k_ptr, v_ptr = q.data.ptr, k.data.ptr, v.data.ptr
        params = _with_maps(step, q_ptr, k_ptr, v_ptr) if step.maps else step.packed
        arguments = _arguments_with(params, seed)
        _pack_pointers(
            arguments.memory,
            POINTERS,
            q_ptr,
            k_ptr,
            v_ptr,
            o.data.ptr,
            0 if lse is None else lse.data.ptr,
            0 if mask is None else mask.data.ptr,
            0 if bias is None else bias.data.ptr,
            0 if alibi_slopes is None else alibi_slopes.data.ptr,
            0 if sink is None else sink.data.ptr,
            0 if workspace is None else workspace.data.ptr,
            0 if tickets is None else tickets.data.ptr,
        )
        _launch(kernel, step, arguments)

    def launch_backward(
        self,
        kernel: Any,
        step: Step,
        buffers: Buffers,
        gradients: GradientBuffers,
        seed: Any = None,
    ) -> None:
        arguments = _arguments_with(step.packed, seed)
        _pack_pointers(arguments.memory, POINTERS, *_pointers(buffers))
        _pack_gradients(arguments.memory, GRADIENT_POINTERS, *_pointers(gradients))
        _launch(kernel, step, arguments)


def _arguments_with(params: bytes, seed: Any) -> _Arguments:
    free = _thread.arguments
    arguments = free.pop() if free else _Arguments()
    _pack_params(arguments.memory, 0, params)
    if seed is not None:
        _pack_word(arguments.memory, SEED, seed)
    return arguments


def _launch(kernel: Any, step: Step, arguments: _Arguments) -> None:
    """As CuPy's call of the kernel would, which takes longer than all else in here."""
    stream = get_current_stream().ptr
    grid, block, smem = step.grid, step.threads, step.smem_bytes
    driver.launchKernel(kernel.ptr, grid, 1, 1, block, 1, 1, smem, stream, arguments.addresses, 0)
    _thread.arguments.append(arguments)


def _pointers(arrays: tuple[Any, ...]) -> list[int]:
    return [0 if a is None else a.data.ptr for a in arrays]


CARDS = _Cards()


def run(call: Signature, arrays: Arrays, seed: Any = None) -> Any:
    """`cufa.attention` on CuPy arrays: in the current stream of the arrays' device.

    `seed` is that of dropout.
    """
    device = call.q.device
    if runtime.getDevice() != device:
        make_problem(call)  # its errors come before anything else
        with CudaDevice(device):
            return _run(call, arrays, seed)
    return _run(call, arrays, seed)


def _run(call: Signature, arrays: Arrays, seed: Any) -> Any:
    if call.algorithm != "standard":
        return launch.run(CARDS, call, arrays, seed)
    problem = make_problem(call)
    if arrays.out is not None:
        check_overlap(arrays, call)
    return standard.run(cublas.load(), problem, arrays, call.layout, seed)


def run_backward(
    call: BackwardSignature, arrays: Arrays, saved: Saved, seed: Any = None
) -> Gradients:
    """`cufa.attention_backward` on CuPy arrays: in the current stream of the arrays' device.

    `seed` is that of dropout.
    """
    device = call.forward.q.device
    if runtime.getDevice() != device:
        make_backward_problem(call)  # its errors come before anything else
        with CudaDevice(device):
            return launch.run_backward(CARDS, call, arrays, saved, seed)
    return launch.run_backward(CARDS, call, arrays, saved, seed)
