"""Calls that mean the same: one law each, on any input, on NumPy and on CuPy."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from laws import attend, cases

import cufa
from cufa.bounds import Exact
from cufa.testing import Case, assert_within_rounding


def head_axis(case: Case) -> int:
    """Axis of the heads in q, k and v, which have three or four."""
    return -2 if case.layout == "bshd" else -3


@given(case=cases(features=[], causal=st.sampled_from([True, "top_left"])))
def test_causal_is_a_mask(xp, fit, case):
    case = fit(case)
    diagonal = 0 if case.causal == "top_left" else case.seqlen_k - case.seqlen_q
    mask = xp.tri(case.seqlen_q, case.seqlen_k, diagonal, dtype=bool)
    assert_within_rounding(attend(xp, case, causal=False, mask=mask), case.exact())


@given(case=cases(features=[], window=st.tuples(st.integers(0, 300), st.integers(0, 300))))
def test_a_window_is_a_mask(xp, fit, case):
    case = fit(case)
    left, right = case.window
    diagonal = case.seqlen_k - case.seqlen_q
    shape = case.seqlen_q, case.seqlen_k
    mask = xp.tri(*shape, diagonal + right, dtype=bool)
    mask &= ~xp.tri(*shape, diagonal - left - 1, dtype=bool)
    assert_within_rounding(attend(xp, case, window=None, mask=mask), case.exact())


@given(case=cases(features=[], causal="top_left", rank=4, layout="bhsd"))
def test_top_left_is_causal_on_the_leading_square(xp, fit, case):
    case = fit(case)
    n = min(case.seqlen_q, case.seqlen_k)
    q, k, v = case.arrays(xp)
    out, lse = cufa.attention(
        q[:, :, :n],
        k[:, :, :n],
        v[:, :, :n],
        scale=case.scale,
        causal=True,
        return_lse=True,
        algorithm=case.algorithm,
    )
    expected = case.exact()
    square = Exact(*(a[:, :, :n] for a in expected[:4]), expected.dtype)
    assert_within_rounding((out, lse), square)


@given(case=cases(rank=st.sampled_from([3, 4])))
@example(  # a sink beside which all results are denormal
    case=Case(
        *(1, 3, 1, 2, 300, 16, 16),
        dtype="bfloat16",
        rank=3,
        layout="bhsd",
        causal="top_left",
        softcap=0.5,
        mask=(False, True, True, False),
        hidden=0.0,
        bias=(False, False, False, False),
        extra_dtype="float16",
        alibi=1,
        sink=True,
        algorithm="standard",
        seed=186,
    )
)
def test_grouped_heads_are_repeated_heads(xp, fit, case):
    case = fit(case)
    q, k, v = case.arrays(np)
    k, v = (np.repeat(a, case.group, axis=head_axis(case)) for a in (k, v))
    arrays = (xp.asarray(a) for a in (q, k, v))
    result = cufa.attention(*arrays, return_lse=True, **case.options(xp))
    assert_within_rounding(result, case.exact())


@given(case=cases(scale=st.sampled_from([-0.25, 0.5, 1.0])), factor=st.sampled_from([2, 4, 8]))
def test_a_factor_moves_between_the_queries_and_the_scale(xp, fit, case, factor):
    case = fit(case)
    q, _, _ = case.arrays(np)
    _, k, v = case.arrays(xp)
    options = {**case.options(xp), "scale": case.scale / factor}
    q = xp.asarray(q * q.dtype.type(factor))
    result = cufa.attention(q, k, v, return_lse=True, **options)
    assert_within_rounding(result, case.exact())


@given(case=cases(rank=4))
def test_the_layout_is_only_a_matter_of_names(xp, fit, case):
    case = fit(case)
    other = "bhsd" if case.layout == "bshd" else "bshd"
    options = {**case.options(xp), "layout": other}
    swapped = (a.swapaxes(1, 2) for a in case.arrays(xp))
    out, lse = cufa.attention(*swapped, return_lse=True, **options)
    assert_within_rounding((out.swapaxes(1, 2), lse), case.exact())


@given(case=cases(rank=3))
def test_leading_axes_may_be_missing(xp, fit, case):
    case = fit(case)
    whole = (a[None] for a in case.arrays(xp))
    out, lse = cufa.attention(*whole, return_lse=True, **case.options(xp))
    assert_within_rounding((out[0], lse[0]), case.exact())


@given(
    case=cases(
        features=["softcap", "bias", "alibi"],
        algorithm="auto",
        causal=st.booleans(),
        window=st.none() | st.tuples(st.integers(-1, 50), st.integers(-1, 50)),
        rank=4,
        layout="bhsd",
    )
)
def test_flash_attn_func_is_attention(xp, fit, case):
    case = fit(case)
    options = case.options(xp)
    result = cufa.flash_attn_func(
        *case.arrays(xp),
        attn_bias=options.get("bias"),
        alibi_slopes=options.get("alibi_slopes"),
        softmax_scale=case.scale,
        causal=case.causal,
        window_size=case.window or (-1, -1),
        softcap=case.softcap or 0.0,
        return_lse=True,
    )
    assert_within_rounding(result, case.exact())
