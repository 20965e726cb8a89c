"""Attention on ranks with GPUs: a process for each, on as many as there are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import cufa

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parent
EXAMPLE = TESTS.parent / "examples" / "ring_attention.py"


@pytest.fixture
def gpus(cupy):
    """How many ranks can have a GPU each."""
    from cupy.cuda import nccl  # no attribute of cupy.cuda until it is imported

    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    return cupy.cuda.runtime.getDeviceCount()


def free_addresses(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()
    return found


def run(script, first, *rest, size, addresses=1):
    """What each of `size` ranks printed, and its exit status, of a script that is called with FIRST
    ADDRESS... RANK SIZE REST."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cufa.__file__).parents[1])}
    command = [sys.executable, str(TESTS / script), first, *free_addresses(addresses)]
    ranks = [
        subprocess.Popen(
            [*command, str(n), str(size), *rest],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(size)
    ]
    try:
        return [(rank.communicate(timeout=600)[0], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def needs(gpus, size):
    if gpus < size:
        pytest.skip(f"needs {size} GPUs; there are {gpus}")


@pytest.mark.parametrize("size", [1, "all"])
def test_the_laws_hold_on_so_many_gpus(gpus, size):
    if size == "all":
        needs(gpus, 2)
        size = gpus
    for printed, status in run("distributed_ranks.py", "--gpu", "-q", size=size, addresses=2):
        assert status == 0, printed


@pytest.mark.parametrize("failure", ["within-raises", "before-late", "within-killed"])
def test_a_rank_that_fails_or_is_late_ends_the_others_too(gpus, failure):
    needs(gpus, 2)
    (printed, status), _ = run("distributed_failures.py", failure, size=2)
    assert status != 0
    told = {
        "within-raises": "RankError: rank 1 failed in ring_attention: MemoryError",
        "before-late": "RankTimeoutError: rank 1 has not come to this call within 2 s",
        "within-killed": "RankError: rank 1 is gone: its process has ended",
    }
    assert told[failure] in printed


def test_one_rank_sends_to_itself(cupy, gpus):
    from cufa import distributed

    (address,) = free_addresses(1)
    with distributed.connect(xp=cupy, address=address, rank=0, size=1) as comm:
        a, b = cupy.arange(1000.0), cupy.zeros(1000)
        comm.start([(a, 0)], [(b, 0)]).wait()
        comm.all_reduce(b).wait()
        assert (a == b).all()


def test_the_example_runs_on_all_gpus(gpus):
    needs(gpus, 2)
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of what rounding explains") == gpus
