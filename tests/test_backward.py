"""The calls `attention_backward` and `attention_vjp`: what they return, take, refuse and hold."""

from __future__ import annotations

import sys
import tracemalloc
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from foreign import make_library
from hypothesis import given
from hypothesis import strategies as st
from test_errors import named, refuse

import cufa
from cufa import (
    ArgumentError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    blocks,
    cpu_backward,
)
from cufa.testing import (
    Memory,
    assert_gradients_within_rounding,
    cases,
    memories,
    place,
    to_numpy,
)

NAMES = ("q", "k", "v", "bias", "sink")


def bits(gradients):
    """Of every gradient, None for None."""
    return [None if a is None else a.tobytes() for a in gradients]


@given(case=cases(max_elements=1 << 18))
def test_vjp_is_attention_and_its_backward_pass(xp, fit, case):
    case = fit(case)
    arrays, options, (dout, dlse) = case.arrays(xp), case.options(xp), case.back(xp)
    out, lse = cufa.attention(*arrays, return_lse=True, **options)
    same, vjp = cufa.attention_vjp(*arrays, **options)
    backward = cufa.attention_backward(dout, *arrays, out, lse, dlse=dlse, **options)
    xp.testing.assert_array_equal(same, out)
    assert_gradients_within_rounding(vjp(dout, dlse), case.exact_gradients())
    assert_gradients_within_rounding(backward, case.exact_gradients())
    both, _ = cufa.attention_vjp(*arrays, return_lse=True, **options)
    xp.testing.assert_array_equal(both[1], lse)


@given(case=cases(max_elements=1 << 18), names=st.sets(st.sampled_from(NAMES), min_size=1))
def test_only_gradients_that_are_wanted_are_returned(xp, fit, case, names):
    case = fit(case)
    (dout, dlse), options = case.back(xp), case.options(xp)
    given = {"q", "k", "v"} | options.keys()
    wrt = [name for name in NAMES if name in names & given] or ["q"]
    _, vjp = cufa.attention_vjp(*case.arrays(xp), wrt=wrt, **options)
    assert_gradients_within_rounding(vjp(dout, dlse), case.exact_gradients().only(wrt))


@given(
    case=cases(
        max_elements=1 << 18,
        constants=st.sets(st.sampled_from(NAMES)).map(tuple),
        deterministic=st.booleans(),
    ),
    bent=st.booleans(),
)
def test_a_case_expects_the_gradients_that_it_asks_for(case, bent):
    case = case.few_kernels() if bent else case
    _, vjp = cufa.attention_vjp(*case.arrays(np), **case.options(np), **case.backward_options())
    got = vjp(*case.back(np))
    wanted = {name for name, a in zip(NAMES, got, strict=True) if a is not None}
    assert wanted == {*case.wrt}
    assert_gradients_within_rounding(got, case.exact_gradients())
    assert not bent or ("k" in wanted) == ("v" in wanted)
    fewer = replace(case, constants=(*case.constants, case.wrt[0]))
    if fewer.wrt != case.wrt:
        with pytest.raises(AssertionError, match=r"it is (not )?wanted"):
            assert_gradients_within_rounding(got, fewer.exact_gradients())


@given(
    case=cases(
        max_elements=1 << 18,
        seqlen_q=st.integers(20, 80),
        bias=st.tuples(*[st.booleans()] * 4),
        hidden=0.0,
    )
)
def test_deterministic_gradients_do_not_depend_on_which_thread_is_first(case):
    def last_first(threads, shares, worker):
        work = worker()
        for share in reversed(list(shares)) if threads > 1 else shares:
            with np.errstate(all="ignore"):
                work(share)

    _, vjp = cufa.attention_vjp(*case.arrays(np), deterministic=True, **case.options(np))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_SCORES_PER_THREAD", 1)
        patch.setattr(blocks, "_BLOCK_ROWS", 4)
        patch.setattr(blocks, "_processors", lambda: 3)
        first = bits(vjp(*case.back(np)))
        patch.setattr(cpu_backward, "run_threads", last_first)
        assert bits(vjp(*case.back(np))) == first


