"""What is true of the gradients of attention on any input; each law holds on NumPy and on CuPy.

test_backward.py has what is true of the calls.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa import Gradients, blocks, cpu_backward, reference
from cufa.bounds import fractions
from cufa.gradient_bounds import exact_gradients
from cufa.testing import CONTIGUOUS, assert_gradients_within_rounding, cases, to_numpy

SMALL = 1 << 20
DROPPED = st.sampled_from([0.0, 0.0, 0.1, 0.9])
#: Without weight that goes to no key, and with scores that a common shift of all keys shifts alike.
SHIFTING = [feature for feature in ("causal", "window", "mask", "bias", "alibi")]


def gradients_of(xp, case, through_lse=True, **options):
    """Of one call, some options replaced."""
    dout, dlse = case.back(xp)
    _, vjp = cufa.attention_vjp(*case.arrays(xp), **{**case.options(xp), **options})
    return on_host(vjp(dout, dlse if through_lse else None))


def on_host(gradients):
    """The same in NumPy's arrays."""
    return Gradients(*(None if a is None else to_numpy(a) for a in gradients))


def assert_within(got, want, *bounds):
    """`got` is as near to `want` as the sum of some bounds."""
    assert fractions(got, want, sum(bounds)).max(initial=0) <= 1


@settings(max_examples=3 * settings().max_examples)
@given(case=cases(dropout_p=DROPPED), through_lse=st.booleans())
def test_gradients_are_those_of_the_formula(xp, fit, case, through_lse):
    case = fit(case)
    got = gradients_of(xp, case, through_lse)
    assert_gradients_within_rounding(got, case.exact_gradients(through_lse))


