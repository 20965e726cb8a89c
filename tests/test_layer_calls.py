"""Layers and `checkpoint`: what they refuse, and in which words."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from foreign import Lender
from hypothesis import given
from hypothesis import strategies as st
from test_errors import BAD_CALLS as BAD_ATTENTION
from test_errors import build, named, refuse

import cufa
from cufa import ArgumentError, DTypeError, ShapeError, UnsupportedError, layers

SIZES = {"embed_dim": 12, "heads": 6}
LAYER = cufa.MultiHeadAttention(12, 6, kv_heads=3, head_dim=4, context_dim=10)
NAMES = ("params", "x", "context")
#: Options of attention that a layer does not take.
OWN = ("layout", "return_lse", "out", "wrt")


def good_call():
    """Arguments that fit together."""
    x, context = np.ones((2, 5, 12), "float32"), np.ones((2, 7, 10), "float32")
    return {"params": LAYER.init(0), "x": x, "context": context}


@pytest.fixture
def nothing_runs(monkeypatch):
    """A test in which something is computed fails."""

    def run(*args, **options):
        pytest.fail("something was computed")

    for name in ("linear", "rotate", "attention", "attention_vjp"):
        monkeypatch.setattr(layers, name, run)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def changed(**arrays):
    """Good parameters, some of them replaced, or left out if None."""
    params = {**LAYER.init(0), **arrays}
    return {name: a for name, a in params.items() if a is not None}


BAD_LAYERS = {
    ArgumentError: [
        ({"heads": 5}, r"embed_dim is 12 and heads is 5; .*multiple.*head_dim"),
        ({"kv_heads": 4}, r"heads is 6 and kv_heads is 4; .*multiple"),
        ({"heads": 0}, r"heads is 0; it must be at least 1"),
        ({"embed_dim": -3}, r"embed_dim is -3; it must be at least 1"),
        ({"kv_heads": 0}, r"kv_heads is 0"),
        ({"head_dim": 0}, r"head_dim is 0"),
        ({"context_dim": 0}, r"context_dim is 0"),
        ({"head_dim": 3, "rotary": True}, r"head_dim is 3 and rotary is True; .*even"),
        ({"rotary": True, "rotary_base": 0}, r"rotary_base is 0.0; .*positive"),
        ({"rotary": True, "rotary_base": np.inf}, r"rotary_base is inf; .*finite"),
        ({"rotary": "half"}, r"rotary is 'half'; .*False, True"),
        ({"projection_bias": None}, r"projection_bias is None; .*False, True"),
    ],
    DTypeError: [
        ({"heads": 2.0}, r"heads is 2.0, a float; it must be an integer"),
        ({"embed_dim": "12"}, r"embed_dim is '12', a str"),
        ({"rotary": True, "rotary_base": "big"}, r"rotary_base is 'big', a str"),
    ],
}
BAD_CALLS = {
    ArgumentError: [
        ({"params": changed(wv=None)}, r"params has wk, wo, wq; this layer takes wq, wk, wv, wo"),
        ({"params": changed(bq=zeros(24))}, r"params has bq, wk, wo, wq, wv; this layer takes"),
        ({"params": {}}, r"params has nothing; this layer takes wq"),
        ({"offset": -1}, r"offset is -1; it must be at least 0"),
        ({"offset": 10**400}, r"offset is 1000.*positions .*below 2\*\*53"),
        ({"offset": 2**53 - 4}, r"offset is 9007199254740988 and x has 5 rows; .*below 2\*\*53"),
        ({"layout": "bhsd"}, r"layout is 'bhsd'; .*does not take: its arrays are \(batch"),
        ({"return_lse": True}, r"return_lse is True; .*does not take"),
        ({"out": None}, r"out is None; .*does not take"),
        ({"wrt": "q"}, r"wrt is 'q'; .*all gradients"),
        ({"dropout_p": 0.5}, r"dropout_p is 0.5 and dropout_seed is None"),
        ({"dropout_p": 2, "dropout_seed": 1}, r"dropout_p is 2.0; .*below 1"),
        ({"dropout_p": 0.5, "dropout_seed": -1}, r"dropout_seed is -1; .*at least 0"),
    ],
    ShapeError: [
        ({"x": zeros(2, 5, 11)}, r"x has shape \(2, 5, 11\); .*\(batch, seqlen, 12\)"),
        ({"x": zeros(12)}, r"x has shape \(12,\)"),
        ({"x": zeros(1, 2, 5, 12)}, r"x has shape \(1, 2, 5, 12\)"),
        ({"context": None}, r"context is None; .*10 wide, and x is 12"),
        ({"context": zeros(2, 7, 12)}, r"context has shape \(2, 7, 12\); it must be \(2, 7, 10\)"),
        ({"context": zeros(7, 10)}, r"context has shape \(7, 10\); it must be \(2, 7, 10\)"),
        ({"context": zeros(10)}, r"context has shape \(10,\)"),
        ({"params": changed(wk=zeros(12, 12))}, r"params\['wk'\] has shape .*\(10, 12\)"),
        ({"bias": Lender(zeros(5, 6))}, r"bias has shape \(5, 6\)"),
    ],
    DTypeError: [
        ({"x": zeros(2, 5, 12, dtype="int32")}, r"x is int32; it takes float16"),
        ({"x": [[0.0] * 12]}, r"x is a list"),
        ({"context": zeros(2, 7, 10, dtype="float64")}, r"context is float64 and x is float32"),
        ({"context": 3}, r"context is a int"),
        ({"params": changed(wo=zeros(24, 12, dtype="float16"))}, r"'wo'\] is float16 and x is"),
        ({"params": changed(wo=None) | {"wo": [1]}}, r"params\['wo'\] is a list"),
        ({"params": [1]}, r"params is a list; it must be a dict"),
        ({"x": zeros(2, 5, 12, dtype=">f4")}, r"x is stored in the other byte order \(>f4\)"),
        ({"context": zeros(2, 7, 10, dtype=">f4")}, r"context is stored in the other byte order"),
        ({"params": changed(wv=zeros(10, 12, dtype=">f4"))}, r"\['wv'\] is stored in the other"),
        ({"offset": 0.5}, r"offset is 0.5, a float"),
        ({"dropout_p": 0.5, "dropout_seed": 0.5}, r"dropout_seed is 0.5, a float"),
    ],
    UnsupportedError: [
        ({"algorithm": "fa1"}, r"algorithm is 'fa1', which"),
        ({"algorithm": "fa3"}, r"algorithm is 'fa3', which"),
    ],
}
#: What attention refuses of the options that a layer passes on; the scores have the same shape.
PASSED_ON = {
    error: [(changes, message) for changes, message in rows if not changes.keys() & {*"qkv", *OWN}]
    for error, rows in BAD_ATTENTION.items()
}


@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_LAYERS))
def test_sizes_that_do_not_fit_are_refused(changes, error, message):
    refuse(cufa.MultiHeadAttention, {**SIZES, **changes}, error, message, ("embed_dim", "heads"))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("call", [LAYER, LAYER.vjp])
@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_CALLS))
def test_a_bad_call_of_a_layer_is_refused_before_anything_runs(call, changes, error, message):
    refuse(call, {**good_call(), **changes}, error, message, NAMES)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("call", [LAYER, LAYER.vjp])
@pytest.mark.parametrize(("changes", "error", "message"), named(PASSED_ON))
def test_what_attention_refuses_is_refused_before_anything_runs(call, changes, error, message):
    refuse(call, build(np, good_call(), changes), error, message, NAMES)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("call", [LAYER, LAYER.vjp])
def test_a_misspelled_option_is_refused_before_anything_runs(call):
    with pytest.raises(TypeError, match=r"no option casual; .*causal, window, mask"):
        call(**good_call(), casual=True)


def test_a_layer_takes_masks_and_biases_of_other_libraries():
    rng = np.random.default_rng(0)
    options = {"mask": rng.random((5, 7)) < 0.5, "bias": rng.standard_normal((5, 7))}
    lent = {name: Lender(a) for name, a in options.items()}
    y, vjp = LAYER.vjp(**good_call(), **options)
    same, of_lent = LAYER.vjp(**good_call(), **lent)
    assert (LAYER(**good_call(), **lent) == y).all()
    assert (same == y).all()
    assert (of_lent(y).dbias == vjp(y).dbias).all()


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recompute": 1}, ArgumentError, r"recompute is 1; .*False, True"),
        ({"deterministic": "yes"}, ArgumentError, r"deterministic is 'yes'"),
        ({"deterministic": 1}, ArgumentError, r"deterministic is 1; .*False, True"),
        ({"algorithm": "standard"}, UnsupportedError, r"'standard', which has no gradients"),
    ],
)
def test_what_only_gradients_do_not_take_is_refused_before_anything_runs(changes, error, message):
    refuse(LAYER.vjp, {**good_call(), **changes}, error, message, NAMES)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("dy", "error", "message"),
    [
        (zeros(2, 5, 11), ShapeError, r"dy has shape \(2, 5, 11\); it must be \(2, 5, 12\)"),
        (zeros(2, 5, 12, dtype="float64"), DTypeError, r"dy is float64 and out is float32"),
        (zeros(2, 5, 12, dtype=">f4"), DTypeError, r"dy is stored in the other byte order"),
        (1.0, DTypeError, r"dy is a float"),
    ],
)
def test_what_comes_back_must_be_like_the_result(recompute, dy, error, message):
    _, vjp = LAYER.vjp(**good_call(), recompute=recompute)
    with pytest.raises(error, match=message):
        vjp(dy)


@pytest.mark.parametrize(
    ("name", "a", "error", "message"),
    [
        ("dq", zeros(2, 5, 6, 5), ShapeError, r"dq has shape .*must be \(2, 5, 6, 4\)"),
        ("dk", zeros(2, 5, 3, 4), ShapeError, r"dk has shape .*must be \(2, 7, 3, 4\)"),
        ("dv", zeros(2, 7, 3, 4, dtype="f8"), DTypeError, r"dv is float64 and x is float32"),
        ("dq", zeros(2, 5, 6, 4, dtype=">f4"), DTypeError, r"dq is stored in the other byte"),
        ("dv", zeros(2, 7, 3, 4, dtype=">f4"), DTypeError, r"dv is stored in the other byte"),
    ],
)
def test_gradients_of_heads_must_be_like_heads(name, a, error, message):
    call = good_call()
    heads = dict(zip(("dq", "dk", "dv"), LAYER.project(**call), strict=True))
    with pytest.raises(error, match=message):
        LAYER.project_backward(**{**heads, name: a}, **call)


@pytest.mark.parametrize("shape", [(24,), (2, 5, 24), (5, 4, 6), (1, 2, 5, 6, 4)])
def test_join_takes_heads_alone(shape):
    with pytest.raises(ShapeError, match=r"out has shape .*\(batch, seqlen, 6, 4\)"):
        LAYER.join(LAYER.init(0), zeros(*shape))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "int32"}, ArgumentError, r"dtype is 'int32'; .*float16"),
        ({"dtype": None}, ArgumentError, r"dtype is None; .*float16"),
        ({"rng": -1}, ArgumentError, r"rng is -1; .*Generator, or a seed .*non-negative"),
        ({"rng": [1, -1]}, ArgumentError, r"rng is \[1, -1\]; .*seed"),
        ({"rng": "a"}, DTypeError, r"rng is 'a'; .*seed"),
        ({"rng": 0.5}, DTypeError, r"rng is 0.5; .*seed"),
        ({"xp": None}, DTypeError, r"xp is None; .*numpy or cupy"),
        ({"xp": "cupy"}, DTypeError, r"xp is 'cupy'; .*numpy or cupy"),
        ({"xp": np.linalg}, DTypeError, r"xp is <module 'numpy.linalg'.*numpy or cupy"),
    ],
)
def test_init_takes_a_seed_a_dtype_of_floats_and_a_library(changes, error, message):
    with pytest.raises(error, match=message):
        LAYER.init(**{"rng": 0, **changes})


def test_positions_may_be_as_large_as_float64_counts_them():
    turning = cufa.MultiHeadAttention(12, 6, rotary=True)
    y = turning(turning.init(0), np.ones((5, 12), "float32"), offset=2**53 - 5)
    assert np.isfinite(y).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["params", "context"])
def test_layers_do_not_mix_numpy_with_cupy(cupy, name):
    call = {**good_call(), "params": LAYER.init(0, xp=cupy)}
    call |= {n: cupy.asarray(call[n]) for n in ("x", "context")}
    call[name] = good_call()[name]
    with pytest.raises(cufa.DeviceError, match=r"is on the CPU \(NumPy\) and x is on GPU"):
        LAYER(**call)


# --------------------------------------------------------------------------------- checkpoint


def test_checkpoint_takes_functions_alone():
    with pytest.raises(DTypeError, match=r"fn is 3; it must be a function"):
        cufa.checkpoint(3)


@pytest.mark.parametrize(
    ("returned", "given"),
    [
        (3, "a int"),
        ("ab", "a str"),
        ([1, abs], "a list"),
        ((1, lambda: 2, 3), r"a tuple \(int, function, int\)"),
        ((1,), r"a tuple \(int\)"),
        ((1, 2), r"a tuple \(int, int\)"),
    ],
)
def test_checkpoint_takes_pairs_alone(returned, given):
    with pytest.raises(DTypeError, match=rf"fn returned {given}; .*pair \(out, vjp\)"):
        cufa.checkpoint(lambda: returned)()


def test_checkpoint_takes_pairs_alone_in_the_backward_pass_too():
    results = [(1, abs), 3]
    _, vjp = cufa.checkpoint(lambda: results.pop(0))()
    with pytest.raises(DTypeError, match=r"fn returned a int; .*pair \(out, vjp\)"):
        vjp(1)


def test_checkpoint_calls_again_for_each_backward_pass_and_not_before():
    calls = []

    def scaled(x, *, by):
        calls.append(by)
        return by * x, lambda dout: by * dout

    out, vjp = cufa.checkpoint(scaled)(3.0, by=2.0)
    assert (out, calls) == (6.0, [2.0])
    assert [vjp(1.0), vjp(5.0)] == [2.0, 10.0]
    assert calls == [2.0] * 3


def test_checkpoint_holds_on_to_nothing_that_is_computed():
    class Result:
        alive = 0

        def __init__(self):
            Result.alive += 1

        def __del__(self):
            Result.alive -= 1

    def fn():
        kept = Result()
        return 0, lambda: kept

    plain, checked = fn(), cufa.checkpoint(fn)()
    assert Result.alive == 1  # that of the plain call
    assert isinstance(checked[1](), Result)
    assert isinstance(plain[1](), Result)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"window": [0, 1]}, lambda kept: kept["window"].reverse()),
        (
            {"dropout_p": 0.5, "dropout_seed": np.array(5)},
            lambda kept: kept["dropout_seed"].fill(6),
        ),
        ({"offset": np.array(3)}, lambda kept: kept["offset"].fill(0)),
    ],
    ids=["window", "seed", "offset"],
)
def test_options_may_change_before_the_backward_pass(recompute, options, change):
    layer, options = cufa.MultiHeadAttention(32, 4, rotary=True), deepcopy(options)
    x, context, dy = np.random.default_rng().standard_normal((3, 2, 9, 32), np.float32)
    how = {"recompute": recompute, "deterministic": True}
    _, vjp = layer.vjp(layer.init(0), x, context, **how, **options)
    before = vjp(dy)
    change(options)
    np.testing.assert_array_equal(vjp(dy).dx, before.dx)
    np.testing.assert_array_equal(vjp(dy).dparams["wk"], before.dparams["wk"])


def test_an_array_in_the_place_of_an_option_is_not_printed():
    layer, x = cufa.MultiHeadAttention(32, 4), np.ones((2, 9, 32), "f4")
    message = r"^out is an array of shape \(2, 9, 32\) and dtype float32; "
    with pytest.raises(ArgumentError, match=message):
        layer(layer.init(0), x, out=x)


@given(depth=st.integers(1, 5), start=st.floats(-1, 1))
def test_checkpoints_may_be_nested(depth, start):
    def square(x):
        return x * x, lambda dout: 2 * x * dout

    def tower(x, levels):
        if not levels:
            return x, lambda dout: dout
        below, through = cufa.checkpoint(tower)(x, levels - 1)
        y, vjp = square(below)
        return y, lambda dout: through(vjp(dout))

    y, vjp = cufa.checkpoint(tower)(start, depth)
    assert y == tower(start, depth)[0]
    assert vjp(1.0) == pytest.approx(2**depth * start ** (2**depth - 1))
