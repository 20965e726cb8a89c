"""A GPU on paper: as much of CuPy as `cufa.gpu.exchange` and the launches of `cufa.gpu.cards` use,
which notes who waits for whom.

Its arrays are NumPy's, in host memory; its streams are numbers and do nothing.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from foreign import Lender

from cufa.gpu.params import PARAMS

DEFAULT = 1  # cudaStreamLegacy


class _Device(nullcontext):
    """What stands for a `cupy.cuda.Device`."""

    id = 0

    def __init__(self, idle: threading.Event) -> None:
        super().__init__(self)
        self.synchronize = idle.wait


class _Memory(np.ndarray):
    """What stands for a `cupy.ndarray`."""

    gpu: PaperGpu

    @property
    def device(self) -> _Device:
        return _Device(self.gpu.idle)

    @property
    def data(self) -> Any:
        return SimpleNamespace(
            ptr=self.ctypes.data,
            device_id=0,
            memset_async=lambda value, size: self.view(np.uint8)[:size].fill(value),
        )

    def __dlpack_device__(self) -> Any:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.gpu.wait(self.gpu.current, DEFAULT if stream is None else stream)
        return np.ndarray.__dlpack__(self, max_version=(1, 0))


class PaperGpu:
    """One device; `waits` are pairs: what is in the first stream so far, and who waits for it."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        #: What memory was had and given back in stream order: what, bytes, stream.
        self.in_order: list[tuple[str, int, int]] = []
        self.current = DEFAULT
        self.capturing = False
        self.device = 0
        #: Its `context`, once it has one.
        self.of_thread = threading.local()
        #: Parameters of the launches so far.
        self.params: list[np.void] = []
        #: Set when all kernels have ended.
        self.idle = threading.Event()
        self.Array = type("ndarray", (_Memory,), {"gpu": self})
        self._recorded: dict[int, int] = {}
        self._in_order = False

    def empty(self, shape: Any, dtype: Any) -> Any:
        """An array of the allocator in use: had and given back in stream order, or not."""
        made = np.empty(shape, dtype)
        if self._in_order:
            self.in_order.append(("malloc", made.nbytes, self.current))
            told = ("free", made.nbytes, self.current)
            weakref.finalize(made, self.in_order.append, told)
        return made.view(self.Array)

    @contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        """There is one, that in stream order."""
        before, self._in_order = self._in_order, True
        yield
        self._in_order = before

    def array(self, a: Any) -> Any:
        """Memory of this device with the values of a NumPy array."""
        return np.array(a).view(self.Array)

    def wait(self, first: int, then: int) -> None:
        if first != then and then != -1:
            self.waits.append((first, then))

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Makes a stream the current one."""
        before, self.current = self.current, number
        yield
        self.current = before

    def launch(self, *arguments: int) -> None:
        """As the driver's: the last but one is the address of a list of addresses."""
        assert hasattr(self.of_thread, "context"), "the driver would refuse the launch"
        first = ctypes.c_void_p.from_address(arguments[-2]).value
        assert first is not None
        self.params.append(np.frombuffer(ctypes.string_at(first, PARAMS.itemsize), PARAMS)[0])

    def lender(self, number: int) -> type:
        """A type of arrays, known by DLPack alone, whose library works in one stream."""
        gpu = self

        class Array(Lender):
            def __dlpack__(self, *, stream: int, **options: Any) -> Any:
                gpu.wait(number, stream)
                return np.ndarray.__dlpack__(self.array, max_version=(1, 0))

        return Array

    def imported(self, a: Any, stream: int) -> Any:
        """An array taken by DLPack, to be used in a stream."""

        class OnHost:
            def __dlpack_device__(self) -> Any:
                return 1, 0

            def __dlpack__(self, **options: Any) -> Any:
                return a.__dlpack__(stream=stream)

        return np.from_dlpack(OnHost()).view(self.Array)

    def cupy(self) -> ModuleType:
        """What is to be imported as cupy and cupy.cuda."""
        gpu = self

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                self.ptr = id(self)

            def record(self) -> None:
                runtime.eventRecord(self.ptr, gpu.current)

            def synchronize(self) -> None:
                gpu.idle.wait()

        class Memory:
            def __init__(self, size: int) -> None:
                self.owner = np.full(size, 255, np.uint8)
                self.ptr = self.owner.ctypes.data

        class UnownedMemory:
            def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
                self.ptr, self.owner = ptr, owner

        class ArrayAt:
            """Keeps what owns the memory for as long as a NumPy array lies over it."""

            def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
                self.owner, self.__array_interface__ = owner, {**interface, "version": 3}

        def ndarray(shape: Any, dtype: Any, memptr: Any = None, strides: Any = None) -> Any:
            if memptr is None:
                return gpu.empty(shape, dtype)
            facts = {"shape": shape, "strides": strides, "typestr": np.dtype(dtype).str}
            at = ArrayAt(memptr.mem.owner, {**facts, "data": (memptr.mem.ptr, False)})
            return np.asarray(at).view(gpu.Array)

        def ascontiguousarray(a: Any) -> Any:
            if isinstance(a, gpu.Array) and a.flags.c_contiguous:
                return a
            made = gpu.empty(a.shape, a.dtype)  # of a temporary too, which lies in NumPy's memory
            made[...] = a
            return made

        def asarray(a: Any) -> Any:
            facts = dict(a.__cuda_array_interface__)
            assert facts.pop("stream") is None, "CuPy would make the host wait for the stream"
            return np.asarray(ArrayAt(a, facts)).view(gpu.Array)

        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            eventRecord=gpu._recorded.__setitem__,
            streamWaitEvent=lambda then, event: gpu.wait(gpu._recorded[event], then),
            streamIsCapturing=lambda stream: gpu.capturing,
            getDevice=lambda: gpu.device,
            setDevice=lambda device: setattr(gpu.of_thread, "context", device),
        )
        module: Any = ModuleType("cupy")
        module.ndarray, module.asarray = ndarray, asarray
        module.ascontiguousarray = ascontiguousarray
        module.zeros = lambda shape, dtype: gpu.array(np.zeros(shape, dtype))
        module.from_dlpack = lambda a: gpu.imported(a, gpu.current)
        cuda = module.cuda = ModuleType("cupy.cuda")
        cuda.Device, cuda.Memory = _Device, Memory
        cuda.using_allocator, cuda.malloc_async = gpu.using_allocator, None
        cuda.driver = SimpleNamespace(launchKernel=gpu.launch)
        cuda.Event, cuda.UnownedMemory, cuda.runtime = Event, UnownedMemory, runtime
        cuda.MemoryPointer = lambda mem, offset: SimpleNamespace(mem=mem)
        cuda.get_current_stream = lambda: SimpleNamespace(
            ptr=0 if gpu.current == DEFAULT else gpu.current
        )
        return module
