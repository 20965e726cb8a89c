"""What attention makes of numbers at the edge: laws for what is huge, denormal or not finite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import attend, cases

import cufa
from cufa import reference
from cufa.bounds import exact
from cufa.testing import CONTIGUOUS, FLOATS, Case, assert_within_rounding, to_numpy


@given(
    case=cases(rank=4, layout="bhsd", k_memory=CONTIGUOUS, v_memory=CONTIGUOUS, hidden=0.9),
)
def test_hidden_keys_may_be_huge(xp, fit, case):
    case = fit(case)
    q, k, v = case.arrays(np)
    options = case.options(np)
    shown = {name: value for name, value in options.items() if name not in ("sink", "algorithm")}
    hidden = reference.scores(q, k, **shown) == -np.inf
    grouped = case.batch, case.kv_heads, case.group, case.seqlen_k
    hidden = hidden.all(axis=2).reshape(grouped).all(axis=2)
    huge = k.dtype.type(3e4 if case.dtype == "float16" else 1e30)
    k[hidden], v[hidden] = huge, -huge
    q, k, v = (xp.asarray(a) for a in (q, k, v))
    result = cufa.attention(q, k, v, return_lse=True, **case.options(xp))
    assert_within_rounding(result, case.exact())


@given(case=cases(rank=4, layout="bhsd", seqlen_q=st.integers(1, 70)), row=st.integers(0, 69))
def test_a_nan_stays_in_its_row(xp, fit, case, row):
    case = fit(case)
    row %= case.seqlen_q
    q, k, v = case.arrays(np)
    q = q.copy()
    q[:, :, row] = np.nan
    expected = exact(q, k, v, **case.options(np))
    _, k, v = case.arrays(xp)
    result = cufa.attention(xp.asarray(q), k, v, return_lse=True, **case.options(xp))
    assert_within_rounding(result, expected)


@given(
    case=cases(
        features=["softcap", "sink"],
        scores="normal",  # no weight vanishes
        scale=None,
        rank=4,
        layout="bhsd",
        batch=st.integers(1, 2),
        seqlen_q=st.integers(1, 70),
        seqlen_k=st.integers(1, 150),
        k_memory=CONTIGUOUS,
        v_memory=CONTIGUOUS,
    ),
    name=st.sampled_from("kv"),
    value=st.sampled_from([np.inf, -np.inf, np.nan]),
)
def test_what_is_not_finite_propagates_as_in_the_formula(xp, fit, case, name, value):
    case = fit(case)
    arrays = dict(zip("qkv", case.arrays(np), strict=True))
    arrays[name][0, 0, case.seqlen_k // 2, 0] = value
    expected = exact(*arrays.values(), **case.options(np))
    on_device = (xp.asarray(a) for a in arrays.values())
    result = cufa.attention(*on_device, return_lse=True, **case.options(xp))
    assert_within_rounding(result, expected)


@pytest.mark.parametrize("level", [-110.0, -20.0, 20.0, 60.0, 80.0, 86.0, 110.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sink_may_be_larger_or_smaller_than_all_scores(xp, dtype, level):
    case = Case(seqlen_q=5, seqlen_k=40, dtype=dtype)
    sink = np.array([level])
    result = attend(xp, case, sink=xp.asarray(sink))
    assert_within_rounding(result, exact(*case.arrays(np), sink=sink))


@pytest.mark.parametrize(
    "bias",
    [
        pytest.param([0, 1e300, 0, 0], id="one key far above"),
        pytest.param([0, -1e300, 0, -np.inf], id="one key far below"),
        pytest.param([-1e300] * 4, id="all keys far below"),
    ],
)
def test_a_float64_bias_beyond_float32_stays_finite(xp, bias):
    case = Case(seqlen_q=3, seqlen_k=4)
    out, lse = attend(xp, case, bias=xp.asarray(bias))
    assert_within_rounding(out, exact(*case.arrays(np), bias=np.array(bias)))
    assert np.isfinite(to_numpy(lse)).all()


@given(keys=st.integers(16, 300), dtype=st.sampled_from(["float32", "float64"]))
def test_values_next_to_zero_are_within_rounding(xp, keys, dtype):
    """Each product of a weight, 1 / keys, and a value vanishes, and their sum does not."""
    q = np.zeros((1, 8), dtype)
    v = np.full((keys, 8), keys // 2 - 1, dtype) * np.finfo(dtype).smallest_subnormal
    bias = np.full((1, keys), -np.log(keys), dtype)
    v[0], bias[0, 0] = 0, 0
    k = np.zeros_like(v)
    result = cufa.attention(*map(xp.asarray, (q, k, v)), bias=xp.asarray(bias), return_lse=True)
    assert_within_rounding(result, exact(q, k, v, bias=bias))
