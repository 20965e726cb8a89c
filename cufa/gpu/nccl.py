"""NCCL, through CuPy: CuPy arrays between ranks, each with a card of its own."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import Event, Stream, get_current_stream, nccl

from cufa.distributed.communicator import Communicator, Messages
from cufa.distributed.hosts import Deadline, Hosts
from cufa.errors import DeviceError, RankTimeoutError, UnsupportedError


class _Transfer:
    """What NCCL does in the stream of a group; `arrays` stay alive until it is known to be done."""

    def __init__(self, group: NCCLCommunicator, what: str, arrays: list[Any]) -> None:
        self._group, self._what, self._arrays = group, what, arrays
        self._done = Event(disable_timing=True)
        self._done.record(group.stream)
        self.is_waited_for = False

    def wait(self) -> None:
        get_current_stream().wait_event(self._done)
        self.is_waited_for = True

    def settle(self) -> None:
        """Wait on the host, so that a rank that never answers is an error and no hang."""
        group, deadline = self._group, Deadline(self._group.timeout)
        while not self._done.done:
            group.check()
            if deadline.is_over():
                raise RankTimeoutError(
                    f"{self._what} is not done on rank {group.rank} within {group.timeout:g} s "
                    "(timeout=)"
                )


class NCCLCommunicator(Communicator):
    """Ranks that send each other CuPy arrays by NCCL, in a stream of its own.

    Each rank's arrays are on its own card, which becomes CuPy's current device. A transfer begins
    after the work so far in CuPy's current stream, and after those before it.

    Parameters
    ----------
    hosts : Hosts
    device : int, default None
        None: by the rank's place among those of its host, of the cards that the process sees.

    Raises
    ------
    DeviceError
        Two ranks have the same card.
    UnsupportedError
        CuPy finds no NCCL.
    """

    def __init__(self, hosts: Hosts, device: int | None = None) -> None:
        super().__init__(hosts, "cupy")
        self._nccl: Any = None
        #: In the order in which they began.
        self._unsettled: deque[_Transfer] = deque()
        if not nccl.available:
            raise UnsupportedError(
                "CuPy finds no NCCL; install nvidia-nccl-cu12 or nvidia-nccl-cu13, as your CUDA is"
            )
        unique = list(nccl.get_unique_id()) if self.rank == 0 else []
        with self.together("connect"):
            names, uniques = zip(*hosts.gather([socket.gethostname(), unique]), strict=True)
            if device is None:
                before = names[: self.rank].count(names[self.rank])
                device = before % cupy.cuda.runtime.getDeviceCount()
            cupy.cuda.Device(device).use()
            cards = hosts.gather([names[self.rank], cupy.cuda.Device().pci_bus_id])
        for rank, card in enumerate(cards):
            if (first := cards.index(card)) != rank:
                raise DeviceError(
                    f"ranks {first} and {rank} have the same GPU, {card[1]} of {card[0]}; start "
                    "as many ranks on a host as it has GPUs, or choose by device="
                )
        with self.together("connect"):
            self._nccl = nccl.NcclCommunicator(self.size, bytes(uniques[0]), self.rank)
            # Before the blocks of attention, which would leave no multiprocessor to it.
            self.stream = Stream(non_blocking=True, priority=-1)
            self._meet_neighbours()

    def start(self, sends: Messages, receives: Messages) -> _Transfer:
        self._begin()
        nccl.groupStart()
        try:
            for method, messages in ((self._nccl.send, sends), (self._nccl.recv, receives)):
                for a, rank in messages:
                    self._move(method, a, rank)
        finally:
            nccl.groupEnd()
        arrays = [a for messages in (sends, receives) for a, _ in messages]
        ranks = sorted({rank for messages in (sends, receives) for _, rank in messages})
        return self._begun(f"a transfer with rank {', '.join(map(str, ranks))}", arrays)

    def all_reduce(self, a: Any) -> _Transfer:
        self._begin()
        kind = nccl.NCCL_FLOAT64 if a.dtype == "float64" else nccl.NCCL_FLOAT32
        pointer, stream = a.data.ptr, self.stream.ptr
        self._nccl.allReduce(pointer, pointer, a.size, kind, nccl.NCCL_SUM, stream)
        return self._begun("a sum over all ranks", [a])

    def settle(self) -> None:
        while self._unsettled:
            self._settle_first()

    def check(self) -> None:
        """Raise if another rank, or NCCL, has failed."""
        self.hosts.check()
        self._nccl.check_async_error()

    def abandon(self) -> None:
        if self._nccl is not None:  # else the ranks have not joined yet
            self._nccl.abort()

    def close(self) -> None:
        if self._broken is None:
            self._nccl.destroy()
        super().close()

    def _meet_neighbours(self) -> None:
        """Send a byte round the ring, both ways: NCCL connects two ranks at their first transfer,
        for which the host waits without a limit, and now all ranks are known to come."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for to, source in ((after, before), (before, after)):
            sent, come = cupy.zeros(1, "uint8"), cupy.zeros(1, "uint8")
            self.start([(sent, to)], [(come, source)]).wait()

    def _begin(self) -> None:
        """Order what comes next in NCCL's stream after the work in CuPy's current one.

        Transfers whose arrays are in use by now are settled first, and let go of their arrays. If
        none is left, the current stream also waits until NCCL's has come here: else attention's
        kernel may take all multiprocessors just before NCCL's kernel, which then waits for its end.
        If one is left, the current stream would wait for all of it.
        """
        while self._unsettled and self._unsettled[0].is_waited_for:
            self._settle_first()
        current = get_current_stream()
        _follow(self.stream, current)
        if not self._unsettled:
            _follow(current, self.stream)

    def _begun(self, what: str, arrays: list[Any]) -> _Transfer:
        self._unsettled.append(_Transfer(self, what, arrays))
        return self._unsettled[-1]

    def _settle_first(self) -> None:
        self._unsettled[0].settle()
        self._unsettled.popleft()

    def _move(self, method: Callable[..., None], a: Any, rank: int) -> None:
        if a.nbytes:  # as bytes: NCCL of CuPy does not know every dtype
            method(a.data.ptr, a.nbytes, nccl.NCCL_UINT8, rank, self.stream.ptr)


def _follow(stream: Any, other: Any) -> None:
    """Make a stream wait for the work so far in another."""
    reached = Event(disable_timing=True)
    reached.record(other)
    stream.wait_event(reached)
