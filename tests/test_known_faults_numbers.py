"""Numbers that broke other attention libraries, huge, tiny or far from zero, and what is right.

known_faults.md says what the ids, such as LG2, stand for.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from problems import case, check, check_arrays

import cufa
from cufa.bounds import exact
from cufa.testing import assert_within_rounding, numpy_dtype, to_numpy

# What is right here is right for each algorithm.
pytestmark = pytest.mark.usefixtures("each_algorithm")


def close_to(level, seqlen_q, seqlen_k, dtype, **fields):
    """q and k whose scores all lie close to `level`, with ordinary differences between the keys."""
    problem = case(seqlen_q, seqlen_k, dtype=dtype, scores="tiny", **fields)
    q, k, v = (a.astype(float) for a in problem.arrays(np))
    size = math.sqrt(abs(level) / math.sqrt(problem.head_dim))  # of each component
    q, k = 300 * q + size, 300 * k + math.copysign(size, level)
    return *(a.astype(numpy_dtype(dtype)) for a in (q, k)), v.astype(numpy_dtype(dtype))


def test_ma4_a_row_of_the_lowest_number_is_the_mean_of_the_values(xp):
    problem = case(6, 20, heads=1, head_dim=32, dtype="float32")
    bias = np.zeros((6, 20), "float32")
    bias[2] = np.finfo("float32").min
    out, lse = check(xp, problem, bias=bias)
    mean = problem.arrays(np)[2].mean(axis=1)
    np.testing.assert_allclose(to_numpy(out)[:, 2], mean, rtol=1e-5, atol=1e-6)
    assert not np.isnan(to_numpy(lse)).any()


@pytest.mark.parametrize("level", [-1e4, -800.0, 800.0, 1e4])
def test_ls6_merging_does_not_overflow(xp, level):
    out_a, out_b = xp.full((1, 1), 1, "float32"), xp.full((1, 1), 4, "float32")
    lse_a = xp.full(1, level, "float32")
    out, lse = cufa.merge(out_a, lse_a, out_b, lse_a + math.log(2))
    steps = 2 * np.spacing(np.float32(abs(level)))  # lse_a + log 2 is rounded to these
    np.testing.assert_allclose(to_numpy(out), [[3]], atol=2 * steps)
    np.testing.assert_allclose(to_numpy(lse), [level + math.log(3)], atol=steps, rtol=0)


# LG2, LG3, LG4: scores far below any stand-in for minus infinity
@pytest.mark.parametrize("level", [-110.0, -6e4, 6e4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_lg2_scores_may_be_far_from_zero(xp, dtype, level):
    q, k, v = close_to(level, 4, 200, dtype, kv_heads=1, head_dim=128)
    check_arrays(xp, q, k, v, layout="bshd")


@pytest.mark.parametrize(
    ("dtype", "value", "keys"),
    [
        pytest.param("bfloat16", 133120.0, 1, id="LG6 bfloat16"),
        pytest.param("float16", 2048.0, 1, id="LG6 float16"),
        pytest.param("float16", 2048.0, 2, id="LG6 float16, two keys"),
    ],
)
def test_huge_equal_keys_give_the_mean_of_the_values(xp, dtype, value, keys):
    q = np.full((1, 1, 1, 64), value).astype(numpy_dtype(dtype))
    k = np.repeat(q, keys, axis=1)
    check_arrays(xp, q, k, k, layout="bshd")
    out = cufa.attention(*(xp.asarray(a) for a in (q, k, k)), layout="bshd")
    np.testing.assert_array_equal(to_numpy(out), q)


# Numbers that float32 does not hold, or that a product of them does not.


def test_a_scale_does_not_take_queries_out_of_range(xp):
    one = np.eye(64, dtype="float32")
    out, _ = check_arrays(xp, 1e30 * one, 1e-30 * one, one, scale=1e10)
    np.testing.assert_array_equal(to_numpy(out), one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float64_slopes_may_be_huge(xp, dtype):
    problem = case(6, dtype=dtype, layout="bhsd")
    out, _ = check(xp, problem, alibi_slopes=np.full(2, 1e39))
    v = problem.arrays(np)[2]
    # On a card a float32 is the sum of two TF32 numbers, which may lack its last bit.
    room = np.spacing(abs(v)) if dtype == "float32" else 0
    assert (abs(to_numpy(out) - v) <= room).all()


@pytest.mark.parametrize("sink", [1e39, -1e39])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float64_sinks_may_be_huge(xp, dtype, sink):
    problem, largest = case(6, dtype=dtype), float(np.finfo("float32").max)
    result = cufa.attention(
        *problem.arrays(xp), sink=xp.full(2, sink), layout="bshd", return_lse=True
    )
    clipped = np.clip(np.full(2, sink), -largest, largest)
    assert_within_rounding(result, exact(*problem.arrays(np), sink=clipped, layout="bshd"))


@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e-20, 1e4, 1e10, 1e30, 1e300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_softcap_may_be_tiny_or_huge(xp, dtype, softcap):
    check(xp, case(30, 70, head_dim=32, dtype=dtype, softcap=softcap))
