"""MPI, through mpi4py: NumPy arrays between ranks, and the texts of their hosts."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.distributed.communicator import Communicator, Messages
from cufa.distributed.hosts import Deadline, Hosts
from cufa.errors import RankTimeoutError, UnsupportedError

#: Tags of texts and of arrays.
_TEXT, _ARRAY = 1, 2


def load() -> Any:
    """`mpi4py.MPI`, which starts MPI.

    Raises
    ------
    UnsupportedError
        It cannot be imported.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"mpi4py cannot be used ({error}); install cufa[distributed], and start the ranks with "
            "its mpiexec"
        ) from error
    return MPI


def copy_of(comm: Any, timeout: float) -> Any:
    """A communicator of the same ranks, which all must ask for it, that nobody else uses.

    Raises
    ------
    RankTimeoutError
        One does not.
    """
    copy, request = comm.Idup()
    deadline = Deadline(timeout)
    while not request.Test():
        if deadline.is_over():
            atexit.register(load().COMM_WORLD.Abort, 1)  # who has not come will not end it
            raise RankTimeoutError(
                f"not all {comm.Get_size()} ranks have come to connect within {timeout:g} s "
                "(timeout=)"
            )
    return copy


class MPILine:
    """Texts over a copy of a communicator of MPI."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self._mpi, self._comm = load(), copy_of(comm, timeout)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.links = tuple(rank for rank in range(self.size) if rank != self.rank)
        #: Requests of texts that may still be on their way, each with its bytes.
        self._sent: list[tuple[Any, bytes]] = []

    def send(self, rank: int, text: str) -> None:
        data = text.encode()
        self._sent = [(request, a) for request, a in self._sent if not request.Test()]
        self._sent.append((self._comm.Isend([data, self._mpi.BYTE], rank, _TEXT), data))

    def poll(self) -> tuple[int, str] | None:
        status = self._mpi.Status()
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, _TEXT, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        return status.Get_source(), data.decode()

    def abandon(self, all_left: Callable[[], bool]) -> None:
        # Before mpi4py's own end, which would wait for a rank that never comes to its own.
        atexit.register(self._end, all_left)

    def close(self) -> None:
        """Nothing: the end of MPI sees to what is on its way."""

    def _end(self, all_left: Callable[[], bool]) -> None:
        if not all_left():
            self._mpi.COMM_WORLD.Abort(1)


class _Transfer:
    """Requests of MPI, and the arrays that they read and write."""

    def __init__(self, group: MPICommunicator, requests: list[Any], others: list[str]) -> None:
        self._group, self._requests, self._others = group, requests, others

    def is_done(self) -> bool:
        done: bool = self._group.mpi.Request.Testall(self._requests)
        return done

    def wait(self) -> None:
        group, deadline = self._group, Deadline(self._group.timeout)
        while not self.is_done():
            group.hosts.check()
            if deadline.is_over():
                both = zip(self._others, self._requests, strict=True)
                late = next(
                    (other for other, request in both if not request.Test()), "another rank"
                )
                raise RankTimeoutError(
                    f"{late} has not answered rank {group.rank} within {group.timeout:g} s "
                    "(timeout=)"
                )
        group.pending.discard(self)


class MPICommunicator(Communicator):
    """Ranks of MPI that send each other NumPy arrays.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All its ranks must take part: a copy of it is made.
    timeout : float

    Notes
    -----
    How much of a large transfer goes on beside work is up to MPI: some libraries move it only while
    somebody waits.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.mpi, self._comm = load(), copy_of(comm, timeout)
        super().__init__(Hosts(MPILine(comm, timeout), timeout), "numpy")
        #: What has not been waited for to its end.
        self.pending: set[_Transfer] = set()

    def start(self, sends: Messages, receives: Messages) -> _Transfer:
        byte, comm = self.mpi.BYTE, self._comm
        requests, others = [], []
        for method, messages in ((comm.Irecv, receives), (comm.Isend, sends)):
            for a, rank in messages:
                if a.size:
                    # MPI does not know bfloat16; bytes are bytes.
                    requests.append(method([a.reshape(-1).view(np.uint8), byte], rank, _ARRAY))
                    others.append(f"rank {rank}")
        return self._started(requests, others)

    def all_reduce(self, a: Any) -> _Transfer:
        request = self._comm.Iallreduce(self.mpi.IN_PLACE, a, self.mpi.SUM)
        return self._started([request], ["another rank"])

    def settle(self) -> None:
        for transfer in list(self.pending):
            transfer.wait()

    def abandon(self) -> None:
        atexit.register(self._end)  # before mpi4py's own end, which would wait for arrays

    def _started(self, requests: list[Any], others: list[str]) -> _Transfer:
        transfer = _Transfer(self, requests, others)
        self.pending.add(transfer)
        return transfer

    def _end(self) -> None:
        """End the whole job, once the others know, if arrays are on their way for good."""
        if not all(transfer.is_done() for transfer in self.pending):
            self.hosts.all_leave()
            self.mpi.COMM_WORLD.Abort(1)
