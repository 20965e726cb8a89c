"""What is true of attention on any input; each law holds on NumPy and on CuPy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cufa
from cufa import cpu, reference, testing
from cufa.bounds import Exact, exact
from cufa.testing import (
    CONTIGUOUS,
    FLOATS,
    Case,
    Memory,
    assert_within_rounding,
    memories,
    numpy_dtype,
    place,
    to_numpy,
)

#: Every law is one of each algorithm; the kernels of "auto" have more to be tried.
ALGORITHMS = st.sampled_from(["auto", "auto", "auto", "standard"])
cases = partial(testing.cases, algorithm=ALGORITHMS)
VARIES = st.tuples(*[st.booleans()] * 4)


def attend(xp, case: Case, **options):
    """Output and lse of one call, some options replaced."""
    options = {**case.options(xp), **options}
    return cufa.attention(*case.arrays(xp), return_lse=True, **options)


def assert_same_bits(a, b):
    """Equal bit for bit, NaN included."""
    a, b = to_numpy(a), to_numpy(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def key_axis(case: Case) -> int:
    """Axis of the keys in k and v."""
    return -3 if case.layout == "bshd" and case.rank > 2 else -2


def head_axis(case: Case) -> int:
    """Axis of the heads in q, k and v, which have three or four."""
    return -2 if case.layout == "bshd" else -3


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
        patch.setattr(cpu, "_BLOCK_SCORES", scores)
        patch.setattr(cpu, "_BLOCK_ROWS", rows)
        patch.setattr(cpu, "_SCORES_PER_THREAD", 1)
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
def test_merging_two_halves_of_the_keys_gives_the_whole(xp, fit, case, cut):
    case = fit(case)
    first, second = _split(case, np, cut), _split(case, np, cut, second=True)
    expected = _merged(exact(*first[0], **first[1]), exact(*second[0], **second[1]), case)
    parts = []
    for second in (False, True):
        arrays, options = _split(case, xp, cut, second)
        parts += cufa.attention(*arrays, return_lse=True, **options)
    result = cufa.merge(*parts, layout=case.layout)
    assert_within_rounding(result, expected)


def _split(case: Case, xp, cut: int, second: bool = False):
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


def _merged(a: Exact, b: Exact, case: Case) -> Exact:
    """The whole, with a bound made of those of the parts and of one more rounding."""
    whole = case.exact()
    base = np.where(whole.lse == -np.inf, 0, whole.lse)
    lse_bound = sum(np.where(part.lse == -np.inf, 0, part.lse_bound) for part in (a, b))
    rows = [np.exp(a.lse - base), np.exp(b.lse - base), lse_bound]
    if key_axis(case) == -3:
        rows = [r.swapaxes(-1, -2) for r in rows]
    weight_a, weight_b, moved = (r[..., None] for r in rows)
    return whole._replace(
        out_bound=whole.out_bound
        + weight_a * (a.out_bound + moved * abs(a.out))
        + weight_b * (b.out_bound + moved * abs(b.out)),
        lse_bound=whole.lse_bound + lse_bound,
    )


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


@given(case=cases(), poison=st.sampled_from([0.0, 3e4, np.inf]))
def test_what_lies_outside_the_views_never_matters(xp, fit, case, poison):
    case = fit(case)
    options = case.options(xp)
    out, lse = cufa.attention(*case.arrays(xp, poison=np.nan), return_lse=True, **options)
    other = cufa.attention(*case.arrays(xp, poison=poison), return_lse=True, **options)
    assert_same_bits(out, other[0])
    assert_same_bits(lse, other[1])


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
