"""A fake of NCCL, and of as much of CuPy as `cufa.gpu.nccl` uses, for ranks that are threads.

Arrays are NumPy's. Work in a stream is done when somebody asks whether an event behind it is done.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class _Array(np.ndarray):
    """What stands for a `cupy.ndarray`."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def array(a: Any) -> Any:
    """A copy of `a` that has a pointer."""
    return np.array(a).view(_Array)


class _Stream:
    """Work in order; each piece says whether it is done."""

    def __init__(self, non_blocking: bool = False, priority: int = 0) -> None:
        self.ptr, self.work = id(self), deque[Any]()
        self._is_running = False

    def launch(self, kernel: Callable[[], object]) -> None:
        def work() -> bool:
            kernel()
            return True

        self.work.append(work)

    def wait_event(self, event: _Event) -> None:
        self.work.append(lambda: event.done)

    def run(self) -> None:
        if self._is_running:  # by a stream that this one waits for
            return
        self._is_running = True
        while self.work and self.work[0]():
            self.work.popleft()
        self._is_running = False


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self._passed = False

    def record(self, stream: _Stream) -> None:
        self._stream = stream

        def passed() -> bool:
            self._passed = True
            return True

        stream.work.append(passed)

    @property
    def done(self) -> bool:
        self._stream.run()
        return self._passed


class PaperNccl:
    """The cards of one host, as many as `cards`."""

    def __init__(self, cards: int) -> None:
        self._cards = cards
        self._mail: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._sums: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._thread = threading.local()
        self._streams: dict[int, _Stream] = {}
        #: What became of the communicators, by rank.
        self.ended: dict[int, str] = {}

    def current_stream(self) -> _Stream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = _Stream()
        return self._thread.stream

    def cupy(self) -> ModuleType:
        paper = self

        class Device:
            def __init__(self, number: int | None = None) -> None:
                self._number = number

            def use(self) -> None:
                paper._thread.device = self._number

            @property
            def pci_bus_id(self) -> str:
                return f"0000:{paper._thread.device:02}:00.0"

        def stream(**options: Any) -> _Stream:
            made = _Stream(**options)
            paper._streams[made.ptr] = made
            return made

        module = ModuleType("cupy")
        module.zeros = lambda *what: array(np.zeros(*what))
        module.cuda = ModuleType("cupy.cuda")
        facts = {
            "Device": Device,
            "Event": _Event,
            "Stream": stream,
            "get_current_stream": self.current_stream,
            "runtime": SimpleNamespace(getDeviceCount=lambda: self._cards),
            "nccl": SimpleNamespace(
                available=True,
                get_unique_id=lambda: bytes((7, 249)),
                groupStart=lambda: None,
                groupEnd=lambda: None,
                NCCL_UINT8="bytes",
                NCCL_FLOAT32=np.dtype("float32"),
                NCCL_FLOAT64=np.dtype("float64"),
                NCCL_SUM="sum",
                NcclCommunicator=lambda *facts: _Communicator(self, *facts),
            ),
        }
        for name, value in facts.items():
            setattr(module.cuda, name, value)
        return module


class _Communicator:
    def __init__(self, paper: PaperNccl, size: int, unique: bytes, rank: int) -> None:
        assert unique == bytes((7, 249))
        self._paper, self._size, self._rank = paper, size, rank
        self._sums = 0

    def send(self, pointer: int, count: int, kind: str, to: int, stream: int) -> None:
        def work() -> bool:
            self._paper._mail[self._rank, to].append(ctypes.string_at(pointer, count))
            return True

        self._paper._streams[stream].work.append(work)

    def recv(self, pointer: int, count: int, kind: str, source: int, stream: int) -> None:
        def work() -> bool:
            mail = self._paper._mail[source, self._rank]
            if not mail:
                return False
            data = mail.popleft()
            assert len(data) == count
            ctypes.memmove(pointer, data, count)
            return True

        self._paper._streams[stream].work.append(work)

    def allReduce(self, a: int, b: int, count: int, kind: Any, op: str, stream: int) -> None:
        assert (a, op) == (b, "sum")
        parts, size = self._paper._sums[self._sums], count * kind.itemsize
        self._sums += 1

        def work() -> bool:
            parts.setdefault(self._rank, np.frombuffer(ctypes.string_at(a, size), kind))
            if len(parts) < self._size:
                return False
            ctypes.memmove(b, sum(parts[n] for n in sorted(parts)).tobytes(), size)
            return True

        self._paper._streams[stream].work.append(work)

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        self._paper.ended[self._rank] = "aborted"

    def destroy(self) -> None:
        self._paper.ended[self._rank] = "destroyed"