@given(case=cases(max_elements=1 << 16), out_memory=memories())
def test_saved_results_may_have_any_strides(xp, fit, case, out_memory):
    case = fit(case)
    arrays, options, (dout, dlse) = case.arrays(xp), case.options(xp), case.back(xp)
    out, lse = cufa.attention(*arrays, return_lse=True, **options)
    turned = out.swapaxes(-2, -3) if case.layout == "bshd" and case.rank > 2 else out
    steps = tuple(step or 1 for step in out_memory.step)
    memory = Memory(out_memory.order, steps, out_memory.margin, out_memory.offset)
    out = case.caller_axes(place(xp, to_numpy(turned)[(None,) * (4 - case.rank)], memory).array)
    lse = xp.repeat(lse, 2, axis=-1)[..., ::2]
    got = cufa.attention_backward(dout, *arrays, out, lse, dlse=dlse, **options)
    assert_gradients_within_rounding(got, case.exact_gradients())


def test_arrays_of_other_libraries_have_gradients_of_their_library(monkeypatch):
    library = make_library(np)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    q, k, v = np.sin(np.arange(3 * 2 * 9 * 8, dtype=np.float32)).reshape(3, 2, 9, 8)
    bias, dout = q[0] @ k[0].T, np.ones_like(q)
    dout.flags.writeable = q.flags.writeable = False
    out, vjp = cufa.attention_vjp(*map(library.Array, (q, k, v)), bias=library.Array(bias))
    got = vjp(library.Array(dout))
    _, own_vjp = cufa.attention_vjp(q, k, v, bias=bias)
    assert {type(a) for a in (out, *got[:4])} == {library.Array}
    assert got.dsink is None
    assert bits(a.array for a in got[:4]) == bits(own_vjp(dout)[:4])


