"""Infinite, missing and huge numbers in the kernels of an emulated card, and what the formula makes
of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from emulator import build
from emulator.machine import attention, attention_backward, emulator, watched
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa import Gradients, reference
from cufa.bounds import exact
from cufa.gradient_bounds import exact_gradients
from cufa.testing import (
    Case,
    assert_gradients_within_rounding,
    assert_within_rounding,
    numpy_dtype,
)

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

#: Cards with CUDA cores alone, and with all kernels.
archs = pytest.mark.parametrize("arch", [75, 90])
few = settings(max_examples=settings.default.max_examples // 20)
lengths = st.integers(1, 150)


def arrays_of(seqlen_q: int, seqlen_k: int, dtype: str, **fields: Any) -> tuple[Any, ...]:
    """dout, q, k and v of one head."""
    sizes = {"head_dim": 32, "head_dim_v": 32, **fields}
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, **sizes)
    return tuple(a[0, 0] for a in (case.back(np)[0], *case.arrays(np)))


def emulated(arch: int, dout: Any, q: Any, k: Any, v: Any, **options: Any) -> Gradients:
    """Gradients of an emulated card, after NumPy's forward pass."""
    forward = {name: a for name, a in options.items() if name not in ("wrt", "deterministic")}
    out, lse = cufa.attention(q, k, v, return_lse=True, **forward)
    return attention_backward(emulator(arch), dout, q, k, v, out, lse, **options)


def only(gradients: Gradients, *names: str) -> Gradients:
    return Gradients(*(a if n in names else None for n, a in gradients._asdict().items()))


@archs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@few
@given(seqlen_q=lengths, seqlen_k=st.integers(2, 150), place=st.integers(0, 149))
def test_a_key_at_minus_infinity_from_all_queries_takes_no_part(
    arch: int, dtype: str, seqlen_q: int, seqlen_k: int, place: int
) -> None:
    """Rows past the end of a tile are 0, and their scores 0 times infinity."""
    dout, q, k, v = arrays_of(seqlen_q, seqlen_k, dtype)
    place %= seqlen_k
    q[:, 0], k[place, 0] = -1, np.inf
    bias = np.zeros((1, seqlen_k), np.float32)
    rest = np.arange(seqlen_k) != place

    sums = emulated(arch, dout, q, k, v, wrt=["k", "v"])
    of_bias = emulated(arch, dout, q, k, v, bias=bias, wrt=["bias"])
    assert not np.any(sums.dk[~rest])
    assert not np.any(sums.dv[~rest])
    assert not of_bias.dbias[:, ~rest].any()

    want = exact_gradients(dout, q, k[rest], v[rest], bias=bias[:, rest])
    got = Gradients(None, sums.dk[rest], sums.dv[rest], of_bias.dbias[:, rest], None)
    names = ("dk", "dv", "dbias")
    kept = want._replace(gradients=only(want.gradients, *names), bounds=only(want.bounds, *names))
    assert_gradients_within_rounding(got, kept)


@pytest.mark.parametrize(
    ("arch", "algorithm", "dtype", "most"),
    [
        *((75, *of) for of in product(["fa1", "fa2"], ["bfloat16", "float32"], [1.8])),
        *((90, name, "bfloat16", 1.8) for name in ("fa1", "fa2", "fa3")),
        (90, "fa2", "float32", 0.9),  # the sums of TF32 numbers are larger
    ],
)
@few
@given(size=st.floats(0.5, 1), sign=st.sampled_from([1, -1]), keys=st.integers(1, 3))
def test_lse_reaches_as_far_as_scores(
    arch: int, algorithm: str, dtype: str, most: float, size: float, sign: int, keys: int
) -> None:
    """Beyond 2.36e38, where a score times log2(e) is no float32, too."""
    q = np.zeros((1, 8), numpy_dtype(dtype))
    q[0, 0] = size * most * 1e19
    k = sign * q.repeat(keys, axis=0)
    machine, options = emulator(arch), {"scale": 1.0}
    result = attention(machine, q, k, k, return_lse=True, algorithm=algorithm, **options)
    assert np.isfinite(result[1]).all()
    assert_within_rounding(result, exact(q, k, k, **options))


@archs
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@few
@given(size=st.floats(0.5, 1.8), seqlen_k=lengths, place=st.integers(0, 149))
def test_a_score_next_to_the_largest_number_has_weight_1(
    arch: int, dtype: str, size: float, seqlen_k: int, place: int
) -> None:
    dout, q, k, v = arrays_of(1, seqlen_k, dtype)
    place %= seqlen_k
    q[:] = k[:] = 0
    q[0, 0] = k[place, 0] = size * 1e19
    got = emulated(arch, dout, q, k, v, scale=1.0)
    np.testing.assert_array_equal(got.dv[place], dout[0])
    assert not np.delete(got.dv, place, axis=0).any()
    assert np.isfinite(got.dk.astype(float)).all()
    assert np.isfinite(got.dq.astype(float)).all()


