"""Attention on several ranks of MPI: the laws of `distributed_laws.py`, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest

RANKS = Path(__file__).with_name("distributed_ranks.py")
EXAMPLE = RANKS.parents[1] / "examples" / "ring_attention.py"
FAILURES = Path(__file__).with_name("distributed_failures.py")
#: What goes wrong on rank 1 of three, and what others then say.
# fmt: off
TOLD = {
    "within-raises":  ("rank 0: RankError: rank 1 failed in ring_attention: MemoryError: no room",
                       "rank 2: RankError: rank 1 failed in ring_attention: MemoryError: no room"),
    "before-late":    ("rank 0: RankTimeoutError: rank 1 has not come to this call within 2 s",
                       "rank 2: RankError: rank 1 has not come to this call within 2 s"),
    "joining-late":   ("rank 0: RankTimeoutError: not all 3 ranks have come to connect within 2 s",
                       "rank 2: RankTimeoutError: not all 3 ranks have come to connect within 2 s"),
    "within-stopped": ("RankTimeoutError: rank 1 has not answered rank ",),
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


def test_the_example_starts_its_own_ranks():
    mpirun.mpiexec()  # or this test is skipped
    command = [sys.executable, str(EXAMPLE), "--cpu", "--seqlen", "50"]
    done = subprocess.run(command, env=mpirun.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in ("rank 0 of 2", "rank 1 of 2"):
        assert f"{rank}: 25 of 50 rows in" in done.stdout


def test_bench_times_all_ranks_beside_one(tmp_path):
    file = tmp_path / "found.json"
    sizes = ["--seqlen", "32", "--head-dim", "8", "--heads", "2", "--batch", "1"]
    more = ["--causal", "causal", "--direction", "both", "--rounds", "1", "--json", str(file)]
    options = ["--distributed", "--backend", "numpy", *sizes, *more]
    done = mpirun.run(2, "-m", "cufa", "bench", *options)
    assert done.returncode == 0, done.stdout
    (row,) = json.loads(file.read_text())["rows"]
    assert list(row["contenders"]) == [
        "one rank",
        "ring of 2",
        "without transfers",
        "heads over 2",
    ]
    assert all(found["median_ms"] > 0 for found in row["contenders"].values())
