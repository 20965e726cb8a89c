"""A rank of the distributed tests: ``mpiexec -n 4 python tests/distributed_ranks.py [OPTIONS]``.

Rank 0 runs pytest, with these options, on `distributed_laws.py`; the others work for it. On GPUs
the first options say who a process is: ``--gpu ADDRESS ADDRESS RANK SIZE``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from distributed_jobs import Ranks

from cufa import distributed
from cufa.distributed.hosts import Hosts
from cufa.distributed.mpi import MPILine, load
from cufa.distributed.sockets import SocketLine

LAWS = Path(__file__).with_name("distributed_laws.py")


class Plugin:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @pytest.fixture(scope="session")
    def ranks(self) -> Ranks:
        return self._ranks


if __name__ == "__main__":
    options = sys.argv[1:]
    if options[:1] == ["--gpu"]:
        import cupy

        of_arrays, of_texts, *place = options[1:5]
        rank, size = map(int, place)
        options = options[5:]
        comm = distributed.connect(xp=cupy, address=of_arrays, rank=rank, size=size)
        control = Hosts(SocketLine(of_texts, rank, size, 60), 300)
    else:
        comm = distributed.connect(timeout=30)
        control = Hosts(MPILine(load().COMM_WORLD, 300), 300)
    with comm:
        ranks = Ranks(control, comm)
        if comm.rank:
            ranks.serve()
            sys.exit()
        own = ["-n", "0", "-p", "no:cacheprovider", str(LAWS), *options]
        status = pytest.main(own, plugins=[Plugin(ranks)])
        ranks.dismiss()
    sys.exit(status)
