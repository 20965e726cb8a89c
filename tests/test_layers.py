"""What is true of `MultiHeadAttention` on any input; test_layer_calls.py has what it refuses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layer_problems import LayerCase, formula, join_gradients, layer_cases, projection_gradients

import cufa
from cufa import layers
from cufa.bounds import fractions
from cufa.testing import numpy_dtype, to_numpy

SOME = {"rank": 4, "batch": st.integers(1, 2), "lengths": st.integers(1, 12)}


@pytest.fixture(scope="session")
def suit(xp):
    """Bends a problem so that a run of the GPU tests compiles few kernels."""
    return (lambda problem: problem) if xp is np else LayerCase.few_kernels


def assert_within(got, want, *bounds):
    """`got` is as near to `want` as the sum of some bounds."""
    assert got.shape == want.shape
    assert fractions(got, want, sum(bounds)).max(initial=0) <= 1


def named(gradients) -> dict[str, Any]:
    """What `vjp` gave that is not None, by the name of the input."""
    dparams, dx, dcontext, dbias, dsink = gradients
    found = {**dparams, "x": dx, "context": dcontext, "bias": dbias, "sink": dsink}
    return {name: a for name, a in found.items() if a is not None}


def bits(gradients) -> dict[str, bytes]:
    return {name: to_numpy(a).tobytes() for name, a in named(gradients).items()}


@given(problem=layer_cases())
def test_a_layer_is_the_formula(xp, suit, problem):
    problem = suit(problem)
    params, x, context = problem.arrays(xp)
    y = problem.layer(params, x, context, **problem.options(xp))
    assert y.dtype == x.dtype
    assert_within(y, *formula(problem))


@given(problem=layer_cases(context=False, rotary=True), offset=st.integers(0, 1000))
def test_a_shift_of_all_positions_changes_nothing(xp, suit, problem, offset):
    problem = suit(problem)
    params, x, _ = problem.arrays(xp)
    y = problem.layer(params, x, **{**problem.options(xp), "offset": offset})
    here, there = formula(problem), formula(problem, offset)
    assert_within(y, here.exact, here.off, there.off)


@given(
    problem=layer_cases(
        context=False, offset=st.just(0), causal=True, features=["softcap", "sink"], dropout_p=0.0
    ),
    start=st.integers(0, 24),
)
def test_the_newest_rows_over_all_so_far_are_those_of_the_whole(xp, suit, problem, start):
    problem = suit(problem)
    params, x, _ = problem.arrays(xp)
    options = {**problem.options(xp), "offset": start}
    newest = problem.layer(params, x[..., start:, :], x, **options)
    want = formula(problem).each(lambda a: a[..., start:, :])
    assert_within(newest, want.exact, 3 * want.off)


@given(problem=layer_cases())
def test_results_with_and_without_gradients_are_the_same_bits(xp, suit, problem):
    problem = suit(problem)
    (params, x, context), options = problem.arrays(xp), problem.options(xp)
    y = problem.layer(params, x, context, **options)
    same, _ = problem.layer.vjp(params, x, context, **options)
    np.testing.assert_array_equal(to_numpy(same), to_numpy(y))


@given(problem=layer_cases())
def test_recomputed_and_checkpointed_gradients_are_the_same_bits(xp, suit, problem):
    problem = suit(problem)
    (params, x, context), options = problem.arrays(xp), problem.options(xp)
    options["deterministic"] = True
    dy = problem.back(xp)
    want, vjp = problem.layer.vjp(params, x, context, **options)
    kept = bits(vjp(dy))
    recomputed, again = problem.layer.vjp(params, x, context, recompute=True, **options)
    checked, third = cufa.checkpoint(problem.layer.vjp)(params, x, context, **options)
    assert bits(again(dy)) == bits(third(dy)) == bits(vjp(dy)) == kept
    np.testing.assert_array_equal(to_numpy(recomputed), to_numpy(want))
    np.testing.assert_array_equal(to_numpy(checked), to_numpy(want))


@given(problem=layer_cases())
def test_gradients_have_shape_dtype_and_library_of_their_inputs(xp, suit, problem):
    problem = suit(problem)
    (params, x, context), options = problem.arrays(xp), problem.options(xp)
    inputs = {**params, "x": x, "context": context}
    inputs |= {name: options[name] for name in ("bias", "sink") if name in options}
    _, vjp = problem.layer.vjp(params, x, context, **options)
    found = named(vjp(problem.back(xp)))
    assert found.keys() == {name for name, a in inputs.items() if a is not None}
    for name, a in found.items():
        assert (type(a), a.shape, a.dtype) == (xp.ndarray, inputs[name].shape, inputs[name].dtype)


@given(problem=layer_cases(**SOME), data=st.data())
def test_gradients_come_in_the_order_of_their_parameters(problem, data):
    (params, x, context), layer = problem.arrays(np), problem.layer
    order = data.draw(st.permutations(list(params)))
    shuffled = {name: params[name] for name in order}
    _, vjp = layer.vjp(shuffled, x, context, **problem.options(np))
    assert list(vjp(problem.back(np)).dparams) == order

    q, k, v = layer.project(params, x, context)
    of_heads, *_ = layer.project_backward(q, k, v, params, x, context)
    of_join, _ = layer.join_backward(x, params, q)
    assert [*of_heads, *of_join] == list(layer.shapes) == list(layer.init(0))


@given(problem=layer_cases(dtypes=["float64"], extra_dtype="float64"), data=st.data())
def test_gradients_are_the_slope_of_the_loss(problem, data):
    """By central differences, whose own error is what they change by at twice the step."""
    (params, x, context), options = problem.arrays(np), problem.options(np)
    y, vjp = problem.layer.vjp(params, x, context, **options)
    dy = problem.back(np)
    found = named(vjp(dy))
    name = data.draw(st.sampled_from(sorted(found)))
    along = np.random.default_rng([problem.case.seed, 5]).uniform(-1, 1, found[name].shape)

    def loss(step):
        inputs = {**params, "x": x, "context": context, **options}
        inputs[name] = inputs[name] + step * along
        moved = {n: inputs.pop(n) for n in params}
        return (dy * problem.layer(moved, **inputs)).sum()

    def slope(h):
        return (loss(h) - loss(-h)) / (2 * h)

    h = 1e-5
    room = abs(slope(2 * h) - slope(h)) + 1e-9 * (1 + abs(dy) * (1 + abs(y))).sum()
    assert abs((along * found[name]).sum() - slope(h)) <= room


@given(problem=layer_cases())
def test_gradients_of_the_projections_are_those_of_the_formula(xp, suit, problem):
    problem = suit(problem)
    (params, x, context), layer = problem.arrays(xp), problem.layer
    rng = np.random.default_rng([problem.case.seed, 6])
    q, k, v = layer.project(params, x, context, offset=problem.offset)
    back = {
        name: rng.standard_normal(a.shape).astype(a.dtype)
        for name, a in zip("qkv", (q, k, v), strict=True)
    }
    given = (xp.asarray(a) for a in back.values())
    dparams, dx, dcontext = layer.project_backward(
        *given, params, x, context, offset=problem.offset
    )
    got = {**dparams, "x": dx, **({} if context is None else {"context": dcontext})}
    want = projection_gradients(problem, back)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_within(got[name], *value)

    out = rng.standard_normal(q.shape).astype(q.dtype)
    dparams, dout = layer.join_backward(problem.back(xp), params, xp.asarray(out))
    want = join_gradients(problem, out, problem.back(np))
    for name, value in want.items():
        assert_within({**dparams, "out": dout}[name], *value)


@pytest.mark.parametrize("crossed", [False, True])
def test_a_gradient_that_fits_is_finite_whatever_it_is_a_sum_of(xp, crossed):
    """Keys and values each give more than float16 holds, and together less."""
    layer = cufa.MultiHeadAttention(2, 1)
    params = {name: 2 * xp.eye(2, dtype="float16") for name in layer.shapes}
    x, one = xp.zeros((3, 2), "float16"), xp.ones((3, 1, 2), "float16")
    by_q, by_k, by_v = -30000, -48000, 60000
    _, dx, dcontext = layer.project_backward(
        by_q * one, by_k * one, by_v * one, params, x, x if crossed else None
    )
    by_context = 2 * (by_k + by_v)
    assert (to_numpy(dx) == 2 * by_q + (0 if crossed else by_context)).all()
    assert dcontext is None or (to_numpy(dcontext) == by_context).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("embed_dim", [1, 2, 64])
def test_a_long_sum_is_rounded_once(xp, dtype, rows, embed_dim):
    """It is 7, of integers whose sums on the way are more than float16 holds, and more digits than
    either does: cuBLAS would round the parts that it divides so long a sum of so few into."""
    i = np.arange(2048)
    terms = i * i % 151 - (1001 * i % 2048) ** 2 % 151 + np.where(i < 1024, 100, -100)
    layer, dtype = (
        cufa.MultiHeadAttention(embed_dim, 32, kv_heads=1, head_dim=64),
        numpy_dtype(dtype),
    )
    params = {name: 2 * xp.ones(shape, dtype) for name, shape in layer.shapes.items()}
    by_q = np.tile(terms.reshape(32, 64), (rows, 1, 1)).astype(dtype)
    by_kv = np.zeros((rows, 1, 64), dtype)
    by_kv[..., -1] = 1.75
    x = xp.zeros((rows, embed_dim), dtype)
    _, dx, _ = layer.project_backward(*map(xp.asarray, (by_q, by_kv, by_kv)), params, x)
    assert (to_numpy(dx) == 7).all()


@given(problem=layer_cases(context=False))
def test_a_layer_over_itself_is_self_attention(xp, suit, problem):
    problem = suit(problem)
    (params, x, _), options = problem.arrays(xp), {**problem.options(xp), "offset": 0}
    y, vjp = problem.layer.vjp(params, x, **options)
    same, of_both = problem.layer.vjp(params, x, x, **options)
    np.testing.assert_array_equal(to_numpy(same), to_numpy(y))
    whole, parts = vjp(problem.back(xp)), of_both(problem.back(xp))
    for name, a in whole.dparams.items():
        np.testing.assert_array_equal(to_numpy(parts.dparams[name]), to_numpy(a))


@given(problem=layer_cases(rotary=False, **SOME))
def test_heads_are_views_and_nothing_is_copied(problem):
    (params, x, context), layer = problem.arrays(np), problem.layer
    taken, made = [], []

    def linear(a, *rest):
        taken.append(a)
        made.append(layers_linear(a, *rest))
        return made[-1]

    def weight_gradient(dy, *rest):
        taken.append(dy)
        return layers_weight_gradient(dy, *rest)

    layers_linear, layers_weight_gradient = layers.linear, layers.weight_gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "linear", linear)
        patch.setattr(layers, "weight_gradient", weight_gradient)
        heads = layer.project(params, x, context)
        options = problem.options(np)
        del options["offset"]
        out = cufa.attention(*heads, layout="bshd", **options)
        layer.join(params, out)
        gradients = [np.ones_like(a) for a in heads]
        layer.project_backward(*gradients, params, x, context)
    ours, theirs = (*made[:3], *taken[3:]), (*heads, out, *gradients)
    pairs = zip(ours, theirs, strict=True)
    assert all(np.shares_memory(*pair) for pair in pairs)


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_drops_queries_keys_and_values(recompute, monkeypatch):
    held = []

    def attention_vjp(*qkv, **options):
        held.extend(map(weakref.ref, qkv))
        return cufa.attention_vjp(*qkv, **options)

    monkeypatch.setattr(layers, "attention_vjp", attention_vjp)
    layer = cufa.MultiHeadAttention(8, 2, rotary=True)
    x = np.ones((3, 8), np.float32)
    y, vjp = layer.vjp(layer.init(0), x, recompute=recompute)
    gc.collect()
    assert len(held) == 3
    assert all((a() is None) == recompute for a in held)
    assert vjp(y).dx.shape == x.shape


@pytest.mark.parametrize("wrap", [lambda fn: fn, cufa.checkpoint])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_are_computed_as_often_as_the_docs_say(wrap, recompute, monkeypatch):
    """docs/training.md: projections and runs of attention, in the backward pass alone."""
    counts = {"linear": 0, "attention_vjp": 0, "attention_backward": 0}

    def counting(name, call):
        def counted(*args, **options):
            counts[name] += 1
            return call(*args, **options)

        return counted

    layer = cufa.MultiHeadAttention(8, 2)
    params, x = layer.init(0), np.ones((3, 8), np.float32)
    for name in counts:
        monkeypatch.setattr(layers, name, counting(name, getattr(layers, name)))
    y, vjp = wrap(layer.vjp)(params, x, recompute=recompute)
    assert counts == {"linear": 4, "attention_vjp": 1, "attention_backward": 0}
    vjp(y)
    again = 4 * (wrap is cufa.checkpoint) + 3 * recompute
    assert counts["linear"] == 4 + again
    assert counts["attention_vjp"] == 1 + (wrap is cufa.checkpoint)


@given(problem=layer_cases(), seed=st.integers(0, 99))
def test_a_seed_makes_the_same_parameters_in_every_library(xp, suit, problem, seed):
    problem = suit(problem)
    layer, dtype = problem.layer, problem.case.dtype
    params = layer.init(np.random.default_rng(seed), dtype, xp)
    assert {name: a.shape for name, a in params.items()} == layer.shapes
    same = layer.init(seed, dtype)
    for name, a in params.items():
        assert isinstance(a, xp.ndarray)
        np.testing.assert_array_equal(to_numpy(a), same[name])
        assert to_numpy(a).any() == (a.ndim == 2)
