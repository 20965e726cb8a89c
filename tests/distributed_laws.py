"""Laws of attention on several ranks; `distributed_ranks.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed_jobs import (
    Places,
    backward,
    differing,
    differing_backward,
    forward,
    layer,
    layer_with,
)
from gradient_parts import largest_sums
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_problems import LayerCase, formula, layer_cases

import cufa
from cufa import testing
from cufa.bounds import exact, fractions, merged, smallest_normal, spacing
from cufa.distributed.calls import axis_of
from cufa.errors import (
    ArgumentError,
    DTypeError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from cufa.gradients import Gradients
from cufa.testing import Case, assert_gradients_within_rounding, assert_within_rounding

FEATURES = ("causal", "window", "alibi", "softcap", "sink")
#: Many ranks share few processors here, and each example is many calls.
few = settings(max_examples=max(8, settings().max_examples // 4))


@st.composite
def problems(draw: st.DrawFn, **fixed: Any) -> tuple[Case, Any, Any, bool]:
    """Problems, and where ranks begin and end, in fractions of the sequences."""
    causal = st.sampled_from([False, True, True, "top_left"])  # which most of it is about
    fixed = {"causal": causal, **fixed}
    case = draw(testing.cases(features=FEATURES, max_elements=1 << 16, **fixed))
    if case.alibi and case.causal:  # about one diagonal
        case = replace(case, causal=True)
    cuts = st.lists(
        st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=3, max_size=3
    )
    return case, draw(cuts), draw(cuts), draw(st.booleans())


def places_of(problem: Any, size: int) -> Places:
    case, *cuts, zigzag = problem
    if zigzag:
        return Places(None, None)
    ends = [
        (*sorted(int(cut * seqlen) for cut in of[: size - 1]), seqlen)
        for of, seqlen in zip(cuts, (case.seqlen_q, case.seqlen_k), strict=True)
    ]
    return Places(*ends)


def results(parts: list[Any]) -> list[Any]:
    """What the ranks returned, if none raised."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    return parts


functions = pytest.mark.parametrize("function", ["ring_attention", "head_parallel_attention"])


@functions
@few
@given(problem=problems(algorithm=st.sampled_from(["auto", "auto", "standard"])))
def test_attention_over_ranks_agrees_with_the_formula(ranks, function, problem):
    check_forward(ranks, function, problem)


def check_forward(ranks: Any, function: str, problem: Any) -> None:
    case, places = ranks.fit(problem[0]), places_of(problem, ranks.size)
    both = results(ranks(forward, function, case, places))
    out = places.joined([out for out, _ in both], axis_of(case.layout, case.rank))
    lse = places.joined([lse for _, lse in both], -1)
    assert_within_rounding((out, lse), merged_bounds(case, places, ranks.size))


@functions
@few
@given(problem=problems())
def test_gradients_over_ranks_agree_with_the_formula(ranks, function, problem):
    check_backward(ranks, function, problem)


def check_backward(ranks: Any, function: str, problem: Any) -> None:
    case, places = ranks.fit(problem[0]), places_of(problem, ranks.size)
    whole = case.exact()
    wide = "float64" if case.dtype == "float64" else "float32"
    with np.errstate(over="ignore"):
        saved = whole.out.astype(whole.dtype), whole.lse.astype(wide)
    parts = results(ranks(backward, function, case, places, *saved))
    axis = axis_of(case.layout, case.rank)
    dq, dk, dv = (places.joined([part[n] for part in parts], axis) for n in range(3))
    dsink = parts[0].dsink
    for part in parts[1:]:
        np.testing.assert_array_equal(part.dsink, dsink)
    expected = case.exact_gradients()
    more = more_roundings(case, 2 * ranks.size)
    bounds = expected.bounds
    bounds = bounds._replace(**{n: getattr(bounds, n) + more[n] for n in more})
    got = Gradients(dq, dk, dv, None, dsink)
    assert_gradients_within_rounding(got, expected._replace(bounds=bounds))


sloping = problems(
    alibi=st.sampled_from([1, 2]),
    causal=st.booleans(),
    seqlen_q=st.integers(8, 60),
    seqlen_k=st.integers(8, 60),
    rank=4,
    batch=st.integers(1, 2),
)