@given(
    case=cases(max_elements=SMALL, dropout_p=DROPPED),
    scores=st.integers(30, 2000),
    rows=st.integers(1, 50),
    threads=st.integers(1, 5),
)
def test_blocks_and_threads_may_be_as_many_as_they_like(case, scores, rows, threads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_SCORES", scores)
        patch.setattr(blocks, "_BLOCK_ROWS", rows)
        patch.setattr(blocks, "_SCORES_PER_THREAD", 1)
        patch.setattr(blocks, "_processors", lambda: threads)
        got = gradients_of(np, case)
    assert_gradients_within_rounding(got, case.exact_gradients())


@given(case=cases(max_elements=SMALL, dropout_p=DROPPED), factor=st.sampled_from([-1, 2, -0.5, 8]))
def test_gradients_are_linear_in_what_comes_back(xp, fit, case, factor):
    case = fit(case)
    _, vjp = cufa.attention_vjp(*case.arrays(xp), **case.options(xp))
    dout, dlse = (a * a.dtype.type(factor) for a in case.back(xp))
    got = (None if a is None else a / a.dtype.type(factor) for a in on_host(vjp(dout, dlse)))
    assert_gradients_within_rounding(Gradients(*got), case.exact_gradients())


@given(case=cases(max_elements=SMALL, rank=4))
def test_the_layout_is_only_a_matter_of_names(xp, fit, case):
    case = fit(case)
    other = "bhsd" if case.layout == "bshd" else "bshd"
    dout, dlse = case.back(xp)
    turned = (a.swapaxes(1, 2) for a in case.arrays(xp))
    _, vjp = cufa.attention_vjp(*turned, **{**case.options(xp), "layout": other})
    got = vjp(dout.swapaxes(1, 2), dlse)
    back = got._replace(**{name: getattr(got, name).swapaxes(1, 2) for name in ("dq", "dk", "dv")})
    assert_gradients_within_rounding(back, case.exact_gradients())


@given(case=cases(max_elements=SMALL, rank=4, layout="bhsd", dtypes=["float32", "float64"]))
def test_gradients_of_grouped_heads_are_sums_over_repeated_heads(xp, fit, case):
    case = fit(case)
    q, k, v = case.arrays(xp)
    k, v = (xp.repeat(a, case.group, axis=1) for a in (k, v))
    dout, dlse = case.back(xp)
    _, vjp = cufa.attention_vjp(q, k, v, **case.options(xp))
    got = on_host(vjp(dout, dlse))
    dout, dlse = case.back(np)
    each = exact_gradients(dout, *map(to_numpy, (q, k, v)), dlse=dlse, **case.options(np))
    whole = case.exact_gradients()
    grouped = case.batch, case.kv_heads, case.group, case.seqlen_k

    def summed(a):
        return a.reshape(*grouped, a.shape[-1]).sum(axis=2, dtype=np.float64)

    assert_within(got.dq, whole.gradients.dq, whole.bounds.dq, each.bounds.dq)
    assert_within(summed(got.dk), whole.gradients.dk, whole.bounds.dk, summed(each.bounds.dk))
    assert_within(summed(got.dv), whole.gradients.dv, whole.bounds.dv, summed(each.bounds.dv))


halves = cases(
    max_elements=SMALL,
    features=["softcap"],
    seqlen_k=st.integers(2, 200),
    rank=4,
    layout="bhsd",
    dtypes=["float32", "float64"],
    v_size=1.0,  # or dout is so small that times a weight it is zero
)


@given(case=halves, cut=st.integers(0, 200))
def test_gradients_go_through_merge(xp, fit, case, cut):
    """Those of the two parts, with what merge hands to the output and the lse of each."""
    case = fit(case)
    q, k, v = case.arrays(xp)
    (dout, dlse), options, cut = case.back(xp), case.options(xp), cut % case.seqlen_k
    parts = [(k[:, :, cut_], v[:, :, cut_]) for cut_ in (slice(cut), slice(cut, None))]
    results = [cufa.attention_vjp(q, *kv, return_lse=True, **options) for kv in parts]
    out, lse = cufa.merge(*results[0][0], *results[1][0])
    whole, got, bounds = case.exact_gradients(), [], []
    for kv, ((out_, lse_), vjp) in zip(parts, results, strict=True):
        weight = xp.exp(lse_ - lse)
        of_lse = weight * ((dout * (out_ - out)).sum(-1) + dlse)
        of_out = weight[..., None] * dout
        got.append(on_host(vjp(of_out, of_lse)))
        exact = exact_gradients(
            *map(to_numpy, (of_out, q, *kv)), dlse=to_numpy(of_lse), **case.options(np)
        )
        bounds.append(exact.bounds)
    joined = (
        np.concatenate(pair, axis=2) for pair in ([g.dk for g in got], [b.dk for b in bounds])
    )
    assert_within(next(joined), whole.gradients.dk, whole.bounds.dk, next(joined))
    of_queries = got[0].dq.astype(np.float64) + got[1].dq
    assert_within(of_queries, whole.gradients.dq, *(b.dq for b in (whole.bounds, *bounds)))


@given(case=halves, cut=st.integers(0, 200))
def test_a_part_of_the_keys_has_its_share_with_the_output_of_the_whole(xp, fit, case, cut):
    case = fit(case)
    q, k, v = case.arrays(xp)
    (dout, dlse), options, cut = case.back(xp), case.options(xp), cut % case.seqlen_k
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    got = [
        on_host(
            cufa.attention_backward(
                dout, q, k[:, :, part], v[:, :, part], out, lse, dlse=dlse, **options
            )
        )
        for part in (slice(cut), slice(cut, None))
    ]
    whole = case.exact_gradients()
    for name in ("dk", "dv"):
        joined = np.concatenate([getattr(part, name) for part in got], axis=2)
        assert_within(joined, getattr(whole.gradients, name), getattr(whole.bounds, name))
    of_queries = got[0].dq.astype(np.float64) + got[1].dq
    assert_within(of_queries, whole.gradients.dq, 2 * whole.bounds.dq)


@given(case=cases(max_elements=SMALL, rank=4, layout="bhsd", hidden=0.9))
def test_what_is_hidden_has_no_gradient(xp, fit, case):
    case = fit(case)
    shown = {n: a for n, a in case.options(np).items() if n not in ("sink", "algorithm")}
    visible = reference.scores(*case.arrays(np)[:2], **shown) > -np.inf
    got = gradients_of(xp, case)
    by_group = (case.batch, case.kv_heads, case.group, case.seqlen_k)
    unseen = ~visible.any(axis=2).reshape(by_group).any(axis=2)
    assert not got.dk[unseen].any()
    assert not got.dv[unseen].any()
    assert not got.dq[~visible.any(axis=3)].any()


@given(case=cases(max_elements=SMALL, rank=4, layout="bhsd", features=SHIFTING, v_size=1.0))
def test_a_shift_of_all_keys_changes_nothing(xp, fit, case):
    """Rows of dS sum to zero, and with them the gradients of the keys."""
    case = fit(case)
    got = gradients_of(xp, case, through_lse=False)
    expected = case.exact_gradients(through_lse=False)
    total, bound = got.dk.sum(axis=2, dtype=np.float64), expected.bounds.dk.sum(axis=2)
    assert_within(total, 0 * total, bound)


@given(case=cases(max_elements=SMALL, features=SHIFTING, v_size=1.0), along=st.sampled_from([0, 2]))
def test_a_bias_that_shifts_whole_rows_has_no_gradient(xp, fit, case, along):
    case = fit(case)
    rng = np.random.default_rng(case.seed)
    bias = rng.standard_normal((case.seqlen_q if along else 1, 1)).astype(case.extra_dtype)
    dout, options = case.back(np)[0], {**case.options(np), "bias": bias}
    expected = exact_gradients(dout, *case.arrays(np), **options)
    got = gradients_of(xp, case, through_lse=False, bias=xp.asarray(bias))
    assert got.dbias.shape == bias.shape
    assert_within(got.dbias, np.zeros(bias.shape), expected.bounds.dbias)


@given(case=cases(max_elements=SMALL, v_size=1.0))
def test_every_element_of_a_gradient_is_written(case):
    def poisoned(shape, dtype):
        return np.full(shape, np.nan, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_backward, "host_empty", poisoned)
        got = gradients_of(np, case)
    assert_gradients_within_rounding(got, case.exact_gradients())


@given(
    case=cases(
        max_elements=SMALL,
        scores="normal",
        v_size=1.0,
        rank=4,
        layout="bhsd",
        q_memory=CONTIGUOUS,
        k_memory=CONTIGUOUS,
    ),
    size=st.floats(1, 4),
)
def test_huge_scores_give_no_nan(xp, fit, case, size):
    """Up to 1e30 in float32, where lse is no longer near to any score but the largest."""
    case = fit(case)
    most = 10.0 ** (size * (0.7 if case.dtype == "float16" else 3.5))
    q, k, v = case.arrays(xp)
    q, k = ((a.astype("float64") * most).astype(a.dtype) for a in (q, k))
    (dout, dlse), options = case.back(xp), case.options(xp)
    # Its scores are rounded otherwise than those of the backward pass.
    out, lse = cufa.attention(q, k, v, return_lse=True, algorithm="standard", **options)
    got = cufa.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert not any(np.isnan(a).any() for a in on_host(got) if a is not None)


@given(case=cases(max_elements=SMALL, dead_rows=True, mask=st.just((True,) * 4), sink=False))
def test_what_comes_back_to_a_row_without_keys_goes_nowhere(xp, fit, case):
    case = fit(case)
    (_, lse), vjp = cufa.attention_vjp(*case.arrays(xp), return_lse=True, **case.options(xp))
    dout, dlse = (a.copy() for a in case.back(xp))
    rows = lse == -np.inf
    dlse[rows] = np.nan
    dout[rows.swapaxes(-1, -2) if case.layout == "bshd" and case.rank > 2 else rows] = np.nan
    assert_gradients_within_rounding(vjp(dout, dlse), case.exact_gradients())


@given(
    case=cases(
        dtypes=["float32"],
        head_dims=st.sampled_from([32, 64]),
        features=[],
        scores="normal",
        scale=None,
        v_size=1.0,
        seqlen_q=st.integers(8, 32),
        seqlen_k=st.integers(8, 32),
        batch=1,
        group=1,
        q_memory=CONTIGUOUS,
        k_memory=CONTIGUOUS,
        v_memory=CONTIGUOUS,
    ),
    name=st.sampled_from(["dq", "dk", "dv"]),
)
def test_the_bounds_tell_float32_from_bfloat16(xp, fit, case, name):
    """In short sums, whose errors do not pile up as the bounds must allow."""
    case = fit(case)
    got, (want, bounds, _) = gradients_of(xp, case), case.exact_gradients()
    rounded = getattr(got, name).view(np.uint32) & 0xFFFF0000
    assert fractions(rounded.view(np.float32), getattr(want, name), getattr(bounds, name)).max() > 1
