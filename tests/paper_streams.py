"""A card on paper whose copies happen as late as they may: what of CuPy `cufa.gpu.streaming` uses.

Its memory is full of NaN and lies in host memory; kernels are NumPy's, and run at once. A copy that
was begun is made when someone waits for it: who reads too early finds NaN, and who uses a
page-locked buffer again too early spoils what is still to be copied. A copy must not begin in a
stream that has not waited for the kernels that read or write the same memory of the card.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class _Stream:
    """Work that was put into it, not done yet; that of kernels is done at once."""

    def __init__(self, at_once: bool = False) -> None:
        self.ptr = id(self)
        self.at_once = at_once
        self.left: deque[Callable[[], None]] = deque()
        #: Up to when kernels have been waited for.
        self.waited = 0

    def wait_event(self, event: _Event) -> None:
        self.waited = max(self.waited, event.time)
        if self.at_once:
            event.synchronize()
        else:
            self.left.append(event.synchronize)

    def synchronize(self) -> None:
        while self.left:
            self.left.popleft()()


class _Event:
    def __init__(self, card: PaperCard) -> None:
        self.card, self.time = card, 0

    def record(self, stream: _Stream) -> None:
        self.stream, self.over = stream, False
        if stream.at_once:
            self.time = self.card.now()
        stream.left.append(lambda: setattr(self, "over", True))

    def synchronize(self) -> None:
        while not self.over:
            self.stream.left.popleft()()


class PaperCard:
    """One card, with one stream for kernels and any number for copies."""

    def __init__(self) -> None:
        self.work = _Stream(at_once=True)
        #: Bytes copied to the card.
        self.copied = 0
        self._time = 0
        #: Of memory of the card, by address: bytes, and when kernels were last given it.
        self._given: dict[int, tuple[int, int]] = {}

    def now(self) -> int:
        """A number larger than all before."""
        self._time += 1
        return self._time

    def give(self, a: np.ndarray) -> Any:
        """What stands for a `cupy.ndarray` that kernels may use from now on."""
        address = a.ctypes.data
        for other, (size, _) in list(self._given.items()):
            if other < address + a.nbytes and address < other + size:
                del self._given[other]  # of an array that is gone, or of this one, longer ago
        self._given[address] = a.nbytes, self.now()
        return SimpleNamespace(data=SimpleNamespace(ptr=address, array=a))

    def begin(self, address: int, stream: _Stream) -> None:
        """A copy from or to the card."""
        start = max(at for at in self._given if at <= address)
        size, time = self._given[start]
        assert address < start + size
        assert stream.waited > time, "kernels may still use this memory"

    def cupy(self) -> ModuleType:
        """What is to be imported as cupy and cupy.cuda."""
        streams: dict[int, _Stream] = {}

        def make_stream(non_blocking: bool) -> _Stream:
            assert non_blocking
            stream = _Stream()
            streams[stream.ptr] = stream
            return stream

        def memcpy(target: int, source: int, size: int, kind: int, stream: int) -> None:
            to_card = kind == runtime.memcpyHostToDevice
            self.begin(target if to_card else source, streams[stream])
            self.copied += size * to_card
            streams[stream].left.append(lambda: ctypes.memmove(target, source, size) and None)

        def ndarray(shape: Any, dtype: Any, data: Any) -> np.ndarray:
            self.give(data.array)
            return data.array[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDeviceCount=lambda: 1,
            memcpyAsync=memcpy,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
        )
        module: Any = ModuleType("cupy")
        module.__getattr__ = lambda name: getattr(np, name)
        module.empty = lambda size, dtype: self.give(np.full(size, 255, dtype))
        module.ndarray = ndarray
        module.ascontiguousarray = lambda a: self.give(np.ascontiguousarray(a))
        cuda = module.cuda = ModuleType("cupy.cuda")
        cuda.Event = lambda disable_timing: _Event(self)
        cuda.Stream, cuda.runtime = make_stream, runtime
        cuda.alloc_pinned_memory = lambda size: np.full(size, 255, np.uint8)
        cuda.get_current_stream = lambda: self.work
        return module