DROPPED = {"dropout_p": 0.5, "dropout_seed": 5}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"window": [0, 1]}, lambda given: given["window"].reverse()),
        ({"window": [np.array(1), 1]}, lambda given: given["window"][0].fill(0)),
        ({"scale": np.array(0.5)}, lambda given: given["scale"].fill(0)),
        ({"softcap": np.array(2.0)}, lambda given: given["softcap"].fill(0.1)),
        ({**DROPPED, "dropout_p": np.array(0.5)}, lambda given: given["dropout_p"].fill(0.9)),
        ({**DROPPED, "dropout_seed": np.array(5)}, lambda given: given["dropout_seed"].fill(6)),
        ({"wrt": ["q", "k"]}, lambda given: given["wrt"].pop()),
    ],
)
def test_an_option_that_changes_after_the_call_changes_no_gradient(xp, options, change):
    q, k, v, dout = (xp.asarray(a) for a in np.random.default_rng().standard_normal((4, 2, 99, 4)))
    options = deepcopy(options)
    _, vjp = cufa.attention_vjp(q, k, v, deterministic=True, **options)
    before = vjp(dout)
    change(options)
    after = vjp(dout)
    assert [a is None for a in after] == [a is None for a in before]
    for name in ("dk", "dv"):  # dq is added up in any order
        if getattr(before, name) is not None:
            xp.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_memory_is_linear_in_the_length():
    seqlen, head_dim = 4096, 16
    q = np.ones((seqlen, head_dim), np.float32)
    out, lse = cufa.attention(q, q, q, return_lse=True)
    tracemalloc.start()
    try:
        cufa.attention_backward(q, q, q, q, out, lse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    scores = 4 * seqlen**2
    assert peak < scores / 4


# ------------------------------------------------------------------------------------- errors

BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM, HEAD_DIM_V = 2, 6, 3, 5, 7, 8, 4
POSITIONAL = ("dout", "q", "k", "v", "out", "lse")


def good_call():
    """Arguments that fit together."""
    q = np.ones((BATCH, HEADS, SEQLEN_Q, HEAD_DIM), "float32")
    k = np.ones((BATCH, KV_HEADS, SEQLEN_K, HEAD_DIM), "float32")
    v = np.ones((BATCH, KV_HEADS, SEQLEN_K, HEAD_DIM_V), "float32")
    out, lse = cufa.attention(q, k, v, return_lse=True)
    return {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


BAD_CALLS = {
    ArgumentError: [
        ({"wrt": "bias"}, r"wrt asks for the gradient of bias, and no bias is given"),
        ({"wrt": ["q", "sink"]}, r"gradient of sink, and no sink is given"),
        ({"wrt": ["dq"]}, r"wrt is \['dq'\]; .*'q', 'k', 'v', 'bias', 'sink'"),
        ({"wrt": ["mask"]}, r"wrt is \['mask'\]; .*constants"),
        ({"wrt": []}, r"wrt is \[\]; .*None for all"),
        ({"wrt": 3}, r"wrt is 3"),
        (
            {"wrt": ["q", zeros(2)]},
            r"wrt is \['q', an array of shape \(2,\) and dtype float32\]; .*'sink'",
        ),
        ({"wrt": zeros(2)}, r"wrt is an array of shape \(2,\) and dtype float32; .*'sink'"),
        ({"wrt": ["q", None]}, r"wrt is \['q', None\]; .*'sink'"),
        ({"deterministic": 2}, r"deterministic is 2; .*False, True"),
        ({"causal": "bottom"}, r"causal is 'bottom'"),
        ({"algorithm": "fa9"}, r"algorithm is 'fa9'"),
        ({"scale": np.nan}, r"scale is nan"),
    ],
    UnsupportedError: [
        ({"algorithm": "standard"}, r"algorithm is 'standard', which has no gradients; .*'fa2'"),
        ({"algorithm": "fa3"}, r"algorithm is 'fa3', which has no gradients"),
    ],
    ShapeError: [
        ({"dout": zeros(2, 6, 5, 8)}, r"dout has shape \(2, 6, 5, 8\); .*must be \(2, 6, 5, 4\)"),
        ({"out": zeros(2, 5, 6, 4)}, r"out has shape \(2, 5, 6, 4\); .*must be \(2, 6, 5, 4\)"),
        ({"out": zeros(6, 5, 4)}, r"out has shape \(6, 5, 4\)"),
        ({"lse": zeros(2, 5, 6)}, r"lse has shape \(2, 5, 6\); .*must be \(2, 6, 5\)"),
        ({"lse": zeros(2, 6, 5, 1)}, r"lse has shape \(2, 6, 5, 1\)"),
        ({"dlse": zeros(5)}, r"dlse has shape \(5,\); .*must be \(2, 6, 5\)"),
        ({"v": zeros(2, 3, 6, 4)}, r"k has seqlen 7 and v has seqlen 6"),
        ({"bias": zeros(2, 3, 5, 7)}, r"bias has shape \(2, 3, 5, 7\)"),
    ],
    DTypeError: [
        ({"dout": zeros(2, 6, 5, 4, dtype="float16")}, r"dout is float16; .*must be float32"),
        ({"dout": zeros(2, 6, 5, 4, dtype="int32")}, r"dout is int32; it takes float16"),
        (
            {"out": zeros(2, 6, 5, 4, dtype="float64")},
            r"out is float64; .*must be float32, as attention returns it",
        ),
        ({"lse": zeros(2, 6, 5, dtype="float64")}, r"lse is float64; .*must be float32"),
        ({"dlse": zeros(2, 6, 5, dtype="float16")}, r"dlse is float16; .*must be float32"),
        ({"dout": 1.0}, r"dout is a float; .*NumPy or CuPy"),
        ({"lse": None}, r"lse is a NoneType"),
        ({"dlse": [0.0]}, r"dlse is a list"),
        ({"k": zeros(2, 3, 7, 8, dtype="float16")}, r"q is float32 and k is float16"),
    ],
}


@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_CALLS))
def test_a_bad_call_is_refused(changes, error, message):
    refuse(cufa.attention_backward, {**good_call(), **changes}, error, message, POSITIONAL)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"wrt": "bias"}, ArgumentError, r"no bias is given"),
        ({"wrt": ["q", zeros(2)]}, ArgumentError, r"wrt is \['q', an array of shape \(2,\)"),
        ({"window": [1, -9]}, ArgumentError, r"window has right bound -9"),
        ({"dropout_p": 1}, ArgumentError, r"dropout_p is 1\.0"),
        ({"algorithm": "standard"}, UnsupportedError, r"'standard', which has no gradients"),
        ({"deterministic": None}, ArgumentError, r"deterministic is None"),
    ],
)
def test_vjp_refuses_before_it_computes(changes, error, message):
    call = {name: a for name, a in good_call().items() if name in "qkv"}
    call["out"] = np.full((BATCH, HEADS, SEQLEN_Q, HEAD_DIM_V), 77, "float32")
    refuse(cufa.attention_vjp, {**call, **changes}, error, message)
    assert (call["out"] == 77).all()


def test_vjp_refuses_what_does_not_belong_to_it():
    call = good_call()
    _, vjp = cufa.attention_vjp(call["q"], call["k"], call["v"])
    with pytest.raises(ShapeError, match=r"dout has shape \(3,\)"):
        vjp(zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", POSITIONAL)
def test_numpy_mixed_with_cupy_is_refused(cupy, name):
    call = {n: cupy.asarray(a) for n, a in good_call().items()}
    call[name] = cupy.asnumpy(call[name])
    with pytest.raises(cufa.DeviceError, match=r"is on the CPU \(NumPy\)"):
        cufa.attention_backward(*call.values())
