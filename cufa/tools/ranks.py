"""`bench --distributed`: attention of all ranks together beside one of them alone.

A time is the longest of all ranks', each from when it has heard that all are ready until its work
is done, on the host's clock; it includes the checks that the ranks make together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cufa
from cufa import distributed
from cufa.distributed import Communicator
from cufa.distributed.communicator import Messages, Pending
from cufa.errors import ArgumentError
from cufa.tools.results import Report, Result
from cufa.tools.rigs import Rig, make_rig, obstacle
from cufa.tools.shapes import positive
from cufa.tools.timing import Figures
from cufa.tools.workloads import Inputs, Workload, draw

#: What a problem is made of, by backend, where the options do not say.
SHAPES = {
    "cupy": {"seqlen": [16384, 65536], "head_dim": [128]},
    "numpy": {"seqlen": [512, 1024], "head_dim": [64]},
}
#: Seconds that the calls of one round are to last.
_ROUND_SECONDS = 0.2
#: Seconds that ranks wait for each other, also while one works alone.
_TIMEOUT = 600
#: Options of bench that have no meaning here.
_OTHERS = ("preset", "peer", "algorithm", "sustained", "seqlen_q")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of bench that are about ranks."""
    add = parser.add_argument
    add("--distributed", action="store_true", help="ring attention of all ranks; under mpiexec")
    add("--address", metavar="HOST:PORT", help="of rank 0, where ranks join without MPI")
    add("--rank", type=int, metavar="N", help="of this process, with --address")
    add("--size", type=positive, metavar="N", help="how many ranks, with --address")


def measure(
    options: argparse.Namespace,
    find: Callable[[argparse.Namespace, Rig], list[Workload]],
) -> Report | None:
    """What all ranks together and one alone take; None on ranks that do not report.

    `find` gives the problems that options name.

    Raises
    ------
    ArgumentError, DeviceError, RankError, RankTimeoutError, UnsupportedError
    """
    for name in _OTHERS:
        if getattr(options, name):
            raise ArgumentError(f"--{name.replace('_', '-')} does not go with --distributed")
    backend = options.backend or ("numpy" if obstacle() else "cupy")
    for name, value in SHAPES[backend].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    joining = {"address": options.address, "rank": options.rank, "size": options.size}
    with distributed.connect(xp=_library(backend), timeout=_TIMEOUT, **joining) as comm:
        rig = make_rig(backend)
        works = find(options, rig)
        facts = {"cufa": cufa.__version__, **rig.facts, "ranks": comm.size}
        report = Report(backend, facts, options.rounds, {})
        with rig.stream():
            for work in works:
                report.results.append(_measure(comm, rig, work, options.rounds))
    return None if comm.rank else report


def _library(backend: str) -> Any:
    if backend == "numpy":
        return np
    from cufa.tools import card

    return card.xp


def _measure(comm: Communicator, rig: Rig, work: Workload, rounds: int) -> Result:
    if work.seqlen_k % (2 * comm.size):
        raise ArgumentError(
            f"--seqlen is {work.seqlen_k}; {comm.size} ranks need a multiple of {2 * comm.size}"
        )
    rows = work.seqlen_k // comm.size
    own = replace(work, seqlen_q=rows, seqlen_k=rows)
    split = {"split": "zigzag" if work.causal else "contiguous"}
    alone = _call(work, draw(rig.xp, work)[0]) if comm.rank == 0 else _nothing
    inputs = draw(rig.xp, own)[0]
    calls = {
        "one rank": alone,
        f"ring of {comm.size}": _call(own, inputs, comm, "ring", **split),
        "without transfers": _call(own, inputs, _WithoutTransfers(comm), "ring", **split),
        f"heads over {comm.size}": _call(own, inputs, comm, "head_parallel", **split),
    }
    found = {name: _time(comm, rig, call, rounds) for name, call in calls.items()}
    rig.release()
    return Result(work, found, frozenset(["one rank"]))


def _nothing() -> None:
    """What other ranks do while one works alone."""


class _WithoutTransfers:
    """A communicator to which what a rank sends comes back: a ring takes as long as its work does,
    with copies on the rank's own device."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def start(self, sends: Messages, receives: Messages) -> Pending:
        for (a, _), (b, _) in zip(sends, receives, strict=True):
            b[...] = a
        return self

    def wait(self) -> None:
        """There is nothing to wait for."""


def _call(
    work: Workload, inputs: Inputs, comm: Any = None, kind: str = "", **split: str
) -> Callable[[], Any]:
    """A call on a rank's rows, or, without a communicator, of the whole on one."""
    forward: Callable[..., Any] = cufa.attention
    backward: Callable[..., Any] = cufa.attention_backward
    if comm is not None:
        forward = partial(getattr(distributed, f"{kind}_attention"), comm)
        backward = partial(getattr(distributed, f"{kind}_attention_backward"), comm)
    q, k, v, _, dout = inputs
    options = {"causal": work.causal, **split}
    if work.direction == "forward":
        return lambda: forward(q, k, v, **options)
    out, lse = forward(q, k, v, return_lse=True, **options)
    if work.direction == "backward":
        return lambda: backward(dout, q, k, v, out, lse, **options)

    def both() -> Any:
        out, lse = forward(q, k, v, return_lse=True, **options)
        return backward(dout, q, k, v, out, lse, **options)

    return both


def _time(comm: Communicator, rig: Rig, call: Callable[[], Any], rounds: int) -> Figures:
    """Of a call that each rank makes, after a first round that does not count."""
    first, _ = _round(comm, rig, call, 1)
    count = max(1, int(_ROUND_SECONDS / max(first, 1e-6)))
    found = [_round(comm, rig, call, count) for _ in range(rounds)]
    done, queued = (np.array(times) / count for times in zip(*found, strict=True))
    return Figures(tuple((1e3 * done).tolist()), tuple((1e6 * queued).tolist()))


def _round(comm: Communicator, rig: Rig, call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of the slowest rank until its work was done, and of the slowest host."""
    rig.finish()
    comm.hosts.gather(None)  # all begin together
    begin = time.perf_counter()
    for _ in range(count):
        call()
    host = time.perf_counter() - begin
    rig.finish()
    seconds = comm.hosts.gather([time.perf_counter() - begin, host])
    return [max(times) for times in zip(*seconds, strict=True)]
