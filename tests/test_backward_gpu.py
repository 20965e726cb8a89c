"""What only a GPU can show of gradients: streams, graphs, devices, the same bits again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from streams import check_graph_owns_what_it_needs

import cufa
from cufa import reference
from cufa.gradient_bounds import exact_gradients
from cufa.testing import assert_gradients_within_rounding

pytestmark = pytest.mark.gpu
DTYPES = ["float16", "float32"]


@pytest.fixture(params=DTYPES)
def call(request, cupy):
    """Arguments of `attention_backward`, all gradients wanted."""
    random = cupy.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((2, 4, 200, 64), "float32") for _ in range(4))
    q, k, v, dout = (a.astype(request.param) for a in (q, k, v, dout))
    bias = random.standard_normal((1, 4, 200, 200), "float32")
    options = {"causal": True, "bias": bias, "sink": random.standard_normal(4, "float32")}
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **options}


def bits(gradients):
    return [a.tobytes() for a in gradients]


def exact(call):
    given = {n: a.get() if hasattr(a, "get") else a for n, a in call.items()}
    return exact_gradients(**{n: a for n, a in given.items() if n not in ("out", "lse")})


def test_gradients_are_taken_in_the_current_stream(cupy, call):
    cufa.attention_backward(**call)
    stream = cupy.cuda.Stream(non_blocking=True)
    big = cupy.ones((4096, 4096), "float32")
    late = cupy.zeros_like(call["dout"])
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(20):
            big = big @ big * 1e-4  # so long that another stream would be too early
        late[...] = call["dout"]
        got = cufa.attention_backward(**{**call, "dout": late})
        stream.synchronize()
    assert_gradients_within_rounding(got, exact(call))


@pytest.mark.parametrize("mode", ["Relaxed", "Global"])
def test_a_graph_of_gradients_owns_its_workspace(cupy, call, mode):
    backward = partial(cufa.attention_backward, **call, deterministic=True)
    check_graph_owns_what_it_needs(cupy, mode, backward)


@pytest.mark.parametrize("mode", ["Relaxed", "Global"])
def test_a_graph_of_gradients_owns_the_copies_of_its_arguments(cupy, call, mode):
    """What it returns is the caller's, who keeps it."""

    def spread(a):
        wide = cupy.empty((*a.shape, 2), a.dtype)
        wide[..., 0] = a
        return wide[..., 0]

    names = ("dout", "q", "k", "v", "out", "lse")
    given = {**call, **{name: spread(call[name]) for name in names}}
    given |= {"dlse": spread(call["lse"]), "sink": call["sink"].astype("float64")}
    backward = partial(cufa.attention_backward, **given, deterministic=True)
    check_graph_owns_what_it_needs(cupy, mode, backward)


def test_deterministic_gradients_have_the_same_bits_every_time(cupy, call):
    want = bits(cufa.attention_backward(**call, deterministic=True))
    for _ in range(20):
        assert bits(cufa.attention_backward(**call, deterministic=True)) == want


def test_what_is_not_added_up_by_many_blocks_has_the_same_bits_every_time(cupy, call):
    want = bits(cufa.attention_backward(**call)[1:])
    for _ in range(20):
        assert bits(cufa.attention_backward(**call)[1:]) == want


def test_gradients_of_arrays_on_another_device_are_taken_there(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        q = cupy.random.default_rng(0).standard_normal((2, 100, 64), "float32")
        out, vjp = cufa.attention_vjp(q, q, q)
    got = vjp(out)
    assert {a.device.id for a in got[:3]} == {1}
    expected = exact_gradients(*(a.get() for a in (out, q, q, q)))
    assert_gradients_within_rounding(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_long_sequences_agree_with_the_oracle(cupy, dtype):
    """Of the last rows and keys, whose gradients are sums over all others."""
    from cufa.testing import numpy_dtype

    random = np.random.default_rng(0)
    n, some = 4096, 64
    q, k, v, dout = (random.standard_normal((n, 64)).astype(numpy_dtype(dtype)) for _ in range(4))
    _, vjp = cufa.attention_vjp(*map(cupy.asarray, (q, k, v)))
    got = vjp(cupy.asarray(dout))
    want = exact_gradients(dout[-some:], q[-some:], k, v)
    rows = got.dq[-some:].get().astype(np.float64)
    assert (abs(rows - want.gradients.dq) <= want.bounds.dq).all()
    whole = reference.gradients(dout, q, k, v)
    for a, b in ((got.dk, whole.dk), (got.dv, whole.dv)):
        off = np.linalg.norm(a.get().astype(np.float64) - b) / np.linalg.norm(b)
        assert off < {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]


def test_an_unaligned_call_is_served_too(cupy, call):
    turned = {}
    for name in ("q", "k", "v", "dout", "out"):
        a = call[name]
        room = cupy.empty((*a.shape[:-1], a.shape[-1] + 1), a.dtype)
        room[..., 1:] = a
        turned[name] = room[..., 1:]
    got = cufa.attention_backward(**{**call, **turned})
    assert_gradients_within_rounding(got, exact(call))
