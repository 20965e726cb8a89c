"""Attention over a sequence that is split over GPUs, or with --cpu over processes of MPI.

    python examples/ring_attention.py                  # a rank for each GPU of this machine
    python examples/ring_attention.py --cpu            # two ranks of MPI, without a GPU
    mpiexec -n 4 python examples/ring_attention.py --cpu
    srun -N 2 --ntasks-per-node 8 python examples/ring_attention.py     # GPUs of two machines

Started by itself it starts its ranks; under mpiexec or srun each process is one. Needs the extra
cuda12 or cuda13 and NCCL (nvidia-nccl-cu12 or -cu13) for GPUs, and the extra distributed for MPI.

Each rank makes its own rows, runs `ring_attention` and its gradients, and holds a few rows of the
result to the formula in float64. It fails if one is further off than rounding explains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cufa import distributed
from cufa.bounds import exact, fractions, to_numpy

#: Set in each process by launchers of MPI: MPICH's and SLURM's, Open MPI's, others' by PMIx.
LAUNCHED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_STEP_ID")
CHECKED_ROWS = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cpu", action="store_true", help="NumPy and MPI")
    add("--ranks", type=int, help="how many to start; default all GPUs, with --cpu 2")
    add("--seqlen", type=int, help="of the whole sequence; default 8192 a GPU, with --cpu 512")
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--address", help=argparse.SUPPRESS)  # how a started rank finds the others
    add("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.address is None and not any(name in os.environ for name in LAUNCHED):
        return start_ranks(options)
    if options.cpu:
        joined = distributed.connect()
    else:
        import cupy

        where = {"address": options.address, "rank": options.rank, "size": options.ranks}
        joined = distributed.connect(xp=cupy, **(where if options.address else {}))
    with joined as comm:
        work(comm, options)
    return 0


def start_ranks(options: argparse.Namespace) -> int:
    """Run this file once for each rank; the first exit status that is not 0."""
    again = [sys.executable, *sys.argv]
    if options.cpu:
        beside = Path(sys.executable).with_name("mpiexec")
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        if mpiexec is None:
            sys.exit("there is no mpiexec; install cufa[distributed], or an MPI of your system")
        return subprocess.call([mpiexec, "-n", str(options.ranks or 2), *again])
    import cupy

    size = options.ranks or cupy.cuda.runtime.getDeviceCount()
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free now
        address = f"127.0.0.1:{server.getsockname()[1]}"
    again += ["--ranks", str(size), "--address", address]
    ranks = [subprocess.Popen([*again, "--rank", str(rank)]) for rank in range(size)]
    return next((status for rank in ranks if (status := rank.wait())), 0)


def work(comm: Any, options: argparse.Namespace) -> None:
    """What each rank does."""
    seqlen = options.seqlen or (512 if options.cpu else 8192 * comm.size)
    q, k, v, dout = whole_arrays(options, seqlen)

    def own(a: Any) -> Any:
        return on_device(distributed.zigzag_split(a, comm.rank, comm.size), options.cpu)

    mine, split = [own(a) for a in (q, k, v)], {"causal": True, "split": "zigzag"}
    out, lse = distributed.ring_attention(comm, *mine, return_lse=True, **split)
    gradients = distributed.ring_attention_backward(comm, own(dout), *mine, out, lse, **split)
    assert np.isfinite(to_numpy(gradients.dk).astype(np.float32)).all()  # and all is done
    begin = time.perf_counter()
    out, lse = distributed.ring_attention(comm, *mine, return_lse=True, **split)
    on_host = to_numpy(out)
    seconds = time.perf_counter() - begin
    places = distributed.zigzag_split(np.arange(seqlen), comm.rank, comm.size, axis=0)
    worst = error(on_host, places, q, k, v)
    print(
        f"rank {comm.rank} of {comm.size}: {len(places)} of {seqlen} rows in {1e3 * seconds:.1f} "
        f"ms; error {worst:.0%} of what rounding explains",
        flush=True,
    )
    assert worst <= 1


def whole_arrays(options: argparse.Namespace, seqlen: int) -> list[Any]:
    """q, k, v and what comes back, of the whole sequence, the same on each rank: a program of your
    own would make each rank's rows alone."""
    rng, dtype = np.random.default_rng(0), np.dtype("float32" if options.cpu else bfloat16())
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shapes = [(n, seqlen, options.head_dim) for n in heads]
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def bfloat16() -> Any:
    """The dtype, which NumPy alone does not know."""
    import ml_dtypes

    return ml_dtypes.bfloat16


def on_device(a: Any, cpu: bool) -> Any:
    """A NumPy array where the ranks work; bfloat16 goes there as integers."""
    if cpu:
        return a
    import cupy

    return cupy.asarray(a.view(np.uint16)).view(a.dtype)


def error(out: Any, places: Any, q: Any, k: Any, v: Any) -> float:
    """The largest error of a few rows, as a fraction of its bound: that of one call for the parts
    that were put together, and that of one for the whole."""
    worst = 0.0
    for row in np.linspace(0, len(places) - 1, min(CHECKED_ROWS, len(places))).astype(int):
        seen = slice(0, places[row] + 1)
        expected = exact(q[:, places[row] : places[row] + 1], k[:, seen], v[:, seen])
        off = fractions(out[:, row : row + 1], expected.out, 2 * expected.out_bound)
        worst = max(worst, float(off.max()))
    return worst


if __name__ == "__main__":
    sys.exit(main())
