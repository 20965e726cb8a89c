"""The functions of kernels/ptx/ in the emulator, on a card, and in NumPy as the PTX ISA has them:
all agree, to the bit where the ISA fixes bits.

Here: that all are tested, that the test kernels compile, and what makes one value of one or two.
test_conformance_*.py have the others.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.build import HERE
from emulator.card import ARCHS, Agree, Launch, Runner, compile_for, on_every_machine, same_bits
from emulator.run import Access
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cufa.gpu import build

BFLOAT16 = ml_dtypes.bfloat16
N = 256
F32 = np.finfo(np.float32)

seeds = st.integers(0, 2**32 - 1)
a_quarter = settings(max_examples=max(1, settings().max_examples // 4))


def test_every_function_is_called_by_a_test_kernel() -> None:
    kernels = "".join(path.read_text() for path in (HERE / "kernels").glob("*.cu"))
    for header in sorted((build.KERNELS / "ptx").glob("*.cuh")):
        names = set(re.findall(r"DEVICE [\w ]+?[ *](\w+)\(", header.read_text()))
        assert names, header.name
        assert not {name for name in names if not re.search(rf"ptx::{name}\b", kernels)}


def test_every_test_kernel_is_listed() -> None:
    assert {path.stem for path in (HERE / "kernels").glob("*.cu")} == ARCHS.keys()


@pytest.mark.parametrize("change", [np.transpose, lambda a: a[:, ::2]])
def test_a_launch_refuses_what_does_not_lie_as_its_kernel_takes_it(change) -> None:
    """On a card too, where such an array could not be copied as it is."""
    arrays = {"in": (change(np.zeros((2, 4), np.uint32)), Access.READ)}
    with pytest.raises(ValueError, match=r"in of dropout has shape .* and strides .*C-contiguous"):
        Launch("dropout", arrays)


@pytest.mark.parametrize(
    ("kernel", "defines"),
    [
        *((kernel, ()) for kernel in ARCHS if kernel != "ptx_wgmma"),
        *(("ptx_wgmma", (("TILES", tiles),)) for tiles in range(32, 0, -4)),
    ],
)
def test_a_test_kernel_compiles_without_spills_or_warnings_of_the_assembler(
    kernel: str, defines: tuple[tuple[str, int], ...]
) -> None:
    code, log = compile_for(ARCHS[kernel], kernel, defines)
    assert code.startswith(b"\x7fELF")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, f"no report:\n{log}"
    assert not any(spills), log
    assert not re.search(r"\bC7\d\d\d\b", log), log


def mixed(rng: np.random.Generator, pools: list[Any], dtype: Any) -> NDArray[Any]:
    """N bit patterns, each from any of the pools."""
    made = np.stack([rng.choice(np.ravel(pool).astype(dtype), N) for pool in pools])
    return made[rng.integers(len(pools), size=N), np.arange(N)]


def around(x: NDArray[Any]) -> NDArray[Any]:
    """The numbers, and their neighbours on both sides."""
    inf = x.dtype.type(np.inf)
    return np.concatenate([x, np.nextafter(x, inf), np.nextafter(x, -inf)])


def singles(rng: np.random.Generator) -> NDArray[np.float32]:
    """Any float32: NaNs with all payloads, infinities, denormals, extremes, and about all that is
    half-way between two 16-bit floats."""
    half = rng.integers(0, 0x7C00, N, dtype=np.uint16)  # finite, positive
    halfway = (half.view(np.float16) + (half + 1).view(np.float16).astype(np.float32)) / 2
    overflow = np.float32([65504, 65520, 65536, F32.max, np.inf])
    brain = (rng.integers(0, 1 << 16, N, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    tiny = np.float32([0, 1, 2**-24, 2**-25, 2**-14, F32.tiny, F32.smallest_subnormal])
    payloads = 0x7F800000 + 2 ** np.arange(23, dtype=np.uint32)
    with np.errstate(all="ignore"):
        edges = around(np.concatenate([halfway, brain, overflow, tiny])).view(np.uint32)
    exponents = rng.uniform(-152, 130, N).astype(np.float32).view(np.uint32)
    denormal = rng.integers(0, 1 << 23, N)
    anything = rng.integers(0, 1 << 32, N)
    few = np.concatenate([payloads, around(tiny).view(np.uint32), overflow.view(np.uint32)])
    bits = mixed(rng, [edges, exponents, denormal, anything, few], np.uint32)
    return (bits ^ rng.choice(np.uint32([0, 1 << 31]), N)).view(np.float32)


def doubles(rng: np.random.Generator) -> NDArray[np.float64]:
    """Any float64, and many whose place is about a float32."""
    with np.errstate(all="ignore"):
        near = around(singles(rng).astype(np.float64))
    scaled = rng.standard_normal(N) * 2.0 ** rng.integers(-155, 130, N)
    anything = rng.integers(0, 1 << 64, N, dtype=np.uint64)
    payloads = 0x7FF0000000000000 + 2 ** np.arange(52, dtype=np.uint64)
    pools = [near.view(np.uint64), scaled.view(np.uint64), anything, payloads]
    return mixed(rng, pools, np.uint64).view(np.float64)


def narrowed(x: NDArray[np.float32], dtype: Any) -> NDArray[np.uint16]:
    """Bits of the nearest 16-bit floats. The ISA says of a NaN that it stays one; cuda_fp16.hpp and
    cuda_bf16.hpp say which."""
    with np.errstate(all="ignore"):
        bits = x.astype(dtype).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def truncated(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """The float32 next to each number on the side of 0."""
    _, exponent = np.frexp(x)  # 0.5 <= |fraction| < 1
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
    with np.errstate(all="ignore"):
        cut = np.clip(np.trunc(x / unit) * unit, -F32.max, F32.max)
        return np.where(np.isinf(x), x, cut).astype(np.float32)


def same_numbers(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bits but of NaNs: which one comes, the ISA leaves open."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    same_bits(got[~np.isnan(got)], want[~np.isnan(want)])


def within_units(n: int) -> Agree:
    """n ulp are n 2^-23 at most, and the emulator itself rounds. What would be a denormal is 0."""

    def within(got: NDArray[np.float32], want: NDArray[np.floating]) -> None:
        size, bound = abs(want.astype(np.float64)), n * 2.0**-23 + 2.0**-24
        least = np.where(size == np.inf, F32.max, size) * (1 - bound)
        most = np.where(size == 0, F32.tiny, size) * (1 + bound)
        least = np.where(least < F32.tiny, 0, least)
        most = np.where(most > F32.max, np.inf, most)
        near = (least <= abs(got)) & (abs(got) <= most) & ((abs(got) >= F32.tiny) | (got == 0))
        near &= np.signbit(got) == np.signbit(want)
        near |= np.isnan(got) & np.isnan(want)
        assert near.all(), (got[~near], want[~near])
        np.testing.assert_array_equal(got[want == 1], 1)  # as of 0 and what is flushed to it

    return within


def flushed(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The numbers, 0 of the same sign in the place of denormals."""
    return np.where(abs(x) < F32.tiny, np.copysign(0, x), x).astype(np.float64)


