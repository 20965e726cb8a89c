"""A card through CuPy, as the tools measure on it: its clock, its memory, its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import cupy
import numpy as np

from cufa.tools.timing import IDLE_S, Burst, Contender, keep_busy, sizes_of

#: The library of arrays.
xp: Any = cupy
#: Waits until the host says so, or for a while: a call that waits for the GPU must not hang.
_GATE = r"""
extern "C" __global__ void gate(const volatile unsigned* is_open, unsigned long long most_ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (!*is_open && now - begin < most_ns);
}
"""
_MOST_NS = 100_000_000


class CudaClock:
    """Times bursts in CuPy's current stream by its events.

    Parameters
    ----------
    sustained : float, default 0
        Seconds of work before each burst, in place of an idle gap.
    """

    def __init__(self, sustained: float = 0.0) -> None:
        self._sustained = sustained
        self._gate = cupy.RawKernel(_GATE, "gate")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._is_open: Any = np.frombuffer(self._memory, np.uint32, 1)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def burst(self, contender: Contender, count: int) -> Burst:
        calls = list(islice(cycle(contender.calls), count))
        with contender.around():
            cupy.cuda.runtime.deviceSynchronize()
            if self._sustained:
                keep_busy(calls, self._sustained, contender.finish or _wait)
            else:
                time.sleep(IDLE_S)
            if contender.finish is not None:
                return _between_bursts(calls, contender.finish)
            self._is_open[0] = 0
            address, most = np.uint64(self._memory.ptr), np.uint64(_MOST_NS)
            self._gate((1,), (1,), (address, most))
            self._start.record()
            try:
                begin = time.perf_counter()
                for call in calls:
                    call()
                host = time.perf_counter() - begin
                self._stop.record()
            finally:
                self._is_open[0] = 1
            self._stop.synchronize()
        ms = cupy.cuda.get_elapsed_time(self._start, self._stop) / count
        return Burst(ms, host / count * 1e6)


def _wait(result: Any) -> None:
    finish()


def finish() -> None:
    """Returns when the device has done all its work."""
    cupy.cuda.runtime.deviceSynchronize()


def _between_bursts(calls: list[Callable[[], Any]], finish: Callable[[Any], Any]) -> Burst:
    """From the host's time for `calls` and for twice as many: their difference has no latency."""

    def seconds(calls: list[Callable[[], Any]]) -> tuple[float, float]:
        begin = time.perf_counter()
        for call in calls:
            result = call()
        queued = time.perf_counter()
        finish(result)
        return time.perf_counter() - begin, queued - begin

    (once, host), (twice, _) = seconds(calls), seconds(calls * 2)
    total = twice - once if twice > once else once
    return Burst(total / len(calls) * 1e3, host / len(calls) * 1e6)


class _Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """The most that CuPy's pool had handed out at one time since this was entered."""

    name = "cufa peak"

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self.bytes = 0

    def malloc_postprocess(self, **facts: Any) -> None:
        self._held[facts["mem_ptr"]] = facts["mem_size"]
        self.bytes = max(self.bytes, sum(self._held.values()))

    def free_postprocess(self, **facts: Any) -> None:
        self._held.pop(facts["mem_ptr"], None)


def extra_bytes(call: Callable[[], Any]) -> int:
    """The most device memory that a call held through CuPy, less its result."""
    with _Peak() as peak:
        result = call()
    handed_out = sum(-(-size // 512) * 512 for size in sizes_of(result))  # the pool's unit
    return max(0, int(peak.bytes - handed_out))


def new_stream() -> Any:
    """A stream that waits for no other."""
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def working_in(stream: Any) -> Iterator[None]:
    """All work goes to this stream, and is done when the context is left."""
    try:
        with stream:
            yield
    finally:
        stream.synchronize()


def current_stream() -> int:
    """CuPy's, as other libraries take it."""
    return int(cupy.cuda.get_current_stream().ptr)


def facts() -> dict[str, Any]:
    """What a report says of the card."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "card": properties["name"].decode(),
        "arch": 10 * properties["major"] + properties["minor"],
        "driver": runtime.driverGetVersion(),
        "CuPy": cupy.__version__,
    }


def l2_bytes() -> int:
    """Of the current device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return int(properties["l2CacheSize"])


def release() -> None:
    """Give freed memory back, so that other libraries find it."""
    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