@few
@given(problem=sloping)
def test_the_distances_of_alibi_are_those_of_the_whole(ranks, problem):
    check_forward(ranks, "ring_attention", problem)
    check_backward(ranks, "ring_attention", problem)


#: Problems of layers, to be made `divided`.
layers = partial(
    layer_cases, features=["causal", "window", "mask", "alibi", "softcap", "sink"], dropout_p=0.0
)


def divided(ranks: Any, problem: LayerCase) -> LayerCase:
    """With as many more heads, so that the ranks can divide them."""
    more = ranks.size * problem.case.kv_heads
    return ranks.fit(replace(problem, case=replace(problem.case, kv_heads=more)))


@few
@given(problem=layers())
def test_a_layer_with_divided_heads_is_the_formula(ranks, problem):
    problem = divided(ranks, problem)
    (y, _), *others = results(ranks(layer, problem))
    for other, _ in others:
        np.testing.assert_array_equal(other, y)
    whole, (params, x, context) = problem.layer, problem.arrays(np)
    options = problem.options(np)
    q, k, v = whole.project(params, x, context, offset=options.pop("offset"))
    out = abs(cufa.attention(q, k, v, layout="bshd", **options).astype(np.float64))
    size = out.reshape(*x.shape[:-1], len(params["wo"])) @ abs(params["wo"].astype(np.float64))
    unit, least = (spacing(x.dtype, value) / 2 for value in (1, 0))
    of_parts = ranks.size * (2 * unit * (size + abs(params.get("bo", 0.0))) + least)
    want = formula(problem)
    assert fractions(y, want.exact, want.off + of_parts).max(initial=0) <= 1


@few
@given(problem=layers(dtypes=["float64"], extra_dtype="float64"))
def test_gradients_of_divided_heads_are_parts_of_those_of_the_whole(ranks, problem):
    problem = divided(ranks, problem)
    found = [gradients for _, gradients in results(ranks(layer, problem))]
    params, x, context = problem.arrays(np)
    _, vjp = problem.layer.vjp(params, x, context, **problem.options(np))
    whole = vjp(problem.back(np))
    for name, want in whole.dparams.items():
        parts = [gradients.dparams[name] for gradients in found]
        axis = -1 if name in ("wq", "bq", "wk", "bk", "wv", "bv") else 0
        assert_near(parts[0] if name == "bo" else np.concatenate(parts, axis), want)
    for gradients in found:
        for name in ("dx", "dcontext", "dsink"):
            want = getattr(whole, name)
            assert (want is None) == (getattr(gradients, name) is None)
            if want is not None:
                assert_near(getattr(gradients, name), want)


def assert_near(got: Any, want: Any) -> None:
    """The same but for rounding in float64 of sums of some thousand numbers of size 1."""
    assert got.shape == want.shape
    assert (abs(got - want) <= 1e-9 * (1 + abs(want).max(initial=0))).all()


#: What the last rank gives in place of a float32 array of shape (2, 8, 16) and of no option, the
#: error that all get, and what its message names.
# fmt: off
WRONG = [
    ({"head_dim": 8},           ShapeError,       "head_dim is 8 on rank {} and 16 on rank 0"),
    ({"heads": 4},              ShapeError,       "heads is 4 on rank {} and 2 on rank 0"),
    ({"dtype": "float64"},      DTypeError,       "dtype of q is 'float64' on rank {}"),
    ({"causal": "top_left"},    ArgumentError,    "causal is 'top_left' on rank {}"),
    ({"window": (1, 2)},        ArgumentError,    "window is [1, 2] on rank {} and None on rank 0"),
    ({"split": "zigzag"},       ArgumentError,    "split is 'zigzag' on rank {}"),
    ({"function": "head_parallel_attention"},
                                ArgumentError,    "rank {} is in head_parallel_attention and rank"),
]
#: What it cannot give: its own error, and in words the others'.
REFUSED = [
    ({"scale": float("nan")},   ArgumentError,    "scale is nan"),
    ({"dtype": "int32"},        DTypeError,       "q is int32"),
    ({"split": "striped"},      ArgumentError,    "split is 'striped'"),
    ({"mask": True},            UnsupportedError, "mask is True; ring_attention has no mask"),
    ({"spread": 1},             TypeError,        "ring_attention has no option spread"),
]
# fmt: on


