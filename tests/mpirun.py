"""Starts ranks of MPI, as a user does."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import cufa


@cache
def mpiexec() -> list[str]:
    """The launcher of the MPI that mpi4py finds: that of this environment, else of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec: the extra distributed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:  # which else starts no more ranks than there are processors
        return [found, "--oversubscribe"]
    return [found]


def environment() -> dict[str, str]:
    """Of a rank: cufa on the path, one thread for BLAS, and for Open MPI that it may be root."""
    paths = [str(Path(cufa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    as_root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return {**os.environ, **own, **as_root}


def run(ranks: int, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """``mpiexec -n RANKS python ...``; what it printed, both streams in one."""
    return subprocess.run(
        [*mpiexec(), "-n", str(ranks), sys.executable, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
