"""Texts between ranks over TCP, for hosts without MPI."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable

from cufa.distributed.hosts import GONE, Deadline
from cufa.errors import ArgumentError, RankTimeoutError

#: Bytes before each text: how long it is.
_LENGTH = struct.Struct("!I")
#: What a rank says first, before its number.
_HELLO = "cufa rank "
_READ = 1 << 16


class SocketLine:
    """Texts over a connection of each rank with rank 0.

    Nothing is encrypted, and whoever can reach the port may join: for networks that are trusted.
    Of what comes in nothing is executed.

    Parameters
    ----------
    address : str
        "host:port", on which rank 0 listens; of a host that all ranks reach by this name.
    rank, size : int
    timeout : float
        Seconds that the ranks have to join.

    Raises
    ------
    ArgumentError
        `address` has no port.
    RankTimeoutError
        A rank has not joined in time.
    """

    def __init__(self, address: str, rank: int, size: int, timeout: float) -> None:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            raise ArgumentError(f"address is {address!r}; it must be 'host:port'")
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._sockets: dict[int, socket.socket] = {}
        self._bytes: dict[int, bytearray] = {}
        self._come: deque[tuple[int, str]] = deque()
        if rank == 0:
            self._accept((host, int(port)))
        else:
            self._join((host, int(port)))
        self.links = tuple(self._sockets)

    def send(self, rank: int, text: str) -> None:
        data = text.encode()
        try:
            self._sockets[rank].sendall(_LENGTH.pack(len(data)) + data)
        except (KeyError, OSError):
            return  # it is gone, which `poll` will say

    def poll(self) -> tuple[int, str] | None:
        if not self._come and self._sockets:
            ready, _, _ = select.select(list(self._sockets.values()), [], [], 0)
            for rank, connection in list(self._sockets.items()):
                if connection in ready:
                    self._read(rank, connection)
        return self._come.popleft() if self._come else None

    def abandon(self, all_left: Callable[[], bool]) -> None:
        """Nothing: a process ends whatever becomes of its connections."""

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def _accept(self, address: tuple[str, int]) -> None:
        deadline = Deadline(self._timeout)
        with socket.create_server(address, backlog=self.size) as server:
            server.settimeout(0.1)
            while len(self._sockets) < self.size - 1:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = min(set(range(1, self.size)) - self._sockets.keys())
                    if deadline.is_over():
                        raise RankTimeoutError(
                            f"rank {missing} has not joined within {self._timeout:g} s (timeout=)"
                        ) from None
                    continue
                self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Take in one that says which rank it is; whoever says anything else is none."""
        connection.settimeout(1)
        try:
            (length,) = _LENGTH.unpack(connection.recv(_LENGTH.size, socket.MSG_WAITALL))
            text = connection.recv(min(length, 64), socket.MSG_WAITALL).decode()
            rank = int(text.removeprefix(_HELLO)) if text.startswith(_HELLO) else 0
        except (OSError, ValueError, struct.error):
            rank = 0
        if not 0 < rank < self.size or rank in self._sockets:
            connection.close()
            return
        self._add(rank, connection)

    def _join(self, address: tuple[str, int]) -> None:
        deadline = Deadline(self._timeout)
        while True:
            try:
                connection = socket.create_connection(address, timeout=1)
                break
            except OSError as error:  # rank 0 may not listen yet
                if deadline.is_over():
                    raise RankTimeoutError(
                        f"rank 0 does not listen on {address[0]}:{address[1]} ({error}) within "
                        f"{self._timeout:g} s (timeout=)"
                    ) from error
        self._add(0, connection)
        self.send(0, f"{_HELLO}{self.rank}")

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[rank], self._bytes[rank] = connection, bytearray()

    def _read(self, rank: int, connection: socket.socket) -> None:
        """Take in what has come; the last of a rank is that it is gone."""
        try:
            data = connection.recv(_READ)
        except OSError:
            data = b""
        if not data:
            self._sockets.pop(rank).close()
            self._come.append((rank, GONE))
            return
        held = self._bytes[rank]
        held += data
        while len(held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held)
            end = _LENGTH.size + length
            if len(held) < end:
                break
            self._come.append((rank, held[_LENGTH.size : end].decode()))
            del held[:end]
