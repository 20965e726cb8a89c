"""Conformance of wgmma, for every shape and every way in which its operands may lie; and of the
small kernel that has all of Hopper in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import build, linear_attention
from emulator.card import Launch, Runner, load, on_every_machine, skip_unless_card, start
from emulator.linear_attention import Problem
from emulator.run import Access
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

STEPS = 5
K = 16 * STEPS
EPS = float(np.finfo(np.float32).eps)

a_fifth = settings(max_examples=max(1, settings().max_examples // 5))


@dataclass(frozen=True)
class Operand:
    """How a matrix [mn, k] of 16-bit elements lies in shared memory (PTX ISA: strides, canonical
    layouts).

    In slabs as wide as the swizzle: of columns, each with all rows; or, MN-major, transposed.
    """

    mn: int
    swizzle_bytes: int
    mn_major: bool

    @property
    def slab_bytes(self) -> int:
        return (K if self.mn_major else self.mn) * self.swizzle_bytes

    def bytes(self, x: NDArray[Any]) -> NDArray[np.uint8]:
        """What shared memory holds, NaNs where no element is; to a multiple of 1024."""
        width = self.swizzle_bytes // 2
        rows = x.T if self.mn_major else x
        room = np.pad(
            rows.view(np.uint16), [(0, 0), (0, -rows.shape[1] % width)], constant_values=0x7FFF
        )
        slabs = room.reshape(len(rows), -1, width).swapaxes(0, 1)
        chunks = slabs.reshape(-1, len(rows), width // 8, 8)
        row = np.arange(len(rows))[:, None]
        at = np.arange(width // 8) ^ (row % 8 if self.swizzle_bytes == 128 else row // 2 % 4)
        placed = np.empty_like(chunks)
        placed[:, row, at] = chunks
        raw = placed.reshape(-1).view(np.uint8)
        return np.pad(raw, (0, -raw.size % 1024), constant_values=0xFF)

    def starts(self) -> NDArray[np.int32]:
        """At which byte the 16 columns of each step begin."""
        first = 16 * np.arange(STEPS)
        if self.mn_major:
            return (first * self.swizzle_bytes).astype(np.int32)
        width = self.swizzle_bytes // 2
        return (first // width * self.slab_bytes + first % width * 2).astype(np.int32)

    def fields(self, name: str) -> dict[str, int]:
        """Of the descriptor: from slab to slab (unused if K-major), from 8 rows to the next."""
        return {
            f"{name}_leading": self.slab_bytes if self.mn_major else 16,
            f"{name}_stride": 8 * self.swizzle_bytes,
            f"{name}_swizzle": {128: 1, 64: 2}[self.swizzle_bytes],
        }


def lanes(x: NDArray[Any]) -> NDArray[Any]:
    """A matrix of 64 rows as its 128 threads hold it, (128, elements): a warp has 16 rows, a lane
    of rows i / 4 and i / 4 + 8 two columns in every eight, first of the one, then of the other."""
    parts = x.reshape(4, 2, 8, -1, 4, 2)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1, 5)).reshape(128, -1)


def wgmma_launch(
    seed: int, kind: str, dtype: Any, tiles: int, a: Operand, b: Operand, in_registers: bool
) -> tuple[Launch, NDArray[np.float32], NDArray[np.float32]]:
    """A launch, its result, and the sum of the magnitudes of what is summed up in it."""
    rng = np.random.default_rng(seed)
    n = 8 * tiles
    unit = float(ml_dtypes.finfo(dtype).smallest_subnormal) if kind == "denormals" else 1.0
    large = 2.0**40 if kind == "denormals" and dtype != np.float16 else 1.0

    def values(scale: float, *shape: int) -> NDArray[np.float64]:
        x = rng.standard_normal(shape) if kind == "normal" else rng.integers(-7, 8, shape)
        return (x * scale).astype(dtype).astype(np.float64)

    x, y, c = values(unit, 64, K), values(large, n, K), values(1, 64, n) * unit * large
    c = c.astype(np.float32)
    scale_d = (rng.random(STEPS) < 0.8).astype(np.int32)
    d, size = c.astype(np.float64), abs(c).astype(np.float64)
    for step in range(STEPS):
        part = slice(16 * step, 16 * step + 16)
        d = d * scale_d[step] + x[:, part] @ y[:, part].T
        size = size * scale_d[step] + abs(x[:, part]) @ abs(y[:, part]).T

    narrow_a, narrow_b = x.astype(dtype), y.astype(dtype)
    image_a = np.empty(0, np.uint8) if in_registers else a.bytes(narrow_a)
    image = np.concatenate([image_a, b.bytes(narrow_b)])
    registers = lanes(narrow_a.view(np.uint16)).view(np.uint32).reshape(128, STEPS, 4)
    inputs = {
        "image": image,
        "a": np.ascontiguousarray(registers.swapaxes(0, 1)),
        "a_at": a.starts(),
        "b_at": b.starts() + np.int32(image_a.size),
        "scale_d": scale_d,
        "c": lanes(c),
    }
    arrays = {name: (array, Access.READ) for name, array in inputs.items()}
    arrays["d"] = (np.full((128, n // 2), np.nan, np.float32), Access.WRITE_ONCE)
    numbers = {
        "words": image.size // 16,
        "bf16": int(dtype != np.float16),
        "a_in_registers": int(in_registers),
        "trans_a": int(a.mn_major),
        "trans_b": int(b.mn_major),
        **a.fields("a"),
        **b.fields("b"),
    }
    defines = {"TILES": tiles}
    launch = Launch("ptx_wgmma", arrays, numbers, {}, (1,), 128, image.size, defines)
    return launch, lanes(d.astype(np.float32)), lanes(size.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("in_registers", "trans_a", "trans_b"),
    [
        pytest.param(False, False, False, id="ss"),
        pytest.param(False, False, True, id="ss, b transposed"),
        pytest.param(False, True, False, id="ss, a transposed"),
        pytest.param(False, True, True, id="ss, both transposed"),
        pytest.param(True, False, False, id="rs"),
        pytest.param(True, False, True, id="rs, b transposed"),
    ],
)
@on_every_machine
@a_fifth
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["integers", "normal", "denormals"]),
    tiles=st.sampled_from(range(4, 33, 4)),
    swizzles=st.tuples(*[st.sampled_from([64, 128])] * 2),
)
def test_wgmma(
    machine: Runner,
    dtype: Any,
    in_registers: bool,
    trans_a: bool,
    trans_b: bool,
    seed: int,
    kind: str,
    tiles: int,
    swizzles: tuple[int, int],
) -> None:
    """wgmma_m64k16_f16_ss, _f16_rs, _bf16_ss, _bf16_rs, wgmma_fence, _commit_group, _wait_group.

    A sum of integers has no rounding, in whichever order. The ISA leaves open the order of others,
    and their rounding beyond that it is float32's: of the 17 terms of a step each loses at most one
    unit in the last place of the sum of magnitudes. It leaves open denormal operands, too, but
    kernels have weights that are: that cards take them for what they are.
    """
    a = Operand(64, swizzles[0], trans_a)
    # A slab is 64 rows wide: of fewer or of parts of it the canonical layouts know nothing.
    b = Operand(8 * tiles, 64 if trans_b and tiles % 8 else swizzles[1], trans_b)
    launch, expected, size = wgmma_launch(seed, kind, dtype, tiles, a, b, in_registers)
    bound = 17 * STEPS * EPS * size if kind == "normal" else np.float32(0)

    def agree(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
        assert (abs(got - want) <= bound).all()

    machine.check(launch, {"d": expected}, seed, lambda _: agree)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        Problem(),
        Problem(batch=2, kv_heads=2, group=3, seqlen_q=128, seqlen_k=64),
        Problem(seqlen_q=1, seqlen_k=1, seed=1),
        Problem(group=2, seqlen_q=300, seqlen_k=513, seed=2),
    ],
    ids=lambda p: f"{p.batch}x{p.kv_heads * p.group}, {p.seqlen_q} by {p.seqlen_k}",
)
def test_linear_attention_on_a_card(problem: Problem) -> None:
    """linear_attention_sm90 is within rounding of the formula there too, so that it differs from
    the emulator by twice as much at most."""
    skip_unless_card(linear_attention.KERNEL)
    import cupy

    a = problem.arrays()
    held = {name: cupy.asarray(x) for name, x in a.items()}
    maps = {n: linear_attention.map_of(a[n]).encoded(held[n].data.ptr) for n in "qkvo"}
    params = problem.params(maps, held["sums"].data.ptr)
    start(
        load(linear_attention.KERNEL),
        params.view((np.void, params.itemsize)),
        problem.grid,
        linear_attention.THREADS,
        linear_attention.SHARED_BYTES,
    )
    out = {name: cupy.asnumpy(x) for name, x in held.items()}
    linear_attention.assert_right(problem, out)
    if build.obstacle() is None:
        emulated, _ = linear_attention.emulated(problem)
        q, k, v = (abs(a[name].astype(np.float64)) for name in "qkv")
        k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
        size = 4 * float(np.finfo(np.float16).eps) * (q @ k.swapaxes(-1, -2) @ v)
        assert (abs(out["o"].astype(np.float64) - emulated["o"]) <= size).all()
        assert (abs(out["sums"] - emulated["sums"]) <= size.sum(-2)).all()
