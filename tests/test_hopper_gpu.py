"""Hopper's kernel on a card: the same bits whatever else runs, in any thread, stream and graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cufa
from cufa.bounds import exact
from cufa.testing import CONTIGUOUS, Case, assert_within_rounding, cases, to_numpy

pytestmark = pytest.mark.gpu

LAUNCHES = 200
#: More tiles than a card has multiprocessors. Of "jumps" all are computed twice, of "large" some,
#: for some of their warps.
# fmt: off
PROBLEMS = {
    "full":    Case(20, 2, 2, 1500, 1500,  64,  64, "bfloat16"),
    "causal":  Case(20, 2, 2, 1500, 1700, 128, 128, "float16", causal=True),
    "window":  Case(20, 2, 1, 1300, 1300, 256, 256, "bfloat16", window=(300, 200), sink=True),
    "jumps":   Case(20, 2, 2, 1000, 1000, 128, 128, "bfloat16", scores="jumping",
                    jumps=((0, 200.0), (900, -200.0))),
    "large":   Case(20, 2, 2, 1000, 1000,  64,  64, "bfloat16", scores="large", scale=0.04),
}
# fmt: on
each_problem = pytest.mark.parametrize("name", PROBLEMS)


@pytest.fixture(scope="module", autouse=True)
def _hopper(hopper_cupy: Any) -> None:
    """All tests here need one."""


@cache
def arguments(cupy: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    case = PROBLEMS[name]
    how = {"return_lse": True, "algorithm": "fa3"}
    found = case.arrays(cupy), {**case.options(cupy), **how}
    cupy.cuda.Device().synchronize()
    return found


@cache
def alone(cupy: Any, name: str) -> tuple[Any, Any]:
    """The result where nothing else runs; the last sequence's is held against the formula."""
    arrays, options = arguments(cupy, name)
    out, lse = cufa.attention(*arrays, **options)
    last = (to_numpy(a[-1:]) for a in arrays)
    assert_within_rounding((out[-1:], lse[-1:]), exact(*last, **PROBLEMS[name].options(np)))
    return out, lse


def differing(cupy: Any, result: tuple[Any, Any], wanted: tuple[Any, Any]) -> Any:
    """How many bytes differ; NaN is equal to itself. In the current stream, unread."""
    pairs = zip(result, wanted, strict=True)
    return sum((a.view("uint8") != b.view("uint8")).sum() for a, b in pairs)


def assert_counters_are_zero() -> None:
    """Of this thread, once nothing runs."""
    from cufa.gpu import cards

    found = [int(counter[0]) for counter in cards._thread.counters.values()]
    assert found
    assert found == [0] * len(found)


@each_problem
def test_a_busy_card_changes_no_bit(cupy: Any, name: str) -> None:
    wanted, (arrays, options) = alone(cupy, name), arguments(cupy, name)
    mine, others = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with others:
        big = cupy.ones((2048, 2048), "float16")
        small = cupy.ones((256, 256), "float32")
    wrong = []
    for _ in range(LAUNCHES):
        with others:  # long and short, on all multiprocessors and on some
            big = big @ big * 0
            small = small @ small * 0
        with mine:
            result = cufa.attention(*arrays, **options)
            wrong.append(differing(cupy, result, wanted))
    cupy.cuda.Device().synchronize()
    assert not any(int(n) for n in wrong)
    assert_counters_are_zero()


def test_kernels_side_by_side_change_no_bit(cupy: Any) -> None:
    """Each stream has a problem of its own, and all take tiles at once."""
    names = list(PROBLEMS)
    wanted = [alone(cupy, name) for name in names]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in names]
    wrong = []
    for _ in range(LAUNCHES // 4):
        for name, stream, want in zip(names, streams, wanted, strict=True):
            arrays, options = arguments(cupy, name)
            with stream:
                wrong.append(differing(cupy, cufa.attention(*arrays, **options), want))
    cupy.cuda.Device().synchronize()
    assert not any(int(n) for n in wrong)
    assert_counters_are_zero()


@pytest.mark.parametrize("streams", ["default", "their own"])
def test_threads_side_by_side_change_no_bit(cupy: Any, streams: str) -> None:
    names = [*PROBLEMS] * 2
    wanted = {name: alone(cupy, name) for name in names}

    def call(name: str) -> int:
        own = cupy.cuda.Stream(non_blocking=True) if streams == "their own" else nullcontext()
        arrays, options = arguments(cupy, name)
        with own:
            wrong = [
                differing(cupy, cufa.attention(*arrays, **options), wanted[name])
                for _ in range(LAUNCHES // 10)
            ]
            total = sum(int(n) for n in wrong)
        assert_counters_are_zero()
        return total

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(call, names)) == [0] * len(names)


@each_problem
def test_a_graph_gives_the_same_bits_whenever_it_runs(cupy: Any, name: str) -> None:
    """Beside calls outside of it, and itself in another stream."""
    wanted, (arrays, options) = alone(cupy, name), arguments(cupy, name)
    outs = [cupy.empty_like(wanted[0]) for _ in range(2)]
    options = {**options, "return_lse": False}
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with stream:
        cufa.attention(*arrays, **options)  # compiled, and a counter made
        stream.begin_capture()
        for out in outs:
            cufa.attention(*arrays, **options, out=out)
        graph = stream.end_capture()
    for _ in range(20):
        with other:
            beside = cufa.attention(*arrays, **options)
        for out in outs:
            out.view("uint8").fill(0xFF)  # NaN
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        with other:
            beside = cufa.attention(*arrays, **options)
        cupy.cuda.Device().synchronize()
        for out in (*outs, beside):
            assert not int(differing(cupy, (out,), wanted[:1]))


@settings(max_examples=3 * settings().max_examples)
@given(
    case=cases(
        dtypes=["float16", "bfloat16"],
        head_dim=st.sampled_from([40, 64, 104, 128]),
        head_dim_v=st.sampled_from([40, 64, 104, 128]),
        seqlen_q=st.integers(1, 500),
        seqlen_k=st.integers(1, 500),
        batch=st.integers(1, 2),
        rank=4,
        q_memory=CONTIGUOUS,
        k_memory=CONTIGUOUS,
        v_memory=CONTIGUOUS,
    )
)
def test_fa3_and_fa2_agree_within_rounding(cupy: Any, case: Case) -> None:
    """Whatever masks and changes of scores there are; and both with the formula."""
    case = case.few_kernels()
    arrays, options = case.arrays(cupy), {**case.options(cupy), "return_lse": True}
    # Masks that are repeated along the keys are for fa2 alone.
    assume(cufa.explain(*arrays, **options).algorithm == "fa3")
    expected = case.exact()
    out, lse = (to_numpy(a) for a in cufa.attention(*arrays, **options | {"algorithm": "fa2"}))
    assert_within_rounding((out, lse), expected)
    twice = expected._replace(
        out=out.astype(np.float64),
        lse=lse.astype(np.float64),
        out_bound=2 * expected.out_bound,
        lse_bound=2 * expected.lse_bound,
    )
    result = cufa.attention(*arrays, **options | {"algorithm": "fa3"})
    assert_within_rounding(result, expected)
    assert_within_rounding(result, twice)
