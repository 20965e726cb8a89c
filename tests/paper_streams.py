"""A card on paper whose copies happen as late as they may: what of CuPy `cufa.gpu.streaming` uses.

Its memory is full of NaN and lies in host memory; kernels are NumPy's, and run at once. A copy that
was begun is made when someone waits for it: who reads too early finds NaN, and who uses a
page-locked buffer again too early spoils what is still to be copied.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class _Memory:
    """What stands for a `cupy.ndarray` that is only copied, or laid over by others."""

    def __init__(self, a: np.ndarray) -> None:
        self.data = SimpleNamespace(ptr=a.ctypes.data, array=a)


class _Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.left: deque[Callable[[], None]] = deque()

    def wait_event(self, event: _Event) -> None:
        if self.runs_at_once:
            event.synchronize()
        else:
            self.left.append(event.synchronize)

    runs_at_once = False

    def synchronize(self) -> None:
        while self.left:
            self.left.popleft()()


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.stream: _Stream | None = None
        self.over = False

    def record(self, stream: _Stream) -> None:
        self.stream = stream
        stream.left.append(lambda: setattr(self, "over", True))

    def synchronize(self) -> None:
        while not self.over:
            self.stream.left.popleft()()


class PaperCard:
    """One card; `peak` is the most bytes that its allocator had given at once."""

    def __init__(self) -> None:
        self.work = _Stream()
        self.work.runs_at_once = True
        #: Bytes copied to the card.
        self.copied = 0

    def cupy(self) -> ModuleType:
        """What is to be imported as cupy and cupy.cuda."""
        streams: dict[int, _Stream] = {}

        def make_stream(non_blocking: bool) -> _Stream:
            stream = _Stream(non_blocking)
            streams[stream.ptr] = stream
            return stream

        def memcpy(target: int, source: int, size: int, kind: int, stream: int) -> None:
            self.copied += size if kind == runtime.memcpyHostToDevice else 0
            streams[stream].left.append(lambda: ctypes.memmove(target, source, size) and None)

        def empty(size: int, dtype: Any) -> _Memory:
            return _Memory(np.full(size, 255, dtype))

        def ndarray(shape: Any, dtype: Any, data: Any) -> np.ndarray:
            return data.array[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)

        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDeviceCount=lambda: 1,
            memcpyAsync=memcpy,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
        )
        module: Any = ModuleType("cupy")
        module.__getattr__ = lambda name: getattr(np, name)
        module.empty, module.ndarray = empty, ndarray
        module.ascontiguousarray = lambda a: _Memory(np.ascontiguousarray(a))
        cuda = module.cuda = ModuleType("cupy.cuda")
        cuda.Event, cuda.Stream, cuda.runtime = _Event, make_stream, runtime
        cuda.alloc_pinned_memory = lambda size: np.full(size, 255, np.uint8)
        cuda.get_current_stream = lambda: self.work
        return module
