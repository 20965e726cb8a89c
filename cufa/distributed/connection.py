"""How a process joins the other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.distributed import mpi
from cufa.distributed.communicator import Communicator
from cufa.distributed.hosts import Hosts, Line
from cufa.distributed.sockets import SocketLine
from cufa.errors import ArgumentError
from cufa.layer_checks import check_library
from cufa.options import plain_integer, plain_number, shown


def connect(
    *,
    xp: Any = np,
    timeout: float = 60.0,
    comm: Any = None,
    address: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    device: int | None = None,
) -> Communicator:
    """Join the other ranks; every rank must call it, with the same arguments but `rank`.

    Without `address` the ranks are those of MPI, however they were started: mpiexec, SLURM. With
    it no MPI is needed; each process is told who it is.

    Parameters
    ----------
    xp : module, default numpy
        numpy: arrays travel by MPI. cupy: by NCCL, each rank with a GPU of its own.
    timeout : float, default 60.0
        Seconds that a rank waits for another in any step, to the join as well, before it raises
        `RankTimeoutError`; ranks other than 0 may take half as long again. Longer than the longest
        step of work.
    comm : mpi4py.MPI.Comm, default None
        The ranks; None: all.
    address : str, default None
        "host:port" on which rank 0 listens, of a trusted network.
    rank, size : int, with `address` only
        This process's number, from 0 on, and how many there are.
    device : int, default None
        For cupy, this rank's GPU, which becomes CuPy's current device. None: the first of the GPUs
        that the process sees for the first rank on its host, and so on.

    Returns
    -------
    Communicator
        A context: leave it by an error, and the other ranks learn of it. It is of no more use after
        a `RankError`, or an error that came while ranks worked together; connect again then.

    Raises
    ------
    ArgumentError, DTypeError
        Arguments that do not fit together.
    DeviceError
        Two ranks have the same GPU.
    RankError, RankTimeoutError
        Another rank fails, or does not come.
    UnsupportedError
        There is no mpi4py, or no NCCL.
    """
    check_library(xp)
    timeout = plain_number("timeout", timeout)
    if not timeout > 0:
        raise ArgumentError(f"timeout is {timeout}; it must be above 0 seconds")
    if address is None:
        for name, value in (("rank", rank), ("size", size)):
            if value is not None:
                raise ArgumentError(f"{name} is {shown(value)} and address is None; MPI says it")
        group = mpi.load().COMM_WORLD if comm is None else comm
        if xp is np:
            return mpi.MPICommunicator(group, timeout)
        return _over_nccl(mpi.MPILine(group, timeout), timeout, device)
    if xp is np:
        raise ArgumentError(
            f"address is {shown(address)} and xp is numpy, whose arrays travel by MPI; leave it out"
        )
    if comm is not None:
        raise ArgumentError(f"address is {shown(address)} and comm is given; leave one of them out")
    size = plain_integer("size", size, 1)
    if not plain_integer("rank", rank, 0) < size:
        raise ArgumentError(f"rank is {rank} and size is {size}; it must be below size")
    return _over_nccl(SocketLine(address, int(rank or 0), size, timeout), timeout, device)


def _over_nccl(line: Line, timeout: float, device: int | None) -> Communicator:
    from cufa.gpu.nccl import NCCLCommunicator  # imports CuPy

    return NCCLCommunicator(Hosts(line, timeout), device)
