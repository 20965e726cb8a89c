"""What is true of attention on any input; each law holds on NumPy and on CuPy.

test_laws_calls.py has calls that mean the same, test_laws_numbers.py numbers at the edge.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foreign import assert_same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laws import attend, cases

import cufa
from cufa import blocks
from cufa.bounds import exact, merged
from cufa.testing import (
    Case,
    Memory,
    assert_within_rounding,
    memories,
    numpy_dtype,
    place,
    to_numpy,
)

VARIES = st.tuples(*[st.booleans()] * 4)


def key_axis(case: Case) -> int:
    """Axis of the keys in k and v."""
    return -3 if case.layout == "bshd" and case.rank > 2 else -2


# Dot products of one number times another, 256 times over: their roundings are alike and add up.
@example(
    case=Case(
        head_dim=256,
        head_dim_v=16,
        scores="equal",
        q_memory=Memory(step=(1, 1, 1, 0)),
        seed=51,
    )
)
# Weights of 1e-7 beside a sink: rounded to float16 they have few digits left.
@example(
    case=Case(
        seqlen_q=1,
        seqlen_k=300,
        head_dim=16,
        head_dim_v=16,
        dtype="float16",
        rank=3,
        scores="negative",
        softcap=10.0,
        mask=(False,) * 4,
        hidden=0.0,
        alibi=1,
        sink=True,
    )
)
# Weights down to 1e-45 beside a sink: denormal numbers of float32.
@example(
    case=Case(
        group=2,
        seqlen_q=300,
        seqlen_k=3,
        head_dim=16,
        head_dim_v=16,
        rank=3,
        causal="top_left",
        softcap=0.5,
        alibi=1,
        extra_dtype="float16",
        sink=True,
    )
)
# A row whose only key is hidden by the bias: lse is the sink, to all digits.
@example(
    case=Case(
        seqlen_q=2,
        seqlen_k=1,
        head_dim=16,
        head_dim_v=16,
        dtype="float16",
        rank=2,
        bias=(False, False, True, False),
        hidden=0.1,
        extra_dtype="float64",
        sink=True,
        seed=2578,
    )
)
# Queries that repeat along the middle of the leading axes: `numpy.matmul` transposes its result.
@example(
    case=Case(
        batch=2,
        kv_heads=4,
        group=2,
        head_dim=8,
        layout="bshd",
        algorithm="standard",
        q_memory=Memory(order=(0, 2, 1, 3), step=(1, 0, 1, 1)),
        k_memory=Memory(order=(1, 2, 0, 3)),
    )
)
@settings(max_examples=3 * settings().max_examples)
@given(case=cases())
def test_attention_is_the_formula(xp, fit, case):
    case = fit(case)
    assert_within_rounding(attend(xp, case), case.exact())


@given(case=cases(seqlen_q=st.integers(1, 9), seqlen_k=st.integers(300, 3000)))
def test_a_few_queries_may_see_many_keys(xp, fit, case):
    case = fit(case)
    assert_within_rounding(attend(xp, case), case.exact())


@given(
    case=cases(max_elements=1 << 20, algorithm="auto"),
    scores=st.integers(30, 2000),
    rows=st.integers(1, 50),
)
def test_the_blocks_of_the_cpu_may_have_any_size(case, scores, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_SCORES", scores)
        patch.setattr(blocks, "_BLOCK_ROWS", rows)
        patch.setattr(blocks, "_SCORES_PER_THREAD", 1)
        result = attend(np, case)
    assert_within_rounding(result, case.exact())


@given(case=cases())
def test_the_same_call_gives_the_same_bits(xp, fit, case):
    case = fit(case)
    arrays, options = case.arrays(xp), case.options(xp)
    out, lse = cufa.attention(*arrays, return_lse=True, **options)
    again = cufa.attention(*arrays, return_lse=True, **options)
    assert_same_bits(out, again[0])
    assert_same_bits(lse, again[1])


@given(case=cases())
def test_asking_for_lse_does_not_change_the_output(xp, fit, case):
    case = fit(case)
    out = cufa.attention(*case.arrays(xp), **case.options(xp))
    assert_same_bits(out, attend(xp, case)[0])


@given(case=cases(features=["softcap", "sink"]))
def test_the_order_of_keys_does_not_matter(xp, fit, case):
    case = fit(case)
    q, k, v = case.arrays(np)
    order = np.random.default_rng(case.seed).permutation(case.seqlen_k)
    k, v = (np.take(a, order, axis=key_axis(case)) for a in (k, v))
    arrays = (xp.asarray(a) for a in (q, k, v))
    result = cufa.attention(*arrays, return_lse=True, **case.options(xp))
    assert_within_rounding(result, case.exact())


@given(case=cases(features=["mask", "bias"], dead_rows=True))
def test_the_order_of_keys_with_their_masks_does_not_matter(xp, fit, case):
    case = fit(case)
    q, k, v = case.arrays(np)
    options = case.options(np)
    order = np.random.default_rng(case.seed).permutation(case.seqlen_k)
    k, v = (np.take(a, order, axis=key_axis(case)) for a in (k, v))
    for name in options.keys() & {"mask", "bias"}:
        if options[name].shape[-1] != 1:
            options[name] = np.take(options[name], order, axis=-1)
        options[name] = xp.asarray(options[name])
    result = cufa.attention(*(xp.asarray(a) for a in (q, k, v)), return_lse=True, **options)
    assert_within_rounding(result, case.exact())


@given(
    case=cases(features=["mask", "softcap", "sink"], dead_rows=True),
    cut=st.integers(0, 300),
)
@example(  # beside a sink, weights of 1e-38: a card takes them for zero
    case=Case(
        group=2,
        seqlen_q=10,
        seqlen_k=1,
        head_dim=16,
        head_dim_v=16,
        dtype="bfloat16",
        rank=3,
        scores="large",
        hidden=0.0,
        dead_rows=True,
        extra_dtype="float16",
        sink=True,
        seed=3,
    ),
    cut=0,
)
def test_merging_two_halves_of_the_keys_gives_the_whole(xp, fit, case, cut):
    case = fit(case)
    results, parts = [], []
    for second in (False, True):
        arrays, options = _split(case, xp, cut, second)
        results += cufa.attention(*arrays, return_lse=True, **options)
        arrays, options = _split(case, np, cut, second)
        parts.append(exact(*arrays, **options))
    result = cufa.merge(*results, layout=case.layout)
    assert_within_rounding(result, merged(case.exact(), *parts, layout=case.layout))


def _split(case: Case, xp, cut: int, second: bool):
    """The call on the keys before or after a cut; a sink goes with those before."""
    keys = slice(cut, None) if second else slice(None, cut)
    q, k, v = case.arrays(xp)
    options = case.options(xp)
    if "mask" in options and options["mask"].shape[-1] != 1:
        options["mask"] = options["mask"][..., keys]
    if second:
        options.pop("sink", None)
    at = (..., keys, slice(None), slice(None)) if key_axis(case) == -3 else (..., keys, slice(None))
    return (q, k[at], v[at]), options


@given(
    case=cases(features=[], bias=VARIES, extra_dtype="float64"),
    constant=st.integers(-500, 500),
)
def test_a_constant_added_to_the_scores_only_shifts_lse(xp, fit, case, constant):
    case = replace(fit(case), extra_dtype="float64")
    options = case.options(np)
    shifted = exact(*case.arrays(np), **{**options, "bias": options["bias"] + constant})
    before = case.exact()
    result = attend(xp, case, bias=case.options(xp)["bias"] + constant)
    assert_within_rounding(result, shifted._replace(out=before.out, lse=before.lse + constant))


@given(case=cases(), poison=st.sampled_from([0.0, 3e4, np.inf]))
def test_what_lies_outside_the_views_never_matters(xp, fit, case, poison):
    case = fit(case)
    options = case.options(xp)
    out, lse = cufa.attention(*case.arrays(xp, poison=np.nan), return_lse=True, **options)
    other = cufa.attention(*case.arrays(xp, poison=poison), return_lse=True, **options)
    assert_same_bits(out, other[0])
    assert_same_bits(lse, other[1])


@given(case=cases(), memory=memories(repeat=False))
def test_a_call_writes_out_and_nothing_else(xp, fit, case, memory):
    case = fit(case)
    memory = replace(memory, step=(*memory.step[:3], 1))
    shape = (case.batch, case.heads, case.seqlen_q, case.head_dim_v)
    target = place(xp, np.full(shape, np.nan).astype(case.arrays(np)[0].dtype), memory)
    placed, options = case.placed(xp), case.options(xp)
    before = [to_numpy(p.raw).copy() for p in (*placed, target)]
    kept = {n: to_numpy(a).copy() for n, a in options.items() if hasattr(a, "shape")}

    out = case.caller_axes(target.array)
    arrays = (case.caller_axes(p.array) for p in placed)
    result, lse = cufa.attention(*arrays, out=out, return_lse=True, **options)

    assert result is out
    assert_within_rounding((out, lse), case.exact())
    outside = ~target.inside
    assert_same_bits(to_numpy(target.raw)[outside], before[3][outside])
    for p, raw in zip(placed, before[:3], strict=True):
        assert_same_bits(p.raw, raw)
    for name, values in kept.items():
        np.testing.assert_array_equal(to_numpy(options[name]), values)


@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(["float16", "bfloat16", "float32"]))
def test_the_error_is_at_most_twice_that_of_standard_attention(xp, seed, dtype):
    case = Case(seqlen_q=100, seqlen_k=200, dtype=dtype, seed=seed)
    expected = case.exact().out
    size = _rms(standard_attention(*case.arrays(np)) - expected)
    result = to_numpy(attend(xp, case)[0]).astype(float)
    ulp = np.spacing(abs(expected).max().astype(numpy_dtype(dtype))).astype(float)
    assert _rms(result - expected) <= 2 * size + 2 * ulp


def standard_attention(q, k, v):
    """Every intermediate result rounded to the dtype of `q`."""
    dtype = q.dtype

    def rounded(a):
        return a.astype(dtype).astype(np.float32)

    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    scores = rounded(rounded(q @ k.swapaxes(2, 3)) / np.float32(np.sqrt(q.shape[3])))
    p = rounded(np.exp(rounded(scores - scores.max(axis=3, keepdims=True))))
    return rounded(rounded(p / rounded(p.sum(axis=3, keepdims=True))) @ v)


def _rms(a):
    return np.sqrt(np.mean(np.square(a, dtype=float)))


@pytest.mark.gpu
@given(case=cases())
def test_numpy_and_cupy_agree(cupy, case):
    case = case.few_kernels()
    out, lse = attend(np, case)
    expected = case.exact()
    twice = expected._replace(
        out=out.astype(float),
        lse=lse.astype(float),
        out_bound=2 * expected.out_bound,
        lse_bound=2 * expected.lse_bound,
    )
    assert_within_rounding(attend(cupy, case), twice)
