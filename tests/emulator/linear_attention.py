"""The launch of kernels/linear_attention_sm90.cu: parameters, arrays, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cufa.gpu.tensor_map import MAP_BYTES, TensorMap
from emulator import build, tensor_map
from emulator.run import FIRST_COME, Access, Counts, Schedule, run

KERNEL = "linear_attention_sm90"
THREADS, SHARED_BYTES, BLOCK_M, HEAD_DIM = 384, 51272, 128, 64
PARAMS = np.dtype(
    [(f"{name}_map", f"V{MAP_BYTES}") for name in "qkvo"]
    + [("sums", "u8")]
    + [(name, "i4") for name in ("heads", "group", "seqlen_q", "seqlen_k")]
    + [("padding", "u1", 40)]
)
Arrays = dict[str, NDArray[np.floating]]


@dataclass(frozen=True)
class Problem:
    """Sizes, and the seed of normal numbers."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    seqlen_q: int = 150
    seqlen_k: int = 200
    seed: int = 0

    @property
    def grid(self) -> tuple[int, int, int]:
        return -(-self.seqlen_q // BLOCK_M), self.kv_heads * self.group, self.batch

    def arrays(self) -> Arrays:
        """Inputs, outputs full of NaN, and sums of 0."""
        rng = np.random.default_rng(self.seed)
        heads = self.kv_heads * self.group

        def normal(heads: int, seqlen: int, scale: float) -> NDArray[np.float16]:
            values = scale * rng.standard_normal((self.batch, heads, seqlen, HEAD_DIM))
            return values.astype(np.float16)

        q = normal(heads, self.seqlen_q, 0.3)
        k, v = normal(self.kv_heads, self.seqlen_k, 0.3), normal(self.kv_heads, self.seqlen_k, 1)
        sums = np.zeros((self.batch, heads, HEAD_DIM), np.float32)
        return {"q": q, "k": k, "v": v, "o": np.full_like(q, np.nan), "sums": sums}

    def params(self, maps: dict[str, bytes], sums: int) -> NDArray[np.void]:
        """The kernel's argument, with the maps of q, k, v and o and the address of sums."""
        p = np.zeros(1, PARAMS)
        for name, encoded in maps.items():
            p[f"{name}_map"] = encoded
        p["sums"], p["heads"], p["group"] = sums, self.kv_heads * self.group, self.group
        p["seqlen_q"], p["seqlen_k"] = self.seqlen_q, self.seqlen_k
        return p


def map_of(a: NDArray[np.floating]) -> TensorMap:
    """Boxes of 64 rows of one head."""
    return tensor_map.of_array(a, (64, 64, 1, 1), 128)


def emulated(
    problem: Problem, schedule: Schedule = FIRST_COME, edit: build.Edit | None = None
) -> tuple[Arrays, Counts]:
    """The arrays after a run in the emulator, and what it did."""
    a = problem.arrays()
    maps = {n: tensor_map.emulated(map_of(a[n]), a[n].ctypes.data) for n in ("q", "k", "v", "o")}
    access = {"o": Access.WRITE_ONCE, "sums": Access.ADD}
    counts = run(
        build.library(build.Unit(KERNEL), edit),
        problem.params(maps, a["sums"].ctypes.data),
        problem.grid,
        THREADS,
        SHARED_BYTES,
        {name: (array, access.get(name, Access.READ)) for name, array in a.items()},
        schedule,
    )
    return a, counts


def assert_right(problem: Problem, a: Arrays) -> None:
    """o and sums are the formula, but for rounding.

    Scores and o are rounded to float16 once each, the sums of products in float32.
    """
    q, k, v = (a[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2)
    exact, size = scores @ v, abs(scores) @ abs(v)
    unit = float(np.finfo(np.float16).eps)
    assert (abs(a["o"] - exact) <= unit * (size + abs(exact))).all()
    assert (abs(a["sums"] - exact.sum(-2)) <= unit * size.sum(-2)).all()
