"""Attention on several ranks: the laws of `distributed_laws.py`, on ranks of MPI."""

from __future__ import annotations

from pathlib import Path

import mpirun
import pytest

RANKS = Path(__file__).with_name("distributed_ranks.py")
pytestmark = pytest.mark.xdist_group("mpi")  # more ranks at a time than processors would wait


@pytest.mark.parametrize("size", [2, 4])
def test_the_laws_hold_on_so_many_ranks(size, request):
    names = ("hypothesis_profile", "hypothesis_seed")
    given = {name: request.config.getoption(name, None) for name in names}
    options = [
        f"--{n.replace('_', '-')}={value}" for n, value in given.items() if value is not None
    ]
    done = mpirun.run(size, str(RANKS), "-q", *options)
    assert done.returncode == 0, done.stdout
