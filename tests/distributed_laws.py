"""Laws of attention on several ranks; `distributed_ranks.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed_jobs import Places, backward, forward
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa import reference, testing
from cufa.bounds import exact, merged, spacing
from cufa.distributed.calls import axis_of
from cufa.gradients import Gradients
from cufa.testing import Case, assert_gradients_within_rounding, assert_within_rounding

FEATURES = ("causal", "window", "softcap", "sink")
#: Many ranks share few processors here, and each example is many calls.
few = settings(max_examples=max(8, settings().max_examples // 2))


@st.composite
def problems(draw: st.DrawFn, **fixed: Any) -> tuple[Case, Any, Any, bool]:
    """Problems, and where ranks begin and end, in fractions of the sequences."""
    case = draw(testing.cases(features=FEATURES, max_elements=1 << 18, **fixed))
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
    case, places = problem[0], places_of(problem, ranks.size)
    both = results(ranks(forward, function, case, places))
    out = places.joined([out for out, _ in both], axis_of(case.layout, case.rank))
    lse = places.joined([lse for _, lse in both], -1)
    assert_within_rounding((out, lse), merged_bounds(case, places, ranks.size))


@functions
@few
@given(problem=problems())
def test_gradients_over_ranks_agree_with_the_formula(ranks, function, problem):
    case, places = problem[0], places_of(problem, ranks.size)
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


def merged_bounds(case: Case, places: Places, size: int) -> Any:
    """The exact answer, with the bounds of results over the keys of each chunk put together."""
    q, k, v = case.arrays(np)
    options = {**case.options(np), "sink": None}
    visible = reference.scores(q, k, **without_sink(options)) > -np.inf
    ends = places.keys or [n * case.seqlen_k // (2 * size) for n in range(1, 2 * size + 1)]
    axis = axis_of(case.layout, case.rank)
    parts = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        keys = slice(start, end)
        own = [np.take(a, range(start, end), axis) for a in (k, v)]
        of_part = {**options, "causal": False, "window": None, "mask": visible[..., keys]}
        parts.append(exact(q, *own, **of_part))
    return merged(case.exact(), *parts, layout=case.layout)


def without_sink(options: dict[str, Any]) -> dict[str, Any]:
    return {n: value for n, value in options.items() if n not in ("sink", "algorithm")}


def more_roundings(case: Case, parts: int) -> dict[str, Any]:
    """By gradient, what it may lose beyond one call's bound: each of its parts is rounded.

    A part is no larger than what a whole gradient adds up.
    """
    plain = replace(case, layout="bhsd", rank=4)
    q, k, v = plain.arrays(np)
    options = plain.options(np)
    (dout, _), dlse = plain.back(np), np.reshape(case.back(np)[1], plain.back(np)[1].shape)
    with np.errstate(all="ignore"):
        zeros = np.zeros((case.batch, case.heads, case.seqlen_q, case.seqlen_k))
        ds = abs(reference.gradients(dout, q, k, v, dlse=dlse, bias=zeros, **options).dbias)
        ds = ds * (case.head_dim**-0.5 if case.scale is None else abs(case.scale))
        lse = plain.exact().lse[..., None]
        scores = reference.scores(q, k, **without_sink(options))
        p = np.exp(scores - np.where(lse == -np.inf, 0, lse))
        q, k, dout = (abs(a.astype(np.float64)) for a in (q, k, dout))
        sizes = {
            "dq": ds @ reference.per_query_head(k, case.heads),
            "dk": _by_key_head(case, ds.swapaxes(2, 3) @ q),
            "dv": _by_key_head(case, p.swapaxes(2, 3) @ dout),
        }
        return {
            name: case.caller_axes(
                np.broadcast_to(
                    parts * spacing(q_dtype(case), size.max(-1, keepdims=True, initial=0)),
                    size.shape,
                )
            )
            for name, size in sizes.items()
        }


def q_dtype(case: Case) -> Any:
    return testing.numpy_dtype(case.dtype)


def _by_key_head(case: Case, a: Any) -> Any:
    return a.reshape(case.batch, case.kv_heads, case.group, *a.shape[2:]).sum(2)
