"""Ranks that talk over TCP: in threads of one process, and in processes that end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cufa.distributed.hosts import Hosts
from cufa.distributed.sockets import SocketLine
from cufa.errors import ArgumentError, RankError, RankTimeoutError

RANK = """
import sys, time
from cufa.distributed.hosts import Hosts
from cufa.distributed.sockets import SocketLine
address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hosts = Hosts(SocketLine(address, rank, size, 20), 20)
hosts.gather(rank)
"""


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def together(size, address, work, timeout=20.0):
    """What `work` gives, or raises, on each rank."""

    def rank(n):
        hosts = Hosts(SocketLine(address, n, size, timeout), timeout)
        try:
            return work(hosts)
        except RankError as error:
            return error
        finally:
            hosts.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_learns_what_each_has_given(address, size):
    given = [{"rank": n, "text": "ä" * 100_000 * n} for n in range(size)]

    def work(hosts):
        return [hosts.gather(given[hosts.rank]) for _ in range(3)]

    assert together(size, address, work) == [[given] * 3] * size


def test_a_failure_is_told_to_ranks_that_are_not_linked(address):
    def work(hosts):
        if hosts.rank == 2:
            hosts.fail("rank 2 failed: it was told to")
            time.sleep(0.5)
            return None
        try:
            hosts.gather(None)
        except RankError as error:
            hosts.fail(str(error))
            raise

    *others, _ = together(3, address, work)
    assert [str(error) for error in others] == ["rank 2 failed: it was told to"] * 2


def test_who_is_late_is_named_by_all(address):
    def work(hosts):
        if hosts.rank == 1:
            time.sleep(2)
            return None
        try:
            hosts.gather(None)
        except RankError as error:
            hosts.fail(str(error))
            raise

    first, _, last = together(3, address, work, timeout=1.0)
    assert type(first) is RankTimeoutError
    assert str(first) == str(last)
    assert "rank 1 has not come to this call within 1 s" in str(first)


def test_a_process_that_ended_is_named(address):
    """By its connection, long before the time is over."""
    command = [sys.executable, "-c", RANK, address, "1", "2"]
    with subprocess.Popen(command) as process:
        hosts = Hosts(SocketLine(address, 0, 2, 20), 20)
        assert hosts.gather(0) == [0, 1]
        process.wait()
        with pytest.raises(RankError, match="rank 1 is gone: its process has ended"):
            hosts.gather(0)


def test_who_does_not_join_is_named(address):
    with pytest.raises(RankTimeoutError, match="rank 1 has not joined within"):
        SocketLine(address, 0, 3, 0.2)
    with pytest.raises(RankTimeoutError, match="rank 0 does not listen on"):
        SocketLine(address, 1, 3, 0.2)
    with pytest.raises(ArgumentError, match="address is 'nowhere'; it must be 'host:port'"):
        SocketLine("nowhere", 0, 2, 0.2)


def test_whoever_is_no_rank_is_not_taken_in(address):
    host, port = address.split(":")
    with ThreadPoolExecutor(1) as pool:
        root = pool.submit(SocketLine, address, 0, 2, 20)
        for attempt in range(100):
            try:
                stranger = socket.create_connection((host, int(port)))
                break
            except OSError:
                time.sleep(0.01 * attempt)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        other = SocketLine(address, 1, 2, 20)
        assert root.result().links == (1,)
        stranger.close()
        root.result().close()
        other.close()
