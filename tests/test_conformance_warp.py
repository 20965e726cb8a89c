"""Conformance of what threads of a block do together: barriers, matrices of a warp, cp.async."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.card import Launch, Runner, on_every_machine
from emulator.run import Access
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

seeds = st.integers(0, 2**32 - 1)
a_quarter = settings(max_examples=max(1, settings().max_examples // 4))


def random_words(rng: np.random.Generator, *shape: int) -> NDArray[np.uint32]:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def inputs(**arrays: NDArray[Any]) -> dict[str, tuple[NDArray[Any], Access]]:
    return {name: (a, Access.READ) for name, a in arrays.items()}


def outputs(expected: dict[str, NDArray[Any]]) -> dict[str, tuple[NDArray[Any], Access]]:
    """Places for them, full of something else."""
    return {
        name: ((~a.view(f"u{a.itemsize}")).view(a.dtype), Access.WRITE_ONCE)
        for name, a in expected.items()
    }


@on_every_machine
@a_quarter
@given(seeds, st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 5))
def test_barriers_and_thread_numbers(
    machine: Runner, seed: int, grid: tuple[int, int, int], rounds: int
) -> None:
    """bar_sync, bar_red_or, bar_arrive, bar_warp_sync; tid_x, ctaid_x, ctaid_y, ctaid_z, nctaid_x;
    smem_address."""
    blocks = int(np.prod(grid))
    x = np.random.default_rng(seed).standard_normal((blocks, rounds, 128)).astype(np.float32)
    z, y, x_ = np.unravel_index(np.arange(blocks)[:, None], grid[::-1])
    tid = np.broadcast_to(np.arange(256), (blocks, 256))
    columns = np.broadcast_arrays(tid, x_, y, z, grid[0], 4 * tid, 0)
    expected = {
        "who": np.stack(columns, -1).astype(np.int32),
        "of_warp": (tid // 32 * 32 + (tid + 1) % 32).astype(np.int32),
        "of_block": (255 - tid).astype(np.int32),
        "handed": np.ascontiguousarray(x[..., ::-1]),
        "any_above_2": np.repeat((x > 2).any(-1), 256, -1).reshape(blocks, rounds, 256),
    }
    expected["any_above_2"] = expected["any_above_2"].astype(np.int32)
    halves = (x.reshape(blocks, rounds, 2, 64) > 1).any(-1)
    expected["of_half_above_1"] = np.repeat(halves, 128, -1).astype(np.int32)
    numbers = {"grid_x": grid[0], "grid_y": grid[1], "rounds": rounds}
    arrays = inputs(x=x) | outputs(expected)
    machine.check(Launch("ptx_barrier", arrays, numbers, {}, grid, 256, 1024), expected, seed)


@on_every_machine
@a_quarter
@given(seeds, st.integers(1, 9), st.integers(0, 3000), st.data())
def test_atom_inc_hands_out_every_number_in_turn(
    machine: Runner, seed: int, blocks: int, last: int, data: Any
) -> None:
    """To whom which, nobody knows. A count that is above the last goes on with 0."""
    counts = [data.draw(st.integers(0, last) | st.just(last + 7))]
    for _ in range(128 * blocks):
        counts.append(0 if counts[-1] >= last else counts[-1] + 1)
    before = np.array(counts[:-1], np.uint32).reshape(blocks, 128)
    expected = {"count": np.array(counts[-1:], np.uint32), "before": before}
    arrays = {"count": (np.array(counts[:1], np.uint32), Access.ADD)}
    arrays |= outputs({"before": before})

    def agree(name: str) -> Any:
        def in_any_order(got: NDArray[np.uint32], want: NDArray[np.uint32]) -> None:
            np.testing.assert_array_equal(np.sort(got, None), np.sort(want, None))

        return in_any_order

    launch = Launch("ptx_atom", arrays, {"last": last}, grid=(blocks,))
    machine.check(launch, expected, seed, agree)


@on_every_machine
@a_quarter
@given(seeds, st.integers(1, 9))
def test_red_add_sums_in_any_order(machine: Runner, seed: int, blocks: int) -> None:
    """Whole numbers, whose sums have no rounding."""
    random = np.random.default_rng(seed)
    x, first = random.integers(-1000, 1000, (blocks, 128)), random.integers(-1000, 1000, 32)
    sums = first + x.reshape(-1, 32).sum(0)
    floats = {"32": np.float32, "64": np.float64}
    arrays = inputs(**{f"x{size}": x.astype(dtype) for size, dtype in floats.items()})
    arrays |= {f"sums{n}": (first.astype(dtype), Access.ADD) for n, dtype in floats.items()}
    expected = {f"sums{size}": sums.astype(dtype) for size, dtype in floats.items()}
    machine.check(Launch("ptx_red", arrays, grid=(blocks,)), expected, seed)


@on_every_machine
@a_quarter
@given(seeds, st.integers(1, 9))
def test_red_add_of_vectors_adds_each_number_to_its_own(
    machine: Runner, seed: int, blocks: int
) -> None:
    """red_add_v2, red_add_v4."""
    random = np.random.default_rng(seed)
    x = random.integers(-1000, 1000, (blocks, 128, 4)).astype(np.float32)
    first = random.integers(-1000, 1000, (32, 4)).astype(np.float32)
    sums = first + x.reshape(-1, 32, 4).sum(0)
    expected = {f"sums_v{n}": np.ascontiguousarray(sums[:, :n]) for n in (2, 4)}
    begin = {f"sums_v{n}": np.ascontiguousarray(first[:, :n]) for n in (2, 4)}
    arrays = inputs(x=x) | {name: (a, Access.ADD) for name, a in begin.items()}
    machine.check(Launch("ptx_red_vector", arrays, grid=(blocks,)), expected, seed)


@on_every_machine
@given(seeds)
@settings(max_examples=2)
def test_red_add_takes_float32_denormals_for_zero(machine: Runner, seed: int) -> None:
    """And keeps those of float64."""
    x32, x64 = np.zeros((1, 128), np.float32), np.zeros((1, 128))
    x32[0, :32], x64[0, :32] = 1e-40, 1e-310
    sums = {"sums32": np.zeros(32, np.float32), "sums64": np.zeros(32)}
    arrays = inputs(x32=x32, x64=x64) | {name: (a, Access.ADD) for name, a in sums.items()}
    expected = {"sums32": sums["sums32"], "sums64": np.full(32, 1e-310)}
    machine.check(Launch("ptx_red", arrays), expected, seed)


def of_matrices(x: NDArray[np.uint16], trans: bool) -> NDArray[np.uint32]:
    """What each lane holds of 8 x 8 matrices [..., 4, 8, 8]: pairs [..., 32, 4]. Lane i has row
    i / 4, columns i % 4 * 2 and the next; or, transposed, the same of the columns."""
    x = x.swapaxes(-1, -2) if trans else x
    pairs = np.ascontiguousarray(x).view(np.uint32).reshape(*x.shape[:-3], 4, 32)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2))


@on_every_machine
@a_quarter
@given(seeds)
def test_ldmatrix(machine: Runner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = random_words(rng, 1024)
    rows = 16 * rng.integers(0, 256, 128, dtype=np.int32)
    x = image.view(np.uint16).reshape(256, 8)[rows // 16].reshape(4, 4, 8, 8)
    expected = {
        "ldmatrix_x4": of_matrices(x, False).reshape(128, 4),
        "ldmatrix_x4_trans": of_matrices(x, True).reshape(128, 4),
    }
    arrays = inputs(image=image, rows=rows) | outputs(expected)
    launch = Launch("ptx_ldmatrix", arrays, {"words": 1024}, shared_bytes=4096)
    machine.check(launch, expected, seed)


@pytest.mark.parametrize("trans", [False, True], ids=["stmatrix_x4", "stmatrix_x4_trans"])
@on_every_machine
@a_quarter
@given(seeds)
def test_stmatrix(machine: Runner, trans: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = random_words(rng, 512)
    rows = 16 * rng.permutation(128).astype(np.int32)
    x = image.view(np.uint16).reshape(128, 8)[rows // 16].reshape(4, 4, 8, 8)
    arrays = inputs(registers=of_matrices(x, trans), rows=rows) | outputs({"image": image})
    launch = Launch("ptx_stmatrix", arrays, {"trans": int(trans)}, shared_bytes=2048)
    machine.check(launch, {"image": image}, seed)


def fragment(x: NDArray[Any]) -> NDArray[np.uint32]:
    """Pairs of columns [..., 8 rows, 8 columns] or, of B, of rows, as ldmatrix has them."""
    return of_matrices(np.ascontiguousarray(x).view(np.uint16), False)


@pytest.mark.parametrize("kind", ["integers", "normal", "denormals"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@on_every_machine
@a_quarter
@given(seeds, st.integers(1, 3), st.integers(0, 5))
def test_mma(machine: Runner, dtype: Any, kind: str, seed: int, warps: int, steps: int) -> None:
    """mma_m16n8k16_f16, mma_m16n8k16_bf16.

    A sum of integers has no rounding, in whichever order. The ISA leaves open the order of others,
    and their rounding beyond that it is float32's: of the 17 terms of a step each loses at most one
    unit in the last place of the sum of magnitudes. It leaves open denormal operands, too, but
    kernels have weights that are: that cards take them for what they are.
    """
    rng = np.random.default_rng(seed)
    unit = float(ml_dtypes.finfo(dtype).smallest_subnormal) if kind == "denormals" else 1.0
    large = 2.0**40 if kind == "denormals" and dtype != np.float16 else 1.0

    def values(scale: float, *shape: int) -> NDArray[np.float64]:
        x = rng.standard_normal(shape) if kind == "normal" else rng.integers(-7, 8, shape)
        return (x * scale).astype(dtype).astype(np.float64)

    a, b = values(unit, steps, warps, 16, 16), values(large, steps, warps, 16, 8)
    c = (values(1, warps, 16, 8) * unit * large).astype(np.float32)
    d, size = (f(c) + (f(a) @ f(b)).sum(0) for f in (np.float64, abs))

    # The four 8 x 8 quarters of A: rows first; B as its columns, in two halves
    quarters = a.reshape(steps, warps, 2, 8, 2, 8).transpose(0, 1, 4, 2, 3, 5)
    halves = b.swapaxes(-1, -2).reshape(steps, warps, 8, 2, 8).swapaxes(2, 3)
    a_lanes = fragment(quarters.reshape(steps, warps, 4, 8, 8).astype(dtype))
    b_lanes = fragment(np.concatenate([halves, halves], 2).astype(dtype))[..., :2]

    def lanes(x: NDArray[Any]) -> NDArray[np.float32]:
        """Lane i has of rows i / 4 and i / 4 + 8 two columns."""
        parts = x.astype(np.float32).reshape(warps, 2, 8, 4, 2)
        return np.ascontiguousarray(parts.transpose(0, 2, 3, 1, 4)).reshape(-1, 4)

    eps = float(np.finfo(np.float32).eps)
    bound = 17 * steps * eps * lanes(size) if kind == "normal" else np.float32(0)

    def agree(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
        assert (abs(got - want) <= bound).all()

    threads = 32 * warps
    expected = {"d": lanes(d)}
    arrays = inputs(
        a=a_lanes.reshape(steps, threads, 4),
        b=np.ascontiguousarray(b_lanes).reshape(steps, threads, 2),
        c=lanes(c),
    )
    numbers = {"steps": steps, "threads": threads, "bf16": int(dtype != np.float16)}
    launch = Launch("ptx_mma", arrays | outputs(expected), numbers, threads=threads)
    machine.check(launch, expected, seed, lambda _: agree)


@pytest.mark.parametrize("kind", ["integers", "normal", "denormals"])
@on_every_machine
@a_quarter
@given(seeds, st.integers(1, 3), st.integers(0, 5))
def test_mma_of_wide_numbers(machine: Runner, kind: str, seed: int, warps: int, steps: int) -> None:
    """mma_m16n8k8_tf32, mma_m16n8k8_f64, mma_m8n8k4_f64; ld_shared_v4_f32, ld_shared_v2_f64.

    The ISA leaves the order of a sum open, and of TF32 the rounding: each term loses at most one
    unit in the last place of the sum of magnitudes. TF32 has ten bits after the leading one; those
    below are cut off. That denormal operands are taken for what they are the ISA leaves open, too.
    """
    rng = np.random.default_rng(seed)
    unit, large = (2.0**-136, 2.0**120) if kind == "denormals" else (1.0, 1.0)

    def values(scale: float, *shape: int) -> NDArray[np.float64]:
        x = rng.standard_normal(shape) if kind == "normal" else rng.integers(-7, 8, shape)
        return x * scale

    threads = 32 * warps
    # Each lane's numbers: a [row half, k half], b [k half], c [row half, column]
    a, b = values(unit, 2, 2, steps, warps, 8, 4), values(large, 2, steps, warps, 8, 4)
    c = values(unit * large, warps, 16, 8)

    def lanes(x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lane i has of rows i / 4 and i / 4 + 8 two columns."""
        parts = x.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(parts).reshape(threads, 4)

    def product(f: Any, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        by_row = np.concatenate([np.concatenate(list(half), -1) for half in a], -2)  # 16 x 8
        by_column = np.concatenate(list(b), -1).swapaxes(-1, -2)  # 8 x 8
        return (f(by_row) @ f(by_column)).sum(0)

    def results(f: Any) -> dict[str, NDArray[np.float64]]:
        """All three, of the numbers or of their magnitudes."""
        halves = [(f(a[0, k]) @ f(b[k]).swapaxes(-1, -2)).sum(0) for k in range(2)]
        single = f(c.astype(np.float32).astype(np.float64))
        return {
            "f64_m16n8k8": lanes(f(c) + product(f, a, b)),
            "f64_m8n8k4": lanes(f(c) + np.concatenate(halves, -2)),
            "tf32_m16n8k8": lanes(single + product(f, cut(a), cut(b))),
        }

    def cut(x: NDArray[np.float64]) -> NDArray[np.float64]:
        bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)

    expected, size = results(np.asarray), results(abs)
    expected["tf32_m16n8k8"] = expected["tf32_m16n8k8"].astype(np.float32)

    def agree(name: str) -> Any:
        def within(got: NDArray[Any], want: NDArray[Any]) -> None:
            eps = float(np.finfo(want.dtype).eps) if kind == "normal" else 0.0
            assert (abs(got.astype(np.float64) - want) <= 9 * steps * eps * size[name]).all()

        return within

    # The order of registers: row halves first
    a_lanes = np.ascontiguousarray(a.transpose(2, 3, 4, 5, 1, 0).reshape(steps, threads, 4))
    b_lanes = np.ascontiguousarray(b.transpose(1, 2, 3, 4, 0).reshape(steps, threads, 2))
    arrays = inputs(
        a=a_lanes,
        b=b_lanes,
        c=lanes(c),
        a_single=a_lanes.astype(np.float32),
        b_single=b_lanes.astype(np.float32),
    )
    numbers = {"steps": steps, "threads": threads}
    arrays |= outputs(expected)
    launch = Launch("ptx_mma_wide", arrays, numbers, threads=threads, shared_bytes=48 * threads)
    machine.check(launch, expected, seed, agree)


