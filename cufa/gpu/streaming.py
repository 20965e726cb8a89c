"""Blocks of arrays in host memory, brought to a card and back while the card computes.

Each kind of arrays has two slots on the card. While the blocks of one are in use, those of the next
pair are copied into the other; a block that is still in one is not copied again. Host memory that
is not page-locked cannot be copied by the card itself: the host copies it, in chunks, through a few
page-locked buffers. Results go back likewise, one pair of blocks later.

Three streams, and events between them: CuPy's current one, in which kernels run, waits for the
copies of what it needs; a copy into a slot waits for the kernels that have read it; a copy of a
result waits for the kernel that has made it. The host waits for nothing that was launched last, so
that there is always work for the card.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Event, Stream, alloc_pinned_memory, get_current_stream, runtime

Array = np.ndarray[Any, Any]
Name = tuple[int, ...]
#: Bytes of a page-locked buffer, and how many there are for each direction.
_CHUNK = 1 << 24
_CHUNKS = 3
#: One thread copies some 10 GB/s, a card takes 50.
_THREADS = 4
#: Bytes that are worth more than one.
_THREADED = 1 << 20


def count_cards() -> int:
    """How many cards CuPy can use; 0 without a driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


class Streamed:
    """Blocks of host arrays are computed on the current card, in CuPy's current stream.

    The methods are those of `cufa.long.sweep.Stage`.
    """

    def __init__(self) -> None:
        self.xp = cupy
        self._work = get_current_stream()
        self._incoming, self._outgoing = (Stream(non_blocking=True) for _ in range(2))
        self._threads = ThreadPoolExecutor(_THREADS)
        self._slots: dict[str, tuple[_Slot, _Slot]] = {}
        #: Bytes of each array of the largest block, by kind.
        self._sizes: dict[str, list[int]] = {}
        self._to_card, self._to_host = _Ring(_CHUNK), _Ring(_CHUNK)
        #: Slots of the pair at work, by kind.
        self._used: dict[str, _Slot] = {}
        #: When the launches of the last pair, and of the one before, are done.
        self._launched: deque[Any] = deque(maxlen=2)
        #: Results of the pair at work, and of the one before.
        self._fresh: list[_Result] = []
        self._ripe: list[_Result] = []

    def reserve(self, largest: dict[str, tuple[Array, ...]]) -> None:
        self._slots = {kind: (_Slot(), _Slot()) for kind in largest}
        self._sizes = {kind: [a.nbytes for a in arrays] for kind, arrays in largest.items()}
        rows = [_row_bytes(a) for arrays in largest.values() for a in arrays]
        size = max(_CHUNK, *rows)
        self._to_card, self._to_host = _Ring(size), _Ring(size)

    def place(self, a: Any) -> Any:
        return cupy.asarray(a)

    def load(self, wanted: Any) -> None:
        if len(self._launched) == 2:
            # The host is at most one pair ahead. The card has the last one to work on meanwhile.
            self._launched[0].synchronize()
        self._deliver(self._ripe)
        self._ripe, self._fresh = self._fresh, []
        for kind, name in wanted.names.items():
            slots = self._slots[kind]
            if all(slot.name != name for slot in slots):
                free = next(slot for slot in slots if slot is not self._used.get(kind))
                self._fill(free, name, wanted.views[kind], self._sizes[kind])

    def take(self, wanted: Any) -> dict[str, tuple[Any, ...]]:
        found = {}
        for kind, name in wanted.names.items():
            slot = next(slot for slot in self._slots[kind] if slot.name == name)
            if slot.filled is not None:
                self._work.wait_event(slot.filled)
            self._used[kind] = slot
            found[kind] = tuple(
                _as_array(memory, a)
                for memory, a in zip(slot.memory, wanted.views[kind], strict=True)
            )
        return found

    def launched(self) -> None:
        done = _mark(self._work)
        self._launched.append(done)
        for slot in self._used.values():
            slot.read = done

    def store(self, copies: list[tuple[Array, Any]], stored: Callable[[], None]) -> None:
        copies = [(target, cupy.ascontiguousarray(source)) for target, source in copies]
        self._fresh.append(_Result(copies, stored, _mark(self._work)))

    def finish(self) -> None:
        self._ripe += self._fresh
        self._deliver(self._ripe)

    def close(self) -> None:
        self._threads.shutdown()
        self._incoming.synchronize()
        self._outgoing.synchronize()

    def _fill(self, slot: _Slot, name: Name, views: tuple[Array, ...], sizes: list[int]) -> None:
        if not slot.memory:
            slot.memory = [cupy.empty(size, np.uint8) for size in sizes]
            slot.read = _mark(self._work)  # the pool may give what earlier kernels still read
        if slot.read is not None:
            self._incoming.wait_event(slot.read)
        for memory, source in zip(slot.memory, views, strict=True):
            target = memory.data.ptr
            for part in _chunks(source, self._to_card.size):
                buffer = self._to_card.next()
                self._copy(_laid_over(buffer.memory, part), part)
                self._start(target, buffer.memory.ctypes.data, part.nbytes, self._incoming)
                buffer.done = _mark(self._incoming)
                target += part.nbytes
        slot.name, slot.filled = name, _mark(self._incoming)

    def _deliver(self, results: list[_Result]) -> None:
        """Bring results back, which are then no longer held."""
        while results:
            result = results.pop(0)
            self._outgoing.wait_event(result.made)
            for target, source in result.copies:
                self._fetch(target, source)
            result.stored()

    def _fetch(self, target: Array, source: Any) -> None:
        flying: deque[tuple[_Buffer, Array]] = deque()
        address = source.data.ptr

        def land() -> None:
            buffer, part = flying.popleft()
            buffer.done.synchronize()
            self._copy(part, _laid_over(buffer.memory, part))

        for part in _chunks(target, self._to_host.size):
            if len(flying) == _CHUNKS:
                land()
            buffer = self._to_host.next()
            self._start(buffer.memory.ctypes.data, address, part.nbytes, self._outgoing)
            buffer.done = _mark(self._outgoing)
            flying.append((buffer, part))
            address += part.nbytes
        while flying:
            land()

    def _start(self, target: int, source: int, size: int, stream: Any) -> None:
        to_card = stream is self._incoming
        kind = runtime.memcpyHostToDevice if to_card else runtime.memcpyDeviceToHost
        runtime.memcpyAsync(target, source, size, kind, stream.ptr)

    def _copy(self, target: Array, source: Array) -> None:
        """From host memory to host memory; much of it by several threads."""
        if target.nbytes < _THREADED:
            np.copyto(target, source)
            return
        step = math.ceil(len(target) / _THREADS)
        starts = range(0, len(target), step)
        parts = [slice(at, at + step) for at in starts]
        list(self._threads.map(lambda part: np.copyto(target[part], source[part]), parts))


