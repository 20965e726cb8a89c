"""What the ranks' hosts tell each other: facts before work begins, and that one of them failed.

Arrays go another way, by MPI or NCCL. A message here is a few hundred bytes, and no rank waits for
one without an end: a rank that fails says so, one that is late is named.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from cufa.errors import RankError, RankTimeoutError

#: First letters of messages.
_FACTS, _FAILED, _LEFT = "facts ", "failed ", "left "
#: What a line that knows of it gives as the last text of a rank.
GONE = "gone "
#: Seconds that a process which saw a failure waits at its end, at most, for others to see it too.
_GRACE = 5.0
#: Between two looks at what has come, in seconds; short at first.
_SHORTEST, _LONGEST = 2e-5, 2e-4


class Line(Protocol):
    """Carries short texts between ranks, in order; the root is linked with all others.

    `links` are the ranks that this one can send to.
    """

    rank: int
    size: int
    links: tuple[int, ...]

    def send(self, rank: int, text: str) -> None:
        """Returns at once; a text to a rank that is gone is lost."""

    def poll(self) -> tuple[int, str] | None:
        """The next text that has come, and from whom; at once. `GONE` of a rank that has ended."""

    def abandon(self, all_left: Callable[[], bool]) -> None:
        """The work has failed: see that the process can end. `all_left` says whether the others
        have seen it, after a while at most."""

    def close(self) -> None: ...


class Deadline:
    """Waits by looking again and again, ever more seldom, until a time is over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._pause = _SHORTEST

    def is_over(self) -> bool:
        """Waits for a moment; then whether the time is over."""
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST)
        return time.monotonic() > self._end


class Hosts:
    """The ranks of a group as they talk over a `Line`.

    Parameters
    ----------
    line : Line
    timeout : float
        Seconds that a rank waits for another. Ranks but the root wait half as long again for the
        root, which then tells them who is late.
    """

    def __init__(self, line: Line, timeout: float) -> None:
        self.rank, self.size, self.timeout = line.rank, line.size, timeout
        self._line = line
        self._facts: defaultdict[int, deque[str]] = defaultdict(deque)
        self._left: set[int] = set()
        #: Of these, the ranks that have come to their end.
        self._ended: set[int] = set()

    def gather(self, facts: Any) -> list[Any]:
        """What each rank has given here, plain values that JSON knows, by rank.

        Raises
        ------
        RankError, RankTimeoutError
        """
        own = json.dumps(facts)
        if self.rank:
            self._line.send(0, _FACTS + own)
            return _unpacked(self._next(0, Deadline(1.5 * self.timeout)))
        deadline = Deadline(self.timeout)
        texts = [own, *(self._next(rank, deadline) for rank in range(1, self.size))]
        different = list(dict.fromkeys(texts))  # of a thousand ranks most say the same
        places = {text: n for n, text in enumerate(different)}
        every = json.dumps([different, [places[text] for text in texts]])
        for rank in range(1, self.size):
            self._line.send(rank, _FACTS + every)
        return _unpacked(every)

    def check(self) -> None:
        """Take in what has come.

        Raises
        ------
        RankError
            A rank says that it failed, or is gone.
        """
        while (message := self._line.poll()) is not None:
            rank, text = message
            if text.startswith(_FACTS):
                self._facts[rank].append(text.removeprefix(_FACTS))
            elif text.startswith(_LEFT):
                self._left.add(rank)
                self._ended.add(rank)
            elif text.startswith(_FAILED):
                self._left.add(rank)
                raise RankError(text.removeprefix(_FAILED))
            elif rank not in self._left:
                raise RankError(f"rank {rank} is gone: its process has ended")

    def fail(self, text: str) -> None:
        """Tell the ranks that this one is linked with why the work has ended."""
        for rank in self._line.links:
            self._line.send(rank, _FAILED + text)
        self._line.abandon(self.all_leave)

    def close(self) -> None:
        """Leave the group: from here on to be gone is no failure."""
        self._say_left()
        self._line.close()

    def all_leave(self) -> bool:
        """At the end of a process that has failed: whether all other ranks have come to their end
        too, or do within a few seconds. What they had to say is out by then."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # where there is none
                stream.flush()
        self._say_left()
        deadline = Deadline(min(self.timeout, _GRACE))
        while len(self._ended) < self.size - 1:
            with suppress(RankError):
                self.check()
            if deadline.is_over():
                return False
        return True

    def _say_left(self) -> None:
        for rank in self._line.links:
            self._line.send(rank, _LEFT)

    def _next(self, rank: int, deadline: Deadline) -> str:
        """The next facts of a rank."""
        waiting = self._facts[rank]
        while True:
            self.check()
            if waiting:
                return waiting.popleft()
            if rank in self._left:
                raise RankError(
                    f"rank {rank} has left the group, and rank {self.rank} waits for it"
                )
            if deadline.is_over():
                raise RankTimeoutError(
                    f"rank {rank} has not come to this call within {self.timeout:g} s (timeout=); "
                    "every rank must make the same calls in the same order"
                )


def _unpacked(every: str) -> list[Any]:
    """What each rank gave, from the texts that differ and each rank's place among them."""
    different, places = json.loads(every)
    return [json.loads(different[place]) for place in places]