def powers_of_two(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """2^x, denormals flushed to 0 first."""
    with np.errstate(all="ignore"):
        return np.exp2(flushed(x))


def reciprocals(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """1 / x, denormals flushed to 0 first."""
    with np.errstate(all="ignore"):
        return 1 / flushed(x)


def scalar_launch(rng: np.random.Generator) -> tuple[Launch, dict[str, NDArray[Any]]]:
    a, b, wide, wide2 = singles(rng), singles(rng), doubles(rng), doubles(rng)
    half = rng.integers(0, 1 << 16, N, dtype=np.uint16)
    row = np.arange(32)[:, None]
    lanes = np.arange(N) ^ row  # 32 divides N: they stay in the warp
    votes = (b.view(np.uint32) % 64 == row).reshape(32, -1, 32).any(-1)
    lane_bits = (b.view(np.uint32) >> row.astype(np.uint32) & 1).reshape(32, -1, 32)
    with np.errstate(all="ignore"):
        expected = {
            "ex2_approx": powers_of_two(a),
            "rcp_approx": reciprocals(a),
            "mul_rn_f32": a * b,
            "mul_rn_f64": wide * wide2,
            "cvt_f32_f16": half.view(np.float16).astype(np.float32),
            "cvt_rn_f16_f32": narrowed(a, np.float16),
            "cvt_rz_f32_f64": truncated(wide),
            "mov_b32": a.view(np.uint32),
            "mov_f32": b,
            "shfl_bfly_f32": a.view(np.uint32)[lanes].view(np.float32),
            "shfl_bfly_f64": wide.view(np.uint64)[lanes].view(np.float64),
            "shfl_idx": b.view(np.int32)[np.arange(N) // 32 * 32 + row],
            "vote_any": np.repeat(votes, 32, -1).astype(np.uint32),
            "vote_ballot": np.repeat(
                (lane_bits << np.arange(32, dtype=np.uint32)).sum(-1, np.uint32), 32, -1
            ),
            "clz": 64 - np.array([int(x).bit_length() for x in wide2.view(np.uint64)], np.int32),
            "mov_b64": wide.view(np.uint64),
            "mov_f64": wide2,
        }
    inputs = {"single": a, "single2": b, "half": half, "bits": b.view(np.uint32)}
    inputs |= {"wide_bits": wide2.view(np.uint64), "wide": wide, "wide2": wide2}
    arrays = {name: (x, Access.READ) for name, x in inputs.items()}
    for name, x in expected.items():
        out = np.zeros(x.shape, np.float32 if name in APPROXIMATE else x.dtype)
        arrays[name] = (out, Access.WRITE_ONCE)
    return Launch("ptx_scalar", arrays, {"n": N}, grid=(N // 128,)), expected


APPROXIMATE: dict[str, Agree] = {"ex2_approx": within_units(2), "rcp_approx": within_units(1)}
SCALARS: dict[str, Agree] = {
    **APPROXIMATE,
    "mul_rn_f32": same_numbers,
    "mul_rn_f64": same_numbers,
    "cvt_f32_f16": same_numbers,
    "cvt_rn_f16_f32": same_bits,
    "cvt_rz_f32_f64": same_numbers,
    "mov_b32": same_bits,
    "mov_f32": same_bits,
    "shfl_bfly_f32": same_bits,
    "shfl_bfly_f64": same_bits,
    "shfl_idx": same_bits,
    "vote_any": same_bits,
    "vote_ballot": same_bits,
    "clz": same_bits,
    "mov_b64": same_bits,
    "mov_f64": same_bits,
}


@on_every_machine
@a_quarter
@given(seeds)
def test_functions_of_one_or_two_values(machine: Runner, seed: int) -> None:
    launch, expected = scalar_launch(np.random.default_rng(seed))
    machine.check(launch, expected, seed, SCALARS.__getitem__)


@on_every_machine
@a_quarter
@given(seeds)
def test_conversions_to_pairs(machine: Runner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lo, hi = singles(rng), singles(rng)

    def pairs(dtype: Any) -> NDArray[np.uint32]:
        return narrowed(lo, dtype) | narrowed(hi, dtype).astype(np.uint32) << 16

    expected = {"cvt_rn_f16x2_f32": pairs(np.float16), "cvt_rn_bf16x2_f32": pairs(BFLOAT16)}
    arrays = {"lo": (lo, Access.READ), "hi": (hi, Access.READ)}
    arrays |= {name: (np.zeros(N, np.uint32), Access.WRITE_ONCE) for name in expected}
    machine.check(Launch("ptx_pack", arrays, grid=(N // 128,)), expected, seed)