@dataclass
class _Slot:
    """Room for the arrays of one block, and what is in it."""

    name: Name | None = None
    memory: list[Any] = field(default_factory=list)
    #: When the copy into it is done, and when the kernels that read it are.
    filled: Any = None
    read: Any = None


@dataclass
class _Result:
    copies: list[tuple[Array, Any]]
    stored: Callable[[], None]
    made: Any


class _Buffer:
    """Page-locked memory, and when the copy that uses it is done."""

    def __init__(self, size: int) -> None:
        self._owner = alloc_pinned_memory(size)
        self.memory: Array = np.frombuffer(self._owner, np.uint8, size)
        self.done: Any = None


class _Ring:
    """Buffers that take turns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._buffers: deque[_Buffer] = deque()

    def next(self) -> _Buffer:
        """The one that was used longest ago, free again."""
        if len(self._buffers) < _CHUNKS:
            buffer = _Buffer(self.size)
        else:
            buffer = self._buffers.popleft()
            buffer.done.synchronize()
        self._buffers.append(buffer)
        return buffer


def _mark(stream: Any) -> Any:
    """An event that is over when what has been put into a stream is done."""
    event = Event(disable_timing=True)
    event.record(stream)
    return event


def _row_bytes(a: Array) -> int:
    return (a.shape[2] if a.ndim > 2 else 1) * a.itemsize


def _chunks(a: Array, size: int) -> Iterator[Array]:
    """An array (heads, rows, ...) in order, in parts of at most so many bytes: rows of a head, or
    all. Rows are what several threads can copy."""
    if not a.size:
        return
    if a.nbytes <= size and len(a) > 1:
        yield a
        return
    step = max(1, size // max(1, _row_bytes(a)))
    for head in a:
        for start in range(0, len(head), step):
            yield head[start : start + step]


def _laid_over(memory: Array, a: Array) -> Array:
    """An array at the start of `memory`, with the shape and dtype of `a`."""
    return memory[: a.nbytes].view(a.dtype).reshape(a.shape)


def _as_array(memory: Any, a: Array) -> Any:
    """The same on the card."""
    return cupy.ndarray(a.shape, a.dtype, memory.data)
