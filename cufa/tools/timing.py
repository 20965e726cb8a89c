"""How everything here is timed: short bursts after an idle gap, in random order, medians.

A GPU slows down as it warms up, and in a fixed order whoever runs after a slow contender gains
from the rest that it had. So each burst begins with an idle gap, and each round has an order of its
own. A burst's kernels are queued behind one that waits for the host to be ready, so that host time
does not count. In a sustained run the contender works before its burst instead, as long as it takes
for the card to be as warm as its work makes it.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple, Protocol

#: What a burst is to last, and how many calls it has at most: the launches that wait for the GPU
#: must fit its queue of about a thousand, and a call may be several.
BURST_MS, MAX_CALLS = 8.0, 200
#: A GPU rests this long before each burst.
IDLE_S = 0.03


@dataclass(frozen=True)
class Contender:
    """One way to compute something.

    Parameters
    ----------
    name : str
    calls : sequence of callables
        The same computation on different copies of its inputs; a burst goes round them.
    around : callable
        Makes the context that the calls run in, such as a stream.
    finish : callable, default None
        Waits for a call's result. Given for a library that has streams of its own; None: the work
        is in the clock's stream.
    extra_bytes : callable, default None
        Runs a call and returns the most memory that it held, less its result. None: unknown.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[Any], Any] | None = None
    extra_bytes: Callable[[Callable[[], Any]], int] | None = None


class Burst(NamedTuple):
    """What one of the calls of a burst took: until it was done, and of the host."""

    ms: float
    host_us: float


class Clock(Protocol):
    """What times bursts."""

    def burst(self, contender: Contender, count: int) -> Burst:
        """Time `count` calls in a row."""


def keep_busy(
    calls: Sequence[Callable[[], Any]], seconds: float, wait: Callable[[Any], Any]
) -> None:
    """Repeat calls for so long; `wait` is given a result, and returns when the work is done."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call in calls:
            result = call()
        wait(result)


@dataclass(frozen=True)
class HostClock:
    """For work that is done when a call returns.

    Parameters
    ----------
    sustained : float, default 0
        Seconds of work before each burst.
    """

    sustained: float = 0.0

    def burst(self, contender: Contender, count: int) -> Burst:
        calls = list(islice(cycle(contender.calls), count))
        keep_busy(calls, self.sustained, lambda result: None)
        begin = time.perf_counter()
        for call in calls:
            call()
        seconds = (time.perf_counter() - begin) / count
        return Burst(seconds * 1e3, seconds * 1e6)


def host_extra_bytes(call: Callable[[], Any]) -> int:
    """The most that NumPy allocated at one time during a call, less its result."""
    tracemalloc.start()
    try:
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return max(0, int(peak - sum(sizes_of(result))))


def sizes_of(result: Any) -> list[int]:
    """Bytes of an array, or of each array of a tuple."""
    arrays = result if isinstance(result, tuple) else (result,)
    return [int(a.nbytes) for a in arrays if a is not None]


@dataclass(frozen=True)
class Figures:
    """What was measured of one contender, a burst each round."""

    ms: tuple[float, ...]
    host_us: tuple[float, ...]
    #: Device memory beyond inputs and result; None if its library cannot tell.
    extra_bytes: int | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        if len(self.ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ms, n=4, method="inclusive")
        return (high - low) / 2 / self.median_ms

    @property
    def median_host_us(self) -> float:
        return statistics.median(self.host_us)


def compare(
    contenders: Sequence[Contender],
    clock: Clock,
    rounds: int,
    on_burst: Callable[[], Any] = lambda: None,
) -> dict[str, Figures | str]:
    """Time contenders against each other.

    Parameters
    ----------
    contenders : sequence of Contender
    clock : Clock
    rounds : int
        Bursts of each.
    on_burst : callable
        Called after each burst.

    Returns
    -------
    dict
        For each contender's name its figures, or, if it raised, the first line of what it said.
    """
    failed: dict[str, Figures | str] = {}
    ready: dict[str, tuple[Contender, int, int | None]] = {}
    for contender in contenders:
        try:
            ready[contender.name] = (contender, *_warm_up(contender, clock))
        except Exception as error:  # whatever another library raises
            failed[contender.name] = reason(error)
    bursts: dict[str, list[Burst]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name in random.sample(list(ready), len(ready)):
            contender, count, _ = ready[name]
            bursts[name].append(clock.burst(contender, count))
            on_burst()
    timed: dict[str, Figures | str] = {
        name: Figures(
            tuple(burst.ms for burst in bursts[name]),
            tuple(burst.host_us for burst in bursts[name]),
            extra_bytes,
        )
        for name, (_, _, extra_bytes) in ready.items()
    }
    both = timed | failed
    return {contender.name: both[contender.name] for contender in contenders}


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _warm_up(contender: Contender, clock: Clock) -> tuple[int, int | None]:
    """Calls that a burst takes, and extra memory, from first calls, which may compile."""
    call = contender.calls[0]
    with contender.around():
        result = call()
        if contender.finish:
            contender.finish(result)
        del result
        extra_bytes = contender.extra_bytes(call) if contender.extra_bytes else None
    ms = clock.burst(contender, 1).ms
    return max(1, min(MAX_CALLS, int(BURST_MS / max(ms, 1e-6)))), extra_bytes
