"""Scores that jump from one key block to another, up or down and by any amount, where Hopper's
kernel weighs a block by the maximum of those before it.

In the emulator by a tile whose key blocks are short, on a card by the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import build
from emulator.machine import Emulator, attention
from emulator.run import Order, Schedule
from foreign import assert_same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cufa
from cufa.bounds import exact
from cufa.gpu import plan
from cufa.gpu.config import Config
from cufa.testing import Case, assert_within_rounding, cases, numpy_dtype, to_numpy

#: Takes NumPy arrays and options; `run` is the number of a run, each under other circumstances.
Attend = Callable[..., tuple[Any, Any]]

HOW: dict[str, Any] = {"return_lse": True, "algorithm": "fa3"}  # if not told otherwise
TILE = Config(block_m=128, block_n=32, threads=384, stages=2, blocks_per_sm=1)
HALVES = ["float16", "bfloat16"]
a_quarter = settings(max_examples=max(1, settings().max_examples // 4))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Emulator]]:
    """Emulated cards with one multiprocessor and more, each with an order of threads of its own."""
    if obstacle := build.obstacle():
        pytest.skip(obstacle)
    made = [Emulator(90, sm_count=n) for n in (1, 2, 3)]
    for machine, order in zip(made, Order, strict=True):
        machine.schedule = Schedule(order, seed=1)
    with mock.patch.object(plan, "find_config", return_value=TILE):
        yield made


@pytest.fixture(scope="module", params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest) -> Attend:
    """Attention by the kernel, lse too."""
    if request.param == "emulated":
        machines = request.getfixturevalue("machines")
        return lambda *arrays, run=0, **options: attention(machines[run], *arrays, **HOW | options)
    cupy = request.getfixturevalue("hopper_cupy")

    def on_card(*arrays: NDArray[Any], run: int = 0, **options: Any) -> tuple[Any, Any]:
        there = {n: cupy.asarray(a) if hasattr(a, "shape") else a for n, a in options.items()}
        return cufa.attention(*map(cupy.asarray, arrays), **HOW | there)

    return on_card


def hopper_cases(**fixed: Any) -> st.SearchStrategy[Case]:
    """Jumps in what one kernel each serves; lengths about multiples of a key block."""
    near = st.builds(
        lambda block, n, off: block * n + off,
        st.sampled_from([32, 128]),
        st.integers(1, 3),
        st.integers(-1, 1),
    )
    common: dict[str, Any] = {
        "head_dim": st.sampled_from([8, 24, 32]),
        "head_dim_v": st.sampled_from([8, 24, 64]),  # 64 has sums from the product
        "seqlen_q": st.integers(1, 40) | st.sampled_from([127, 129, 260]),
        "seqlen_k": near | st.integers(1, 300),
        "rank": 4,
        "batch": st.integers(1, 2),
        "features": (),
        "max_elements": 1 << 21,
        "scores": "jumping",
        "scale": st.sampled_from([None, None, None, 1.0, 0.05]),
    }
    dense = Case()
    common |= {f"{name}_memory": dense.q_memory for name in ("q", "k", "v", "extra")}
    return cases(dtypes=HALVES, **(common | fixed))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@a_quarter
@given(
    dtype=st.sampled_from(HALVES), seqlen_q=st.integers(1, 70), seqlen_k=st.integers(1, 200),
    place=st.floats(0, 1), ahead=st.floats(40, 70), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_row_that_one_key_outweighs_has_its_value(
    attend: Attend,
    head_dim: int,
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    place: float,
    ahead: float,
    seed: int,
) -> None:
    """Whatever the weight of that key is rounded to, relative to an m of other keys."""
    random = np.random.default_rng(seed)
    q, k = np.zeros((2, seqlen_q, head_dim)), random.standard_normal((2, seqlen_k, head_dim))
    q[..., 0], k[..., 0] = 8, 0
    key = min(int(place * seqlen_k), seqlen_k - 1)
    k[:, key, 0] = ahead * head_dim**0.5 / 8
    v = random.standard_normal((2, seqlen_k, head_dim))
    arrays = [a.astype(numpy_dtype(dtype)) for a in (q, k, v)]
    out, _ = attend(*arrays)
    assert_same_bits(to_numpy(out), np.broadcast_to(arrays[2][:, key, None], out.shape))


BOUND = st.integers(0, 200)
PLAIN, CAUSAL = hopper_cases(), hopper_cases(causal=st.sampled_from([True, "top_left"]))
WINDOW = hopper_cases(window=st.tuples(BOUND, BOUND), sink=True)
BIAS = hopper_cases(bias=st.tuples(*[st.booleans()] * 4), extra_dtype="float32")
DROPPED = hopper_cases(dropout_p=st.sampled_from([0.1, 0.5, 0.9]))
STALE = Case(seqlen_k=64, head_dim=32, head_dim_v=32, dtype="bfloat16", scores="jumping")


# Weights are finite, as are their sums, and products with values are not.
@example(case=replace(STALE, jumps=((0, 20.0), (32, -20.0)), v_size=1e33))
# So are the sums of four lanes, and that of their row is not. The query points away from the keys.
@example(case=replace(STALE, seqlen_q=1, scores="equal", jumps=((0, -3352.0), (32, 3352.0))))
# Beside the sink the weight of m vanishes, and those of the keys do not.
@example(case=replace(STALE, jumps=((0, -25.0), (32, -80.0)), window=(200, 200), sink=True))
# In float16 a weight is just finite, and the factor that makes it small is flushed to 0.
@example(case=replace(STALE, dtype="float16", seqlen_q=1, jumps=((0, 92.0), (1, -92.0))))
# An old m and the log of a large sum, which nearly cancel, are lse.
@example(case=replace(STALE, head_dim=8, seqlen_q=64, seqlen_k=33, jumps=((1, -80.0),)))
# The difference to an old m is rounded to a multiple of far more than lse has.
@example(
    case=replace(
        STALE,
        kv_heads=2,
        head_dim=8,
        head_dim_v=24,
        seqlen_q=260,
        dtype="float16",
        jumps=((1, -237.1),),
        scale=0.05,
    )
)
# The output overflows; then m moves up in a block that is masked, and makes the sum small again.
@example(
    case=replace(
        STALE,
        seqlen_q=128,
        seqlen_k=128,
        jumps=((0, 155.0), (32, -70.0), (96, -85.0)),
        v_size=8.0,
        window=(123, 200),
        sink=True,
    )
)
# Dropout leaves nothing of the keys whose weights are so large that the tile is computed again.
@example(
    case=replace(STALE, seqlen_q=64, jumps=((0, 20.0), (1, 100.0), (32, -120.0)), dropout_p=0.9)
)
@given(case=PLAIN | CAUSAL | WINDOW | BIAS | DROPPED)
def test_jumps_of_any_size_are_weighed_as_in_the_formula(attend: Attend, case: Case) -> None:
    assert_within_rounding(attend(*case.arrays(np), **case.options(np)), case.exact())


@a_quarter
@given(
    case=PLAIN | CAUSAL,
    power=st.integers(-30, 90),
    factor=st.sampled_from([1, 16, 256]),
)
def test_equal_scores_of_any_size_weigh_all_keys_alike(
    attend: Attend, case: Case, power: int, factor: int
) -> None:
    """Up to 1e30, where a unit in the last place is far more than any exponent can be."""
    q, k, v = case.arrays(np)
    k[...], k[..., 0] = 0, factor  # of one product there is no rounding
    options = case.options(np)
    out, lse = attend(q, k, v, **{**options, "scale": 2.0**power})
    mean = exact(q, k, v, **{**options, "scale": 0.0})
    assert_within_rounding((out, mean.lse.astype(np.float32)), mean)
    assert not np.isnan(to_numpy(lse)).any()


@example(keys=8, power=103, causal=False)  # each of four lanes has 2^13.9 of l
@a_quarter
@given(keys=st.integers(1, 32), power=st.integers(0, 160), causal=st.booleans())
def test_values_below_the_limit_of_the_documents_do_not_overflow(
    attend: Attend, keys: int, power: int, causal: bool
) -> None:
    """3.4e38 / (256 seqlen_k), beside some keys whose weights are larger than others."""
    case = replace(STALE, seqlen_q=1, seqlen_k=129)
    q, k, v = case.arrays(np)
    q[...], k[...], v[...] = 0, 0, 1e34
    q[..., 0], k[..., :keys, 0] = 1, power / 8
    options = {"scale": float(np.log(2)), "causal": causal}
    assert_within_rounding(attend(q, k, v, **options), exact(q, k, v, **options))


# Sums that are too large for one of four lanes, not for the row.
@example(case=replace(STALE, head_dim_v=64, seqlen_q=64, jumps=((0, 87.5), (4, -87.5))))
# Weights of a lane are finite, their sum is not, and then all are made small.
@example(
    case=replace(
        STALE,
        head_dim=8,
        head_dim_v=64,
        seqlen_q=64,
        dtype="float16",
        jumps=((0, 85.0), (32, -85.0)),
    )
)
@a_quarter
@given(case=PLAIN | CAUSAL | WINDOW | DROPPED)
def test_only_the_numbers_decide_what_comes(attend: Attend, case: Case) -> None:
    """Not the order of threads, nor who takes which tile, nor whether lse is wanted."""
    arrays, options = case.arrays(np), case.options(np)
    runs = [attend(*arrays, **options, run=n) for n in range(3)]
    alone = attend(*arrays, **options, return_lse=False)
    np.testing.assert_array_equal(to_numpy(alone), to_numpy(runs[0][0]))
    for out, lse in runs[1:]:
        for one, other in ((out, runs[0][0]), (lse, runs[0][1])):
            np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


@pytest.mark.parametrize(("head_dim_v", "beside"), [(32, (127.3, 126.7, 127.6)), (64, ())])
def test_a_sum_just_below_the_largest_number_is_lost_before_it_is_small_again(
    attend: Attend, head_dim_v: int, beside: tuple[float, ...]
) -> None:
    """Whether lse is wanted changes no bit where l has overflowed and the sum of rounded weights
    has not: a weight of almost 2^128 is rounded down, and m moves up in a block that is cut."""
    exponents = np.full(384, -200.0)
    exponents[256:] = 0
    exponents[128:130] = 127.99712, 119.4  # of one lane
    exponents[130:136:2][: len(beside)] = beside  # each of another
    exponents[67] = 100  # in the block of 32 or of 128 that the window cuts
    q, k = np.zeros((1, 48, 1, 32)), np.zeros((1, 48, 384, 32))
    q[..., :4] = 1
    for column in range(4):  # four pieces of eight digits hold an exponent
        k[..., column] = exponents.astype(numpy_dtype("bfloat16"))
        exponents = exponents - k[0, 0, :, column]
    v = np.random.default_rng(1).uniform(-0.05, 0.05, (1, 48, 384, head_dim_v))
    arrays = [a.astype(numpy_dtype("bfloat16")) for a in (q, k, v)]
    options = {"scale": float(np.log(2)), "window": (317, 0)}
    both, alone = attend(*arrays, **options), attend(*arrays, **options, return_lse=False)
    assert_within_rounding(both, exact(*arrays, **options))
    assert_same_bits(to_numpy(alone), to_numpy(both[0]))


def products(machine: Emulator, case: Case) -> int:
    """How many a call takes."""
    attention(machine, *case.arrays(np), **case.options(np), **HOW)
    assert machine.counts is not None
    return machine.counts.executed["wgmma.mma_async"]


@pytest.fixture
def level(machines: list[Emulator], dtype: str) -> tuple[Emulator, Case, int]:
    """A card, a problem of two tiles, and how many products it takes."""
    case = Case(seqlen_q=256, seqlen_k=256, head_dim=32, head_dim_v=32, dtype=dtype)
    return machines[0], case, products(machines[0], case)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "data",
    [
        {"scores": "normal", "scale": 4 / np.sqrt(32)},  # a standard deviation of 4
        {"jumps": ((0, 15.0), (1, -15.0))},
        {"jumps": ((0, 20.0), (1, -20.0))},
        {"jumps": tuple((n, 60 / 256) for n in range(256))},
        {"jumps": tuple((n, -60 / 256) for n in range(256))},
    ],
    ids=["deviation 4", "sink 15", "sink 20", "growing", "falling"],
)
def test_what_real_data_look_like_is_computed_once(
    level: tuple[Emulator, Case, int], data: dict[str, Any]
) -> None:
    machine, case, once = level
    assert products(machine, replace(case, **{"scores": "jumping", **data})) == once


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [100.0, 1000.0, 9000.0])
def test_tiles_whose_scores_jump_beyond_float32_are_computed_twice(
    level: tuple[Emulator, Case, int], size: float
) -> None:
    machine, case, once = level
    jumping = replace(case, scores="jumping", jumps=((0, size), (200, -size)))
    assert products(machine, jumping) == 2 * once


@pytest.mark.parametrize("dtype", HALVES)
def test_tiles_that_see_no_jump_are_computed_once(level: tuple[Emulator, Case, int]) -> None:
    machine, case, _ = level
    case = replace(case, causal=True, scores="jumping")
    once = products(machine, case)
    # All key blocks of the first tile are masked; the second's up to 128 are not.
    second = replace(case, jumps=((0, 200.0), (100, -200.0)))
    first = replace(case, seqlen_q=128, seqlen_k=128)
    assert products(machine, second) == 2 * once - products(machine, first)


@a_quarter
@given(seqlen_q=st.integers(1, 300), seqlen_k=st.integers(1, 300))
def test_a_warpgroup_multiplies_only_blocks_that_its_rows_see(
    machines: list[Emulator], seqlen_q: int, seqlen_k: int
) -> None:
    groups = 2 * -(-seqlen_q // TILE.block_m)  # of 64 rows
    ends = [min(64 * n, seqlen_q) for n in range(1, groups + 1)]
    seen = [max(1, -(-(end + seqlen_k - seqlen_q) // TILE.block_n)) for end in ends]
    case = Case(seqlen_q=1, seqlen_k=1, dtype="bfloat16", causal=True)
    block = products(machines[0], case) // 2  # either warpgroup has one
    case = replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert products(machines[0], case) == block * sum(seen)


@a_quarter
@given(seqlen_q=st.integers(1, 127), seqlen_k=st.integers(1, 300))
def test_rows_past_the_end_have_no_maxima_looked_for(
    machines: list[Emulator], seqlen_q: int, seqlen_k: int
) -> None:
    """They have no m, and float16's weights are looked at in every block. Others do not jump."""

    def exchanges(rows: int) -> int:
        case = Case(seqlen_q=rows, seqlen_k=seqlen_k, dtype="float16", scores="tiny")
        products(machines[0], case)
        assert machines[0].counts is not None
        return machines[0].counts.executed["shfl.sync.bfly"]

    assert exchanges(seqlen_q) == exchanges(128)
