"""What `cufa.numerics` reports, on NumPy and on CuPy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from problems import moved

import cufa
from cufa import numerics
from cufa.arrays import Arrays, sign
from cufa.bounds import Exact, exact
from cufa.problem import make_problem
from cufa.rows import exact_rows
from cufa.testing import Case, Memory, assert_within_rounding, cases, to_numpy

#: So small that every row can be computed on its own.
SMALL = {"seqlen_q": st.integers(0, 9), "max_elements": 1 << 18}
EVERY = 1 << 20
FEW = settings(max_examples=max(8, settings().max_examples // 2))


def report(xp, case: Case, rows=EVERY, **results):
    """A report on a case."""
    options = {n: a for n, a in case.options(xp).items() if n != "algorithm"}
    return numerics.report(*case.arrays(xp), rows=rows, **results, **options)


def by_row(case: Case, a):
    """A result of the caller's axes as (batch, heads, seqlen_q, head_dim_v), a view."""
    if case.layout == "bshd" and case.rank > 2:
        a = a.swapaxes(-2, -3)
    return a[(None,) * (4 - a.ndim)]


def lines(case: Case, answer: Exact) -> Exact:
    """An answer as (rows, head_dim_v) and (rows,)."""
    out, bound = (
        by_row(case, a).reshape(-1, case.head_dim_v) for a in (answer.out, answer.out_bound)
    )
    return Exact(out, answer.lse.ravel(), bound, answer.lse_bound.ravel(), answer.dtype)


# Roundings of a dot product are alike where its terms are.
@example(case=Case(head_dim=256, q_memory=Memory(step=(1, 1, 1, 0)), scores="equal"))
# The largest score is far above that of the last key seen.
@example(case=Case(dtype="float16", scores="jumping", jumps=((1, -40.0),), causal=True))
@FEW
@given(case=cases(**SMALL))
def test_single_rows_are_those_of_the_oracle(xp, case):
    options = case.options(xp)
    named = {n: options.get(n) for n in ("mask", "bias", "alibi_slopes", "sink")}
    arrays = Arrays(*case.arrays(xp), **named)
    rest = (options[n] for n in ("causal", "window", "softcap", "scale", "layout"))
    problem = make_problem(sign(arrays, *rest, False, "auto"))
    every = list(np.ndindex(case.batch, case.heads, case.seqlen_q))
    found = exact_rows(xp, problem, arrays, None, case.layout, every)

    in_float64 = exact(*(a.astype("float64") for a in case.arrays(np)), **case.options(np))
    assert_within_rounding((found.out, found.lse), lines(case, in_float64))
    bounds = lines(case, case.exact())
    np.testing.assert_allclose(found.out_bound, bounds.out_bound, rtol=1e-6)
    np.testing.assert_allclose(found.lse_bound, bounds.lse_bound, rtol=1e-6)
    np.testing.assert_array_equal(found.seen == 0, (bounds.out_bound == 0).all(1))


@FEW
@given(case=cases(**SMALL), rows=st.integers(1, 20))
def test_what_cufa_computes_is_within_rounding(xp, fit, case, rows):
    case = fit(case)
    out, lse = cufa.attention(*case.arrays(xp), return_lse=True, **case.options(xp))
    found = report(xp, case, rows, out=out, lse=lse)
    assert found.within_rounding, str(found)
    assert found.rows == min(rows, lse.size)


@FEW
@given(case=cases(**SMALL), data=st.data())
def test_one_wrong_element_is_found(xp, case, data):
    want = case.exact()
    assume(want.out.size)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in by_row(case, want.out).shape)
    off = 4 * by_row(case, want.out_bound)[at] + 1e-3
    out = want.out.astype(want.dtype)
    by_row(case, out)[at] = (by_row(case, want.out)[at] + off).astype(want.dtype)
    found = report(xp, case, out=moved(xp, out))
    assert not found.within_rounding
    assert found.out_error.at == at[:3]
    assert found.out_error.absolute >= off / 2
    assert found.lse_error is None
    assert "WRONG" in str(found)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_result_that_is_not_finite_is_infinitely_wrong(xp, value):
    case = Case(seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=8)
    out, lse = cufa.attention(*case.arrays(xp), return_lse=True)
    lse[0, 0, 3] = value
    found = report(xp, case, out=out, lse=lse)
    assert found.lse_error.at == (0, 0, 3)
    assert found.lse_error.of_bound == np.inf
    assert found.out_error.of_bound <= 1


@FEW
@given(data=st.data(), limit=st.sampled_from([1, 7, 100, 1 << 22]), case=cases(rank=4, **SMALL))
def test_what_is_not_finite_is_counted_exactly(xp, data, limit, case):
    results = cufa.attention(*case.arrays(np), return_lse=True, **case.options(np))
    arrays = dict(zip("qkv", (np.array(a) for a in case.arrays(np)), strict=True))
    arrays |= {"out": results[0], "lse": results[1]}
    for a in arrays.values():
        for value in (np.nan, np.inf, -np.inf):
            places = st.lists(st.integers(0, a.size - 1), max_size=3) if a.size else st.just([])
            a.reshape(-1)[data.draw(places)] = value
    want = {
        name: numerics.Counts(
            int(np.isnan(a).sum()), int((a == np.inf).sum()), int((a == -np.inf).sum())
        )
        for name, a in arrays.items()
    }
    options = {n: a for n, a in case.options(xp).items() if n != "algorithm"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "_COUNTED", limit)
        found = numerics.report(**{n: moved(xp, a) for n, a in arrays.items()}, rows=1, **options)
    assert found.not_finite == want