@pytest.fixture
def several(ranks: Any) -> Any:
    """Ranks of which one can differ from another."""
    if ranks.size == 1:
        pytest.skip("needs two ranks")
    return ranks


@pytest.mark.parametrize(("change", "kind", "words"), WRONG)
def test_ranks_that_differ_are_told_on_every_rank(several, change, kind, words):
    for error in several(differing, change):
        assert type(error) is kind
        assert words.format(several.size - 1) in str(error)
    assert all(isinstance(out, np.ndarray) for out in several(differing, {}))  # as good as before


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED)
def test_what_one_rank_refuses_ends_the_call_on_every_rank(several, change, kind, words):
    *others, own = several(differing, change)
    assert type(own) is kind
    assert words in str(own)
    for error in others:
        assert type(error) is RankError
        assert f"refused on rank {several.size - 1}: {kind.__name__}: {words}" in str(error)
    assert all(isinstance(out, np.ndarray) for out in several(differing, {}))


def test_rows_that_are_no_zigzag_are_told_on_every_rank(several):
    for error in several(differing, {"rows": 9}, {"split": "zigzag"}):
        assert type(error) is ShapeError
        assert "q has seqlen" in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"bias": 1.0}, UnsupportedError, "bias is 1.0; heads that are divided among ranks"),
        ({"dropout_p": 0.5}, UnsupportedError, "dropout_p is 0.5; heads that are divided"),
        ({"sink": np.ones(1)}, ShapeError, "sink has shape (1,); it must be of the"),
        ({"spread": 1}, TypeError, "a layer has no option spread"),
        ({"recompute": 3}, ArgumentError, "recompute is 3"),
        ({"algorithm": "fa1"}, UnsupportedError, "algorithm is 'fa1'"),
    ],
)
def test_what_a_layer_with_divided_heads_cannot_is_said_on_every_rank(several, options, kind, said):
    for error in several(layer_with, options, {}):
        assert type(error) is kind
        assert said in str(error)


@pytest.mark.parametrize(
    ("of_last", "kind", "said"),
    [
        (
            {"mask": np.ones((3, 3), bool)},
            ShapeError,
            "shape of mask is [3, 3] on rank {} and None",
        ),
        ({"causal": True}, ArgumentError, "causal is 'True' on rank {} and None on rank 0"),
        ({"offset": 1}, ArgumentError, "offset is 1 on rank {} and 0 on rank 0"),
    ],
)
def test_layers_that_are_called_differently_are_told(several, of_last, kind, said):
    for error in several(layer_with, {}, of_last):
        assert type(error) is kind
        assert said.format(several.size - 1) in str(error)


def test_gradients_by_lse_are_of_all_ranks_or_none(several):
    for error in several(differing_backward):
        assert type(error) is ArgumentError
        assert f"dlse is 'an array' on rank {several.size - 1} and None on rank 0" in str(error)


def merged_bounds(case: Case, places: Places, size: int) -> Any:
    """The exact answer, with the bounds of results over the keys of each chunk put together."""
    options = {**case.options(np), "sink": None}
    chunks = [n * case.seqlen_k // (2 * size) for n in range(1, 2 * size + 1)]
    ends, columns, parts = places.keys or chunks, np.arange(case.seqlen_k), []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        seen = np.broadcast_to((columns >= start) & (columns < end), (case.seqlen_q, case.seqlen_k))
        parts.append(exact(*case.arrays(np), mask=seen, **options))
    return merged(case.exact(), *parts, layout=case.layout)


def more_roundings(case: Case, parts: int) -> dict[str, Any]:
    """By gradient, what it may lose beyond one call's bound: each of its parts is rounded, and to
    CuPy a sum below the smallest normal number is zero."""
    dtype = testing.numpy_dtype(case.dtype)
    lost = smallest_normal(dtype)
    return {name: parts * (spacing(dtype, a) + lost) for name, a in largest_sums(case).items()}
