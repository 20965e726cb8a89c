"""Inputs that broke gradients of other attention libraries, and what is right.

known_faults.md says what the ids, such as SO1, stand for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import case, moved

import cufa
from cufa.bounds import fractions
from cufa.gradient_bounds import exact_gradients
from cufa.testing import FLOATS, Memory, assert_gradients_within_rounding, numpy_dtype, to_numpy

#: Of norm(got - exact) / norm(exact), beside the bounds of each element.
MOST = {"float64": 1e-10, "float32": 5e-5, "float16": 5e-3, "bfloat16": 3e-2}


def check(xp, problem, through_lse=False, **options):
    """Gradients of a case, with some options replaced or added, are those of the formula."""
    dout, dlse = problem.back(np)
    return check_arrays(
        xp,
        dout,
        *problem.arrays(np),
        dlse=dlse if through_lse else None,
        **{**problem.options(np), **options},
    )


def check_arrays(xp, dout, q, k, v, **options):
    """The same for arrays of one's own."""
    got, expected = check_elements(xp, dout, q, k, v, **options)
    for a, want in zip(got[:3], expected.gradients[:3], strict=True):
        off = np.linalg.norm((a.astype(np.float64) - want).ravel())
        assert off <= MOST[q.dtype.name] * np.linalg.norm(want.ravel())
    return got


def check_elements(xp, dout, q, k, v, dlse=None, **options):
    """Each within its bound; NumPy views keep their strides on the way to `xp`."""
    on_device = {n: moved(xp, a) for n, a in options.items()}
    _, vjp = cufa.attention_vjp(*(moved(xp, a) for a in (q, k, v)), **on_device)
    got = vjp(moved(xp, dout), None if dlse is None else moved(xp, dlse))
    got = cufa.Gradients(*(None if a is None else to_numpy(a) for a in got))
    expected = exact_gradients(dout, q, k, v, dlse=dlse, **options)
    assert_gradients_within_rounding(got, expected)
    return got, expected


@pytest.mark.parametrize(
    ("window", "seqlen_q", "seqlen_k"), [((17, 0), 203, 203), ((3, 2), 90, 40), ((9, 0), 20, 300)]
)
def test_wi5_windows_are_the_same_both_ways(xp, window, seqlen_q, seqlen_k):
    problem = case(seqlen_q, seqlen_k, heads=6, kv_heads=2, window=window, causal=window[1] == 0)
    got = check(xp, problem)
    unseen = max(0, seqlen_k - seqlen_q - window[0])
    assert not got.dk[:, :unseen].any()
    assert not got.dv[:, :unseen].any()


def test_so1_a_softcap_is_differentiated(xp):
    problem = case(100, dtype="float32", softcap=10.0, causal=True)
    dout, (q, k, v) = problem.back(np)[0], problem.arrays(np)
    check_arrays(xp, dout, 4 * q, 4 * k, v, softcap=10.0, causal=True, layout="bshd")


@pytest.mark.parametrize("dtype", FLOATS)
def test_so1_a_saturated_softcap_gives_no_nan(xp, dtype):
    problem = case(60, dtype=dtype)
    dout, (q, k, v) = problem.back(np)[0], problem.arrays(np)
    arrays = (xp.asarray(a) for a in (30 * q, 30 * k, v))
    _, vjp = cufa.attention_vjp(*arrays, softcap=30.0, layout="bshd")
    got = vjp(xp.asarray(dout))
    expected = exact_gradients(dout, 30 * q, 30 * k, v, softcap=30.0, layout="bshd")
    assert_gradients_within_rounding(got, expected)


def test_ma2_rows_and_keys_that_a_bias_hides_have_no_gradient(xp):
    problem = case(40, 50, dtype="bfloat16", bias=(True, False, True, True), hidden=0.0)
    bias = problem.options(np)["bias"].reshape(40, 50)
    bias[[0, 7, 39]], bias[:, [3, 49]] = -np.inf, -np.inf
    got = check(xp, problem, through_lse=True, bias=bias)
    assert not got.dq[:, [0, 7, 39]].any()
    assert not got.dk[:, [3, 49]].any()
    assert not got.dv[:, [3, 49]].any()
    assert not got.dbias[~np.isfinite(bias)].any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_ma4_a_row_of_the_lowest_number_has_no_gradient(xp, dtype, causal):
    problem = case(40, 50, dtype=dtype, causal=causal, layout="bhsd")
    dout, (q, k, v) = problem.back(np)[0], problem.arrays(np)
    bias = np.zeros((40, 50), "float64" if dtype == "float64" else "float32")
    bias[[0, 7, 39]] = np.finfo(bias.dtype).min
    _, vjp = cufa.attention_vjp(
        *map(xp.asarray, (q, k, v)), bias=xp.asarray(bias), causal=causal, layout="bhsd"
    )
    got = cufa.Gradients(*(None if a is None else to_numpy(a) for a in vjp(xp.asarray(dout))))
    hidden = np.where(bias < 0, -np.inf, bias).astype(bias.dtype)
    assert_gradients_within_rounding(
        got, exact_gradients(dout, q, k, v, bias=hidden, causal=causal, layout="bhsd")
    )
    assert not got.dq[..., [0, 7, 39], :].any()


def test_bi1_a_growing_bias_on_an_odd_length(xp):
    seqlen = 1025
    i, j = np.ogrid[:seqlen, :seqlen]
    bias = (i - j).astype(numpy_dtype("bfloat16"))
    check(xp, case(seqlen, heads=1, dtype="bfloat16", causal=True), bias=bias)