def test_ranges_and_rows_without_keys_are_what_they_say(xp):
    q, k = xp.zeros((5, 8), "float32"), xp.zeros((3, 8), "float32")
    bias = xp.asarray([[2.0, -1.0, -np.inf]])
    found = numerics.report(q, k, k, causal=True, bias=bias)
    assert found.rows_without_keys == 2
    assert (found.scores.least, found.scores.largest, found.scores.magnitude) == (-1, 2, 2)
    p = 1 / (1 + np.exp(-3.0))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    np.testing.assert_allclose(found.effective_keys.largest, np.exp(entropy))
    np.testing.assert_allclose(found.effective_keys.least, 1)
    np.testing.assert_allclose(found.lse.largest, np.log(np.exp(2) + np.exp(-1)))


def test_n_equal_keys_are_n_effective_keys(xp):
    q, k = xp.ones((5, 8), "float16"), xp.ones((37, 8), "float16")
    found = numerics.report(q, k, k)
    np.testing.assert_allclose([found.effective_keys.least, found.effective_keys.largest], 37)


def test_rows_have_equal_chances_and_come_once():
    problem = make_problem(
        sign(
            Arrays(*[np.zeros((2, 3, 4, 1), "f4")] * 3),
            False,
            None,
            None,
            None,
            "bhsd",
            False,
            "auto",
        )
    )
    draws, share = 3000, 8 / 24
    samples = [numerics._sample(problem, 8, seed) for seed in range(draws)]
    assert all(len(set(sample)) == 8 for sample in samples)
    counts = np.zeros((2, 3, 4))
    np.add.at(counts, tuple(np.concatenate(samples).T), 1)
    deviation = np.sqrt(draws * share * (1 - share))
    assert (abs(counts - draws * share) < 5 * deviation).all()
    assert samples[0] == numerics._sample(problem, 8, 0)


def test_nothing_is_reported_of_an_empty_result(xp):
    q = xp.zeros((2, 0, 8), "float32")
    found = numerics.report(q, q, q, out=q, lse=xp.zeros((2, 0), "float32"))
    assert (found.rows, found.out_error, found.lse_error) == (0, None, None)
    assert np.isnan(found.scores.magnitude)


def test_a_report_goes_into_a_log():
    case = Case(seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=8)
    out = cufa.attention(*case.arrays(np))
    found = report(np, case, out=out)
    logged = json.loads(json.dumps(found.as_dict()))
    assert logged["out_error"]["of_bound"] == found.out_error.of_bound
    assert logged["not_finite"]["q"] == {"nan": 0, "inf": 0, "minus_inf": 0}


@given(every=st.integers(1, 9), calls=st.integers(0, 30))
def test_a_monitor_reports_the_first_call_and_every_nth_after_it(every, calls):
    q, seen = np.ones((2, 3, 4), "float32"), []
    watch = numerics.Monitor(every, lambda step, found: seen.append((step, found.rows)), rows=2)
    returned = [watch(q, q, q, causal=True) for _ in range(calls)]
    assert seen == [(step, 2) for step in range(0, calls, every)]
    assert [step for step, found in enumerate(returned) if found] == [step for step, _ in seen]


def test_a_monitor_looks_at_nothing_between_its_reports():
    watch = numerics.Monitor(every=2, callback=lambda step, found: None)
    q = np.ones((3, 4))
    assert watch(q, q, q) is not None
    assert watch("no", "arrays", "at all", nonsense=1) is None


def test_a_monitor_without_a_callback_prints(capsys):
    numerics.Monitor()(*np.ones((3, 3, 4)))
    assert capsys.readouterr().out.startswith("call 0: attention of float64")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": 0}, cufa.ArgumentError, r"rows is 0; .*at least 1"),
        ({"rows": 1.5}, cufa.DTypeError, r"rows is 1\.5, a float; .*integer"),
        ({"seed": -1}, cufa.ArgumentError, r"seed is -1"),
        ({"layout": "x"}, cufa.ArgumentError, r"layout is 'x'"),
        ({"out": np.zeros((3, 5), "f4")}, cufa.ShapeError, r"out has shape \(3, 5\); .*\(3, 4\)"),
        ({"out": np.zeros((3, 4), "f8")}, cufa.DTypeError, r"out is float64; .*float32"),
        ({"lse": np.zeros((3, 4), "f4")}, cufa.ShapeError, r"lse has shape \(3, 4\); .*\(3,\)"),
        ({"lse": np.zeros(3, "f8")}, cufa.DTypeError, r"lse is float64; .*float32"),
        ({"lse": [0.0]}, cufa.DTypeError, r"lse is a list"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    q = np.zeros((3, 4), "float32")
    with pytest.raises(error, match=message):
        numerics.report(q, q, q, **changes)


@pytest.mark.parametrize(("name", "value"), [("every", 0), ("rows", 0)])
def test_a_monitor_that_never_reports_is_refused(name, value):
    with pytest.raises(cufa.ArgumentError, match=rf"{name} is 0; .*at least 1"):
        numerics.Monitor(**{name: value})


def test_a_callback_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(cufa.DTypeError, match=r"callback is 'log', a str; it must be a function"):
        numerics.Monitor(callback="log")


@pytest.mark.gpu
def test_a_result_on_another_device_is_refused(cupy):
    q = cupy.zeros((3, 4), "float32")
    with pytest.raises(cufa.DeviceError, match="out is not on the device of q"):
        numerics.report(q, q, q, out=to_numpy(q))
