"""Arrays between ranks by NCCL; on paper, so without a GPU. On GPUs: test_distributed_gpu.py."""

from __future__ import annotations

import importlib
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_nccl import PaperNccl, array

from cufa import gpu
from cufa.distributed.hosts import Hosts
from cufa.distributed.sockets import SocketLine
from cufa.errors import DeviceError, RankError, RankTimeoutError
from cufa.testing import FLOATS, numpy_dtype

SIZE = 3


class Cards:
    """Runs something on ranks that are threads of this process."""

    def __init__(self, patch):
        self.paper = PaperNccl(SIZE)
        cupy = self.paper.cupy()
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        patch.delitem(sys.modules, "cufa.gpu.nccl", raising=False)
        self._nccl = importlib.import_module("cufa.gpu.nccl")
        patch.setitem(sys.modules, "cufa.gpu.nccl", self._nccl)
        patch.setattr(gpu, "nccl", self._nccl, raising=False)

    def __call__(self, work, device=None, timeout=20.0):
        """What `work` gives, or raises, on each rank."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"

        def rank(n):
            try:
                hosts = Hosts(SocketLine(address, n, SIZE, 20), timeout)
                with self._nccl.NCCLCommunicator(hosts, device) as comm:
                    return work(comm)
            except Exception as error:
                return error

        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(rank, range(SIZE)))


@pytest.fixture
def cards():
    with pytest.MonkeyPatch.context() as patch:
        yield Cards(patch)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=SIZE, max_size=SIZE),
    dtype=st.sampled_from(FLOATS),
)
def test_what_goes_round_the_ring_comes_from_the_rank_before(lengths, dtype):
    def work(comm):
        before, after = (comm.rank - 1) % SIZE, (comm.rank + 1) % SIZE
        mine = array(np.full(lengths[comm.rank], comm.rank, numpy_dtype(dtype)))
        theirs = array(np.full(lengths[before], -1, mine.dtype))
        comm.start([(mine, after)], [(theirs, before)])
        comm.settle()
        return bool((theirs == before).all())

    with pytest.MonkeyPatch.context() as patch:
        cards = Cards(patch)
        assert cards(work) == [True] * SIZE
        assert cards.paper.ended == dict.fromkeys(range(SIZE), "destroyed")


def test_a_transfer_waits_for_the_work_before_it_and_what_follows_waits_for_it(cards):
    def work(comm):
        stream = cards.paper.current_stream()
        a, sums, found = array(np.zeros(2, "float32")), array(np.ones(2)), []
        b = array(a)
        stream.launch(lambda: a.fill(comm.rank))  # is done later, as on a GPU
        transfer = comm.start([(a, (comm.rank + 1) % SIZE)], [(b, (comm.rank - 1) % SIZE)])
        total = comm.all_reduce(sums)
        transfer.wait()
        total.wait()
        stream.launch(lambda: found.append((b.tolist(), sums.tolist())))
        comm.settle()
        stream.run()
        return found

    assert cards(work) == [[([float((n - 1) % SIZE)] * 2, [SIZE] * 2)] for n in range(SIZE)]


def test_work_that_is_launched_after_a_transfer_leaves_it_the_first_place(cards):
    """NCCL's kernel must come before those of attention, if it could begin."""

    def work(comm):
        stream, order = cards.paper.current_stream(), []
        stream.launch(lambda: order.append("before"))
        comm.start([], [])
        comm.stream.launch(lambda: order.append("transfer"))
        stream.launch(lambda: order.append("after"))
        stream.run()
        comm.stream.run()
        return order

    assert cards(work) == [["before", "transfer", "after"]] * SIZE


def test_arrays_are_let_go_once_their_transfer_is_waited_for_and_another_begins(cards):
    def work(comm):
        kept = []
        for in_use in (True, False, True):
            a = array(np.zeros(1))
            before, after = (comm.rank - 1) % SIZE, (comm.rank + 1) % SIZE
            transfer = comm.start([(a, after)], [(array(a), before)])
            kept.append(len(comm._unsettled))
            if in_use:
                transfer.wait()
        return kept

    assert cards(work) == [[1, 1, 2]] * SIZE


def test_who_never_answers_is_an_error_and_the_transfer_is_aborted(cards):
    def work(comm):
        if comm.rank == 1:
            comm.hosts.gather(None)  # does not send
        comm.start([], [(array(np.zeros(1)), 1)]).wait()
        comm.settle()

    first, late, last = cards(work, timeout=1.0)
    assert {type(first), type(late), type(last)} == {RankError, RankTimeoutError}
    for error in (first, late, last):
        assert "a transfer with rank 1 is not done on rank" in str(error)
        assert "within 1 s (timeout=)" in str(error)
    assert cards.paper.ended == dict.fromkeys(range(SIZE), "aborted")


def test_two_ranks_with_one_card_are_told(cards):
    for error in cards(lambda comm: None, device=1):
        assert type(error) is DeviceError
        assert "ranks 0 and 1 have the same GPU, 0000:01:00.0 of" in str(error)