def test_bi2_the_gradient_of_the_bias_alone(xp):
    problem = case(64, heads=1, head_dim=16, dtype="float32", bias=(False, True, True, True))
    dout, _ = problem.back(xp)
    _, vjp = cufa.attention_vjp(*problem.arrays(xp), wrt="bias", **problem.options(xp))
    got, expected = vjp(dout), problem.exact_gradients(through_lse=False)
    only = [
        type(part)(*(a if name == "dbias" else None for name, a in part._asdict().items()))
        for part in expected[:2]
    ]
    assert_gradients_within_rounding(got, expected._replace(gradients=only[0], bounds=only[1]))


def test_bi3_a_bias_of_every_batch(xp):
    problem = case(30, 40, dtype="float32", batch=3, bias=(True,) * 4, hidden=0.0)
    assert check(xp, problem).dbias.shape == (3, 2, 30, 40)


def test_bi4_a_bias_that_very_many_batches_share(xp):
    problem = case(43, heads=32, head_dim=8, dtype="float32", batch=31, hidden=0.0)
    assert check(xp, replace(problem, bias=(True, False, True, True))).dbias.shape == (
        31,
        1,
        43,
        43,
    )


@pytest.mark.parametrize("seqlen", [33, 129, 1061, 1066])
def test_le2_lengths_are_the_same_both_ways(xp, seqlen):
    check(xp, case(seqlen, heads=1))


def test_lg5_logits_far_below_zero_beside_the_end_of_the_keys(xp):
    problem = case(50, 77)
    dout, (q, k, v) = problem.back(np)[0], problem.arrays(np)
    size = np.sqrt(np.float16(100 / 8))  # 64 components, scale 1 / 8
    check_arrays(xp, dout, q + size, k - size, v, layout="bshd")


def test_pr2_float32_has_the_gradients_of_float32(xp):
    check(xp, case(128, heads=1, head_dim=32, dtype="float32", causal=True))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3), (3, 1, 0, 2)])
def test_st3_st5_what_comes_back_has_its_own_strides(xp, order):
    problem = case(32, heads=4, kv_heads=1, head_dim=128, dtype="float32", batch=2)
    check(xp, replace(problem, dout_memory=Memory(order)))


def test_st4_views_that_attention_takes_its_backward_pass_takes(xp):
    every_second = Memory(step=(1, 1, 1, 2))
    memories = dict.fromkeys(("q_memory", "k_memory", "v_memory", "dout_memory"), every_second)
    check(xp, replace(case(50), **memories))


def test_ls4_a_loss_of_lse_has_gradients(xp):
    got = check(xp, case(50, dtype="float32"), through_lse=True)
    without = check(xp, case(50, dtype="float32"))
    assert not np.array_equal(got.dq, without.dq)


# AL4
def test_slopes_are_constants_and_the_documentation_says_so():
    assert "alibi_slopes` are constants" in (cufa.attention_backward.__doc__ or "")
    assert "dalibi_slopes" not in cufa.Gradients._fields


# Numbers at the ends of a dtype's range.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_score_next_to_the_largest_number_has_a_weight_of_1(xp, dtype):
    q, v = np.zeros((1, 8), numpy_dtype(dtype)), np.ones((1, 8), numpy_dtype(dtype))
    q[0, 0] = 1.6e19
    _, vjp = cufa.attention_vjp(*map(xp.asarray, (q, q, v)), scale=1.0)
    dq, dk, dv = map(to_numpy, vjp(xp.asarray(3 * v))[:3])
    np.testing.assert_array_equal(dv, 3 * v)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_key_at_minus_infinity_from_all_queries_has_no_gradient(xp, dtype):
    problem = case(65, 128, heads=1, dtype=dtype, layout="bhsd")
    dout, (q, k, v) = problem.back(np)[0], problem.arrays(np)
    q[..., 0], k[..., 5, 0] = -1, np.inf
    _, vjp = cufa.attention_vjp(*map(xp.asarray, (q, k, v)), wrt=["k", "v"], layout="bhsd")
    got = vjp(xp.asarray(dout))
    for gradient in map(to_numpy, (got.dk, got.dv)):
        assert not gradient[..., 5, :].any()
        assert np.isfinite(gradient.astype(float)).all()


def test_a_gradient_beyond_its_dtype_is_infinite(xp):
    dout, q, k = np.full((2, 1), 6e4, "e"), np.zeros((2, 1), "e"), np.zeros((1, 1), "e")
    got, expected = check_elements(xp, dout, q, k, k)
    assert got.dv == np.inf
    assert fractions(-got.dv, expected.gradients.dv, expected.bounds.dv) == np.inf


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("dropout_p", "size"), [(0.5, 2e38), (0.999, 1e36)])
def test_what_comes_back_may_be_as_large_as_its_dtype_holds(xp, dtype, dropout_p, size):
    """Divided by 1 - dropout_p it would not be finite; the gradients are."""
    shape, dtype = (1, 1, 1000, 8), numpy_dtype(dtype)
    dout, v = np.full((1, 1, 4, 8), size, dtype), np.full(shape, 1e-10, dtype)
    q, k = np.zeros((1, 1, 4, 8), dtype), np.zeros(shape, dtype)
    check_arrays(xp, dout, q, k, v, dropout_p=dropout_p, dropout_seed=1)
