"""What ranks do together, whatever carries their arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from cufa.distributed.hosts import Hosts
from cufa.errors import ArgumentError, CufaError, DTypeError, RankError, ShapeError

#: Arrays, each with the rank that it goes to or comes from.
Messages = Sequence[tuple[Any, int]]


class Pending(Protocol):
    """Arrays on their way."""

    def wait(self) -> None:
        """Order what the caller does next after this transfer.

        MPI: blocks the host until the arrays have come. NCCL: CuPy's current stream waits, not the
        host; errors come from a later transfer or `Communicator.settle`.

        Raises
        ------
        RankError, RankTimeoutError
        """


class Facts(NamedTuple):
    """Of one rank's call: what must be the same on all ranks, by kind, and what may differ."""

    sizes: dict[str, Any]
    dtypes: dict[str, Any]
    options: dict[str, Any]
    own: dict[str, Any]


_KINDS = {"sizes": ShapeError, "dtypes": DTypeError, "options": ArgumentError}


class Communicator(ABC):
    """A group of ranks that send each other arrays of one library.

    Use it as a context: leaving it by an error tells the other ranks, which then end too.

    Parameters
    ----------
    hosts : Hosts
    library : {"numpy", "cupy"}
        Whose arrays it carries.

    Attributes
    ----------
    rank, size : int
        This process's number, from 0 on, and how many there are.
    timeout : float
        Seconds that a rank waits for another before it gives up. A wait for arrays on a GPU
        includes the rank's own work before their transfer.
    hosts : Hosts
        Texts between the ranks.
    library : {"numpy", "cupy"}
    """

    def __init__(self, hosts: Hosts, library: str) -> None:
        self.hosts, self.library = hosts, library
        self.rank, self.size = hosts.rank, hosts.size
        self._broken: str | None = None

    @property
    def timeout(self) -> float:
        return self.hosts.timeout

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    @abstractmethod
    def start(self, sends: Messages, receives: Messages) -> Pending:
        """Begin to send arrays, and to fill others.

        Contiguous arrays; those of no bytes need no message. What two ranks send each other is
        matched in order. Work that writes to what is sent, or uses what is filled, must be ordered
        after it by `wait`. May block the host until earlier transfers are done.

        Raises
        ------
        RankError, RankTimeoutError
        """

    @abstractmethod
    def all_reduce(self, a: Any) -> Pending:
        """Begin to put the sum over all ranks into `a`, contiguous, of float32 or float64; as
        `start`."""

    @abstractmethod
    def settle(self) -> None:
        """Return when all that was begun has come.

        Raises
        ------
        RankError, RankTimeoutError
        """

    @abstractmethod
    def abandon(self) -> None:
        """Give up what is on its way."""

    def close(self) -> None:
        """Leave the group, when no more calls are to come."""
        if self._broken is None:
            self.hosts.close()
            self._broken = "it was closed"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail("", error)
        self.close()

    def agree(self, call: str, find: Callable[[], Facts]) -> list[dict[str, Any]]:
        """Have all ranks check their arguments; what each has of its own, by rank.

        Parameters
        ----------
        call : str
            Name of the function that all ranks are to be in.
        find : callable
            Checks this rank's arguments and gives their facts.

        Raises
        ------
        ArgumentError, DTypeError, ShapeError, ...
            What `find` raises; or ranks differ.
        RankError
            What `find` raised on another rank, in words.
        RankError, RankTimeoutError
            Another rank has failed, has left or does not come; then the group is of no more use.

        Notes
        -----
        After errors of the first two kinds nothing is on its way, and the group is as good as
        before.
        """
        if self._broken is not None:
            raise RankError(
                f"{call} on rank {self.rank}: this communicator is of no more use, since "
                f"{self._broken}; make another"
            )
        facts, error = None, None
        try:
            facts = find()
            told: dict[str, Any] = {"call": call, **facts._asdict()}
        except Exception as raised:
            error = raised
            told = {"call": call, "error": f"{type(raised).__name__}: {raised}"}
        with self.together(call):
            ranks = self.hosts.gather(told)
        if error is not None:
            raise error
        for rank, other in enumerate(ranks):
            if other["call"] != ranks[0]["call"]:
                raise ArgumentError(
                    f"rank {rank} is in {other['call']} and rank 0 in {ranks[0]['call']}; every "
                    "rank must make the same calls in the same order"
                )
        for rank, other in enumerate(ranks):
            if "error" in other:
                raise RankError(f"{call} was refused on rank {rank}: {other['error']}")
        for kind, error_of_kind in _KINDS.items():
            for rank, other in enumerate(ranks):
                _compare(call, rank, other[kind], ranks[0][kind], error_of_kind)
        return [other["own"] for other in ranks]

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Around work that ranks share: if this rank fails, it tells the others."""
        try:
            yield
            self.settle()
            self.hosts.check()  # this rank may have all it needs from one that has failed since
        except BaseException as error:
            self._fail(call, error)
            raise

    def _fail(self, call: str, error: BaseException) -> None:
        if self._broken is not None:
            return
        if isinstance(error, RankError):
            text = str(error)  # that of another rank, passed on
        else:
            text = (
                f"rank {self.rank} failed{call and f' in {call}'}: {type(error).__name__}: {error}"
            )
        self._broken = text
        try:
            self.hosts.fail(text)
        finally:
            self.abandon()


def _compare(
    call: str, rank: int, here: dict[str, Any], first: dict[str, Any], kind: type[CufaError]
) -> None:
    for name in {**first, **here}:
        if here.get(name) != first.get(name):
            raise kind(
                f"{call}: {name} is {here.get(name)!r} on rank {rank} and {first.get(name)!r} on "
                "rank 0; it must be the same on all ranks"
            )
