"""A rank of the distributed tests: ``mpiexec -n 4 python tests/distributed_ranks.py [OPTIONS]``.

Rank 0 runs pytest, with these options, on `distributed_laws.py`; the others work for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from distributed_jobs import Ranks

from cufa import distributed

LAWS = Path(__file__).with_name("distributed_laws.py")


class Plugin:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @pytest.fixture(scope="session")
    def ranks(self) -> Ranks:
        return self._ranks


if __name__ == "__main__":
    with distributed.connect(timeout=300) as control, distributed.connect(timeout=30) as comm:
        ranks = Ranks(control, comm)
        if comm.rank:
            ranks.serve()
            sys.exit()
        own = ["-n", "0", "-p", "no:cacheprovider", str(LAWS), *sys.argv[1:]]
        status = pytest.main(own, plugins=[Plugin(ranks)])
        ranks.dismiss()
    sys.exit(status)