@on_every_machine
@a_quarter
@given(seeds)
def test_cp_async_with_any_number_of_bytes(machine: Runner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = random_words(rng, 4, 64, 4)
    src_bytes = rng.permuted(np.resize(np.arange(17, dtype=np.int32), (4, 64)))
    landed = source.view(np.uint8) * (np.arange(16) < src_bytes[..., None])
    own = landed.astype(np.uint8).view(np.uint32)
    expected = {"own": own, "others": np.ascontiguousarray(own[:, ::-1])}
    arrays = inputs(source=source, src_bytes=src_bytes) | outputs(expected)
    launch = Launch("ptx_cp_async", arrays, threads=64, shared_bytes=4096)
    machine.check(launch, expected, seed)


@on_every_machine
@a_quarter
@given(seeds)
def test_elect_sync_and_setmaxnreg(machine: Runner, seed: int) -> None:
    """Whose lane is elected, the ISA leaves open."""
    x = random_words(np.random.default_rng(seed), 384)
    expected = {"elected": np.zeros((384, 2), np.uint32), "kept": x}

    def agree(name: str) -> Any:
        def elected(got: NDArray[np.uint32], _: NDArray[np.uint32]) -> None:
            np.testing.assert_array_equal(got[:, 0], got[:, 1])
            np.testing.assert_array_equal(got[:, 0].reshape(12, 32).sum(1), 1)

        return elected if name == "elected" else np.testing.assert_array_equal

    arrays = inputs(x=x) | outputs(expected)
    machine.check(Launch("ptx_warpgroup", arrays, threads=384), expected, seed, agree)
