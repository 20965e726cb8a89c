"""Inputs that broke other attention libraries, and what is right here.

known_faults.md says what the ids, such as LG2, stand for; test_known_faults_numbers.py has those
that lie in the numbers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import case, check, check_arrays

import cufa
from cufa.bounds import exact
from cufa.testing import (
    Memory,
    assert_within_rounding,
    cases,
    place,
    to_numpy,
)

# What is right here is right for each algorithm.
pytestmark = pytest.mark.usefixtures("each_algorithm")

INF = math.inf
FLOAT32_MIN = float(np.finfo("float32").min)
#: Every element of k or v stands next to the same one of another head.
TRANSPOSED = Memory(order=(0, 2, 1, 3))


def slopes(heads):
    """The geometric slopes of the ALiBi paper."""
    return (2.0 ** (-8 * np.arange(1, heads + 1) / heads)).astype("float32")


# fmt: off
PROBLEMS = {
    # causal alignment
    "CA1":          case(2048, 1024, causal=True, heads=1),
    "CA1 short":    case(256, 128, causal=True),
    "CA2 wide":     case(2, 5, causal=True, head_dim=16, dtype="float32"),
    "CA2 tall":     case(5, 2, causal=True, head_dim=16, dtype="float32"),
    "CA3 decode":   case(1, 137, causal=True, heads=8, kv_heads=2, batch=2),
    "CA3":          case(130, 257, causal=True, kv_heads=1),
    # windows
    "WI2 left":     case(64, window=(8, 0)),
    "WI2 causal":   case(64, window=(4, 7), causal=True),
    "WI4 5 0":      case(133, window=(5, 0), kv_heads=1, head_dim=32, dtype="float32"),
    "WI4 0 5":      case(133, window=(0, 5), kv_heads=1, head_dim=32, dtype="float32"),
    "WI4 -1 3":     case(133, window=(-1, 3), kv_heads=1, head_dim=32, dtype="float32"),
    "WI4 4 -1":     case(133, window=(4, -1), kv_heads=1, head_dim=32, dtype="float32"),
    "WI5 grouped":  case(203, window=(17, 0), causal=True, heads=6, kv_heads=2, batch=2),
    "WI5 tall":     case(90, 40, window=(3, 2), kv_heads=1, head_dim=32),
    "WI5 wide":     case(20, 300, window=(9, 0), causal=True, kv_heads=1, head_dim=32),
    # softcap
    "SO1":          case(100, softcap=10.0, causal=True, heads=4, kv_heads=2, scale=2.0),
    "SO1 flat":     case(64, softcap=30.0, heads=1, dtype="float32", scale=112.5),
    "SO2":          case(40, 56, softcap=2.0, head_dim=32, dtype="float32", scale=1.6,
                         bias=(False, False, True, True), hidden=0.4, dead_rows=True),
    "SO3":          case(77, softcap=20.0, window=(30, 0), causal=True, heads=4, kv_heads=2,
                         scale=1.5),
    # masks: a bias of -inf, whole rows of it too
    "MA2":          case(33, 40, batch=2, head_dim=32, dtype="float32", hidden=0.3, dead_rows=True,
                         bias=(True, False, True, True)),
    "MA3":          case(33, 40, batch=2, head_dim=32, dtype="bfloat16", extra_dtype="bfloat16",
                         bias=(True, False, True, True), hidden=0.3, dead_rows=True),
    "BI3":          case(30, 41, batch=3, heads=4, kv_heads=2, head_dim=32, dtype="float32",
                         bias=(True,) * 4, hidden=0.0, causal=True),
    # grouped heads
    "GR1":          case(100, 70, batch=2, heads=8, kv_heads=2, head_dim=32, dtype="float32"),
    "GR1 wide v":   case(65, head_dim_v=128),
    "GR2":          case(20, heads=6, kv_heads=2, head_dim=32, dtype="float32"),
    "GR3 24/8":     case(5, 77, batch=2, heads=24, kv_heads=8, causal=True),
    "GR3 10/2":     case(5, 77, batch=2, heads=10, kv_heads=2, causal=True),
    "GR3 28/4":     case(5, 77, batch=2, heads=28, kv_heads=4, causal=True),
    "GR3 64/1":     case(5, 77, batch=2, heads=64, kv_heads=1, causal=True),
    "GR3 71/1":     case(5, 77, batch=2, heads=71, kv_heads=1, causal=True),
    "GR4":          case(128, heads=8, kv_heads=2, causal=True),
    # lengths and head dims
    "LE1":          case(192, heads=8, head_dim=16, dtype="bfloat16"),
    "LE2 1061":     case(1061, heads=1),
    "LE2 1066":     case(1066, heads=1, causal=True),
    "LE2 33":       case(33, heads=1),
    "LE2 129":      case(129, heads=1, causal=True),
    "LE5 160":      case(97, batch=2, head_dim=160),
    "LE5 192":      case(97, batch=2, head_dim=192, causal=True),
    "LE5 224":      case(97, batch=2, head_dim=224, dtype="bfloat16"),
    "LE5 256":      case(97, batch=2, head_dim=256, dtype="bfloat16", causal=True),
    "LE6 40":       case(203, head_dim=40),
    "LE6 72":       case(203, head_dim=72),
    "LE6 80":       case(203, head_dim=80, causal=True),
    "LE6 96":       case(203, head_dim=96),
    "LE6 112":      case(203, head_dim=112),
    "LE7":          case(1, 20, batch=4, heads=32, head_dim=128, layout="bhsd"),
    # empty inputs
    "EM1":          case(5, 0, batch=2, heads=4, head_dim=32),
    "EM1 causal":   case(5, 0, batch=2, heads=4, head_dim=32, causal=True),
    "EM2":          case(0, 0, batch=7, heads=9, head_dim=7, causal=True),
    "EM2 no query": case(0, 9, batch=2, head_dim=16),
    "EM2 no batch": case(3, 9, batch=0, head_dim=16),
    # lse
    "LS1 LS2":      case(77, 130, batch=2, heads=4, kv_heads=2),
    # huge and negative scores, seen in the largest component
    "LG1":          case(1, heads=1, head_dim=16, scale=9 / 4),
    "LG3":          case(88, 448, heads=14, kv_heads=2, causal=True, dtype="bfloat16",
                         scores="negative"),
    "LG3 float32":  case(88, 448, heads=14, kv_heads=2, causal=True, dtype="float32",
                         scores="negative"),
    "LG4 64":       case(64, heads=1, dtype="bfloat16", scores="negative", hidden=0.0,
                         mask=(False, False, True, True)),
    "LG4 192":      case(192, heads=1, dtype="bfloat16", scores="negative", hidden=0.0,
                         mask=(False, False, True, True)),
    "LG4 704":      case(704, heads=1, dtype="bfloat16", scores="negative", hidden=0.0,
                         mask=(False, False, True, True)),
    "LG5":          case(256, 77, scores="negative"),
    # precision
    "PR1":          case(128, heads=1, head_dim=32, dtype="float32"),
    "PR2":          case(128, heads=1, head_dim=32, dtype="float32", causal=True),
    "PR4 zero":     case(70, 90, head_dim=32, dtype="float32", scale=0.0),
    "PR4 negative": case(70, 90, head_dim=32, dtype="float32", scale=-0.3),
    "PR4 masked":   case(70, 90, head_dim=32, dtype="float32", scale=-0.3, causal=True, hidden=0.5,
                         mask=(False, False, True, True), bias=(False, False, True, True)),
    # strides: k and v of one head for all, slices of one projection, transposed, reversed
    "ST1":          case(9, 97, heads=8, head_dim=128, dtype="bfloat16", hidden=0.2,
                         mask=(False, False, True, True), k_memory=Memory(step=(1, 0, 1, 1)),
                         v_memory=Memory(step=(1, 0, 1, 1))),
    "ST6":          case(40, 53, batch=2, head_dim=32, causal=True,
                         k_memory=Memory(step=(1, 1, -1, 1)), v_memory=Memory(step=(1, 1, -1, 1))),
    "ST7 last":     case(40, head_dim=32, dtype="float32", q_memory=Memory(step=(1, 1, 1, -1)),
                         k_memory=Memory(step=(1, 1, 1, -1))),
    "ST7 inner":    case(40, head_dim=40, dtype="float32", q_memory=Memory(order=(0, 1, 3, 2)),
                         k_memory=Memory(order=(0, 1, 3, 2)), v_memory=Memory(order=(3, 2, 1, 0))),
    "ST7 bias":     case(40, head_dim=32, dtype="float32", bias=(False, True, True, True),
                         hidden=0.0, extra_memory=Memory(order=(0, 1, 3, 2))),
    "ST4":          case(50, q_memory=Memory(step=(1, 1, 1, 2))),
    "ST8":          case(43, batch=3, heads=4, head_dim=32, dtype="float32", bias=(True,) * 4,
                         hidden=0.0),
    "ST8 odd":      case(43, batch=3, heads=4, head_dim=32, bias=(True,) * 4, hidden=0.0,
                         extra_memory=Memory(offset=1), q_memory=Memory(offset=1),
                         k_memory=Memory(offset=1), v_memory=Memory(offset=1)),
    # types
    "TY1":          case(50, 60, dtype="bfloat16"),
    "TY4 float32":  case(50, 60, dtype="float32"),
    "TY4 float64":  case(37, 50, batch=2, heads=4, kv_heads=2, head_dim=24, dtype="float64",
                         causal=True, window=(20, -1), softcap=5.0, alibi=1, hidden=0.0,
                         bias=(False, True, True, True), extra_dtype="float64"),
}
# fmt: on


@pytest.mark.parametrize("problem", [pytest.param(p, id=name) for name, p in PROBLEMS.items()])
def test_the_answer_is_the_formula(xp, problem):
    check(xp, problem)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "options", "seen"),
    [
        pytest.param(2, 5, {"causal": True}, [4, 5], id="CA2 wide"),
        pytest.param(5, 2, {"causal": True}, [0, 0, 0, 1, 2], id="CA2 tall"),
        pytest.param(1, 9, {"causal": True}, [9], id="CA3"),
        pytest.param(6, 6, {"window": (3, 0)}, [1, 2, 3, 4, 4, 4], id="WI1"),
        pytest.param(4, 4, {"window": (0, 0)}, [1, 1, 1, 1], id="WI4"),
    ],
)
def test_each_row_sees_this_many_keys(xp, seqlen_q, seqlen_k, options, seen):
    q, k = xp.zeros((seqlen_q, 8), "float32"), xp.zeros((seqlen_k, 8), "float32")
    v = xp.eye(seqlen_k, dtype="float32")
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal((to_numpy(out) > 0).sum(-1), seen)
    np.testing.assert_allclose(np.exp(to_numpy(lse)), seen, rtol=1e-6)


def test_wi4_a_window_of_nothing_but_itself_returns_the_values(xp):
    problem = case(100, window=(0, 0), head_dim=32)
    out = cufa.attention(*problem.arrays(xp), **problem.options(xp))
    np.testing.assert_array_equal(to_numpy(out), problem.arrays(np)[2])


# AL1, AL2, AL3
@pytest.mark.parametrize(
    ("problem", "alibi_slopes"),
    [
        pytest.param(case(7, 40, heads=8, head_dim=32, dtype="float32"), slopes(8), id="AL1 cross"),
        pytest.param(
            case(1, 137, batch=2, heads=8, kv_heads=2, causal=True), slopes(8), id="AL1 decode"
        ),
        pytest.param(
            case(90, heads=4, head_dim=32, dtype="float32", causal=True), slopes(4), id="AL2"
        ),
        pytest.param(
            case(50, batch=3, heads=4, kv_heads=2, head_dim=32, dtype="float32"),
            np.stack([slopes(4), -slopes(4), 0 * slopes(4)]),
            id="AL3 batch",
        ),
        pytest.param(case(120, heads=4, head_dim=32, window=(11, 30)), slopes(4), id="AL3 window"),
    ],
)
def test_alibi_counts_from_the_last_key(xp, problem, alibi_slopes):
    check(xp, problem, alibi_slopes=alibi_slopes)


@pytest.mark.parametrize(
    ("problem", "bias"),
    [
        pytest.param(
            case(40, 700, head_dim=32, dtype="float32"),
            np.where(np.arange(700) < 600, -INF, 0).astype("float32"),
            id="MA1 first 600 keys",
        ),
        pytest.param(
            case(441, heads=1, dtype="float32"),
            np.where(np.arange(441) < 128, FLOAT32_MIN, 0).astype("float32"),
            id="MA4 lowest finite number",
        ),
        pytest.param(
            case(1025, heads=1, dtype="bfloat16", causal=True),
            np.subtract.outer(np.arange(1025), np.arange(1025)).astype("float32"),
            id="BI1 growing distance",
        ),
        pytest.param(
            case(30, 66, kv_heads=1, head_dim=32),
            np.where(np.isin(np.arange(66), [7, 65]), -INF, 0).astype("float32"),
            id="MA2 a key that nobody sees",
        ),
    ],
)
def test_a_bias_may_be_a_mask(xp, problem, bias):
    check(xp, problem, bias=bias)


def test_ma1_boolean_masks_agree_with_infinite_biases(xp):
    check(xp, case(40, 700, head_dim=32, dtype="float32"), mask=np.arange(700) >= 600)


@pytest.mark.parametrize("side", [0, 1], ids=["MA5 result", "MA5 reference"])
def test_a_nan_on_one_side_fails_the_comparison(side):
    expected = case(3, 4).exact()
    out = expected.out.astype("float16")
    if side == 0:
        out[0, 0, 0, 0] = np.nan
    else:
        expected.out[0, 0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="out is wrong in 1 of 384 elements"):
        assert_within_rounding(out, expected)


def test_bi4_many_batches_share_a_bias(xp):
    batch = 831 if xp is not np else 101
    problem = case(43, batch=batch, heads=32, head_dim=8, dtype="float32", hidden=0.0)
    bias = np.random.default_rng(0).standard_normal((1, 32, 43, 43)).astype("float32")
    q, k, v = problem.arrays(np)
    result = cufa.attention(
        *(xp.asarray(a) for a in (q, k, v)),
        bias=xp.broadcast_to(xp.asarray(bias), (batch, 32, 43, 43)),
        layout="bshd",
        return_lse=True,
    )
    last = exact(q[-2:], k[-2:], v[-2:], bias=bias, layout="bshd")
    assert_within_rounding(tuple(a[-2:] for a in result), last)


def test_le2_a_long_odd_length(xp):
    problem = case(4250, heads=1)
    q, k, v = problem.arrays(np)
    result = cufa.attention(*problem.arrays(xp), return_lse=True, layout="bshd")
    rows = slice(None, None, 170)
    assert_within_rounding(
        (result[0][:, rows], result[1][..., rows]), exact(q[:, rows], k, v, layout="bshd")
    )


@given(
    problem=cases(
        features=[],
        dtype="float16",
        seqlen_q=1,
        seqlen_k=st.integers(128, 227),
        kv_heads=16,
        group=1,
        head_dim=64,
        head_dim_v=64,
        rank=4,
        causal=True,
        k_memory=TRANSPOSED,
        v_memory=TRANSPOSED,
    )
)
def test_le3_a_growing_cache_is_never_read_past_its_end(xp, problem):
    check(xp, problem)


def test_le4_all_components_of_the_head_count(xp):
    q, k, v = case(512, batch=3, head_dim=128).arrays(np)
    q[..., :64] = k[..., :64] = 0
    rows = slice(None, None, 100)
    result = cufa.attention(*(xp.asarray(a) for a in (q, k, v)), layout="bshd", return_lse=True)
    assert_within_rounding(
        (result[0][:, rows], result[1][..., rows]), exact(q[:, rows], k, v, layout="bshd")
    )


def test_le6_four_calls_give_the_same_bits(xp):
    problem = case(512, heads=4, head_dim=72)
    first, *others = [cufa.attention(*problem.arrays(xp), layout="bshd") for _ in range(4)]
    assert all((to_numpy(first) == to_numpy(other)).all() for other in others)
    assert np.isfinite(to_numpy(first)).all()


# LS1
def test_lse_is_in_natural_log(xp):
    q, k = xp.zeros((1, 8), "float32"), xp.zeros((100, 8), "float32")
    _, lse = cufa.attention(q, k, k, return_lse=True)
    np.testing.assert_allclose(to_numpy(lse), [math.log(100)], rtol=1e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_ls5_merging_two_empty_parts_is_empty(xp, layout):
    out = xp.zeros((2, 3, 3, 4), "float32")
    lse = xp.full((2, 3, 3), -INF, "float32")
    merged = cufa.merge(out, lse, out, lse, layout=layout)
    np.testing.assert_array_equal(to_numpy(merged[0]), 0)
    np.testing.assert_array_equal(to_numpy(merged[1]), -INF)


@pytest.mark.parametrize("empty", [0, 1])
def test_ls5_merging_with_an_empty_part_is_the_other(xp, empty):
    problem = case(6, 90, head_dim=32, dtype="float32")
    out, lse = cufa.attention(*problem.arrays(xp), layout="bshd", return_lse=True)
    parts = [(out, lse), (xp.zeros_like(out), xp.full_like(lse, -INF))]
    merged = cufa.merge(*parts[empty], *parts[1 - empty], layout="bshd")
    np.testing.assert_array_equal(to_numpy(merged[0]), to_numpy(out))
    np.testing.assert_array_equal(to_numpy(merged[1]), to_numpy(lse))


# ST2
def test_q_k_and_v_may_be_heads_of_one_projection(xp):
    values = np.random.default_rng(0).standard_normal((70, 1, 18, 64)).astype("float16")
    heads = values.transpose(1, 0, 2, 3)
    q, k, v = heads[:, :, :16], heads[:, :, 16:17], heads[:, :, 17:]
    check_arrays(xp, q, k, v, causal=True, layout="bshd")


# ST2: one buffer of q, k and v along the last axis
def test_q_k_and_v_may_lie_side_by_side(xp):
    values = np.random.default_rng(0).standard_normal((2, 50, 4, 3 * 40)).astype("float16")
    q, k, v = values[..., :40], values[..., 40:80], values[..., 80:]
    check_arrays(xp, q, k, v, causal=True, layout="bshd")


# ST5
def test_out_has_strides_of_its_own(xp):
    problem = case(32, batch=2, heads=4, kv_heads=1, head_dim=128)
    out = place(xp, np.zeros((2, 4, 32, 128), "float16"), Memory(order=(1, 2, 0, 3))).array
    out = out.swapaxes(1, 2)
    result = cufa.attention(*problem.arrays(xp), layout="bshd", out=out)
    assert result is out
    assert_within_rounding(out, problem.exact())


@pytest.mark.parametrize("scale", [1, np.float32(1), np.float64(1), np.int64(1), np.array(1.0)])
def test_ty2_a_scale_may_be_any_kind_of_number(xp, scale):
    problem = case(30, 40, dtype="float32", scale=1.0)
    result = cufa.attention(*problem.arrays(xp), return_lse=True, layout="bshd", scale=scale)
    assert_within_rounding(result, problem.exact())


@pytest.mark.parametrize("window", [[3, 0], (np.int32(3), np.uint8(0)), (3, False)])
def test_ty2_a_window_may_be_any_pair_of_integers(xp, window):
    out = cufa.attention(*case(30, 40).arrays(xp), window=window, layout="bshd")
    assert_within_rounding(out, case(30, 40, window=(3, 0)).exact())


@pytest.mark.parametrize("shape", [(0, 2, 5, 300), (3, 0, 5, 300), (3, 2, 0, 300)])
def test_an_empty_result_needs_no_kernel(xp, shape):
    q = xp.zeros(shape, "float32")
    out, lse = cufa.attention(q, q, q, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:3]
    mine = xp.empty(shape, "float32")
    assert cufa.attention(q, q, q, out=mine) is mine
