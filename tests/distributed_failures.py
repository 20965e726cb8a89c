"""A rank of a job that goes wrong: ``mpiexec -n 3 python tests/distributed_failures.py WHICH``.

WHICH is where it goes wrong, "joining" (with MPI), "before" or "within" a call, and how, as in
`ACTIONS`: "within-raises". Rank 1 is the one to blame; the others say what they are told. On GPUs
``ADDRESS RANK SIZE`` follow.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from cufa import distributed
from cufa.distributed import ring

#: Seconds that ranks wait, and that rank 1 is late.
TIMEOUT, LATE = 2.0, 5.0


def within_a_call(action):
    """Have rank 1 do something in the middle of the work, when others wait for it."""
    attention = ring.attention

    def attend(*arrays, **options):
        action()
        return attention(*arrays, **options)

    ring.attention = attend


def out_of_memory():
    raise MemoryError("no room for this test")


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def late():
    time.sleep(LATE)


ACTIONS = {"raises": out_of_memory, "late": late, "stopped": stop, "killed": kill}

if __name__ == "__main__":
    which, *place = sys.argv[1:]
    when, action = which.split("-")
    joining, xp = {}, np
    if place:
        import cupy as xp

        joining = {"xp": xp, "address": place[0], "rank": int(place[1]), "size": int(place[2])}
    with distributed.connect(**joining) as comm:
        q, k, v = xp.ones((3, 2, 8, 16))
        distributed.ring_attention(comm, q, k, v)  # all have started, and it works
        comm.hosts.timeout = TIMEOUT
        if comm.rank == 1:
            if when == "within":
                within_a_call(ACTIONS[action])
            else:
                ACTIONS[action]()
        try:
            if when == "joining":
                distributed.connect(timeout=TIMEOUT)
            for _ in range(2):  # who has got all it needed learns of it in the next call
                distributed.ring_attention(comm, q, k, v)
        except Exception as error:
            print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
            raise
