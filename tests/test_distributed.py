"""Attention on several ranks: the laws of `distributed_laws.py`, on ranks of MPI."""

from __future__ import annotations

from pathlib import Path

import mpirun
import pytest

RANKS = Path(__file__).with_name("distributed_ranks.py")
FAILURES = Path(__file__).with_name("distributed_failures.py")
#: What goes wrong on rank 1 of three, and what others then say.
# fmt: off
TOLD = {
    "within-raises":  ("rank 0: RankError: rank 1 failed in ring_attention: MemoryError: no room",
                       "rank 2: RankError: rank 1 failed in ring_attention: MemoryError: no room"),
    "before-late":    ("rank 0: RankTimeoutError: rank 1 has not come to this call within 1 s",
                       "rank 2: RankError: rank 1 has not come to this call within 1 s"),
    "within-stopped": ("rank 2: RankTimeoutError: rank 1 has not answered rank 2 within 1 s",),
    "within-killed":  (),
}
# fmt: on
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


@pytest.mark.parametrize("what", TOLD)
def test_a_rank_that_fails_or_is_late_ends_the_others_too(what):
    """And soon: mpiexec returns, whatever becomes of rank 1."""
    done = mpirun.run(3, str(FAILURES), what, timeout=60)
    assert done.returncode != 0
    for line in TOLD[what]:
        assert line in done.stdout