@archs
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("deterministic", [False, True])
@few
@given(seqlen_q=lengths, seqlen_k=lengths, causal=st.booleans(), row=st.integers(0, 149))
def test_a_row_of_the_lowest_number_has_the_gradients_of_one_without_keys(
    arch: int,
    dtype: str,
    deterministic: bool,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    row: int,
) -> None:
    dout, q, k, v = arrays_of(seqlen_q, seqlen_k, dtype)
    bias = np.zeros((seqlen_q, seqlen_k), np.float32)
    bias[row % seqlen_q] = np.finfo(np.float32).min
    options: dict[str, Any] = {"causal": causal, "deterministic": deterministic}
    got = emulated(arch, dout, q, k, v, bias=bias, **options)
    hidden = np.where(bias < 0, np.float32(-np.inf), bias)
    assert_gradients_within_rounding(
        got, exact_gradients(dout, q, k, v, bias=hidden, causal=causal)
    )


@pytest.mark.parametrize("arch", [None, 75, 90])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@few
@given(
    seqlen_q=lengths,
    seqlen_k=lengths,
    row=st.integers(0, 149),
    deterministic=st.booleans(),
    dropout_p=st.floats(0.1, 0.9),
)
def test_a_weight_of_nan_is_nan_where_it_is_dropped_too(
    arch: int | None,
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    row: int,
    deterministic: bool,
    dropout_p: float,
) -> None:
    """On NumPy's backend, where `arch` is None, as on all cards."""
    dout, q, k, v = arrays_of(seqlen_q, seqlen_k, dtype)
    q[row % seqlen_q] = np.nan
    options: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": 5}
    want = reference.gradients(dout, q, k, v, **options)
    options["deterministic"] = deterministic
    if arch is None:
        del options["deterministic"]
        got = cufa.attention_vjp(q, k, v, **options)[1](dout)
    else:
        got = emulated(arch, dout, q, k, v, **options)
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(np.isnan(a.astype(float)), np.isnan(b))


def products_on_tensor_cores(*arrays: Any) -> int:
    """Instructions of the kernel whose blocks own keys, in a backward pass of float32."""
    with watched(emulator(90)) as launches:
        got = emulated(90, *arrays)
    assert_gradients_within_rounding(got, exact_gradients(*arrays))
    ((_, counts),) = (launch for launch in launches if launch[0].kernel == "fa2_bwd_tf32")
    return counts.executed["mma.m16n8k8.tf32"]


@pytest.mark.parametrize("size", [2.0**-113, 1e-40, 2.0**31, 1e12], ids=str)
@pytest.mark.parametrize(("name", "blocks"), [("dout", 0), ("q", 0), ("k", 2), ("v", 2)])
def test_what_tf32_cannot_hold_is_multiplied_on_cuda_cores(
    name: str, blocks: int, size: float
) -> None:
    """By the blocks that meet it: of queries by all three, of keys by their own."""
    arrays = dict(zip(("dout", "q", "k", "v"), arrays_of(40, 150, "float32"), strict=True))
    every = products_on_tensor_cores(*arrays.values())
    assert every
    arrays[name][7, 3] = size
    assert products_on_tensor_cores(*arrays.values()) == every * blocks // 3


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_large_gradient_of_lse_is_multiplied_on_cuda_cores(size: float) -> None:
    dout, q, k, v = arrays_of(5, 9, "float32")
    q, k = q / 2**33, k / 2**33
    dlse = np.full(5, size, np.float32)
    out, lse = cufa.attention(q, k, v, return_lse=True)
    got = attention_backward(emulator(90), dout, q, k, v, out, lse, dlse=dlse)
    assert_gradients_within_rounding(got, exact_gradients(dout, q, k, v, dlse=dlse))


def test_sums_of_dq_that_are_denormal_are_within_rounding() -> None:
    """Sums of float32 over blocks count denormals as 0."""
    dout, q, k, v = arrays_of(1, 80, "float32")
    q[:], dout[:], v[:] = 0, 2.0**-111, (np.arange(80) % 2 == 0)[:, None]
    k[:] = 0
    k[:, 0] = np.where(np.arange(80) % 2 == 0, -(2.0**-20), 2.0**-20)
    got = emulated(90, dout, q, k, v, scale=1.0)
    assert_gradients_within_rounding(got, exact_gradients(dout, q, k, v, scale=1.0))


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_an_infinite_value_in_another_block_of_keys_is_infinite_in_dk(arch: int) -> None:
    dout, q, k, v = (abs(a) for a in arrays_of(1, 128, "float32"))
    v[100, 0] = np.inf
    dk = emulated(arch, dout, q, k, v, wrt=["k", "v"]).dk
    assert (dk[:64] == -np.inf).all()
