"""Sizes at which counters and offsets of 16, 32 or 64 bits run over.

known_faults.md says what the ids, such as SZ7, stand for.
"""

from __future__ import annotations

import numpy as np
import pytest
from problems import case, check

import cufa
from cufa.bounds import exact
from cufa.testing import assert_within_rounding, to_numpy


@pytest.mark.parametrize("batch", [65535, 65536, 65537], ids="SZ2 {}".format)
def test_a_batch_may_be_larger_than_a_grid(xp, batch):
    problem = case(1, 2, heads=1, head_dim=8, dtype="float32", batch=batch)
    check(xp, problem)


@pytest.mark.parametrize("heads", [71280], ids="SZ3 {}".format)
def test_there_may_be_very_many_heads(xp, heads):
    check(xp, case(3, heads=heads, head_dim=8))


@pytest.mark.parametrize("past", [-64, 0, 64], ids="SZ8 {}".format)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_offsets_may_exceed_32_bits(xp, name, past):
    """The second batch element begins just before, at or after 2**31 elements."""
    problem = case(20, 30, batch=2, kv_heads=1, layout="bhsd")
    arrays = dict(zip("qkv", problem.arrays(xp), strict=True))
    far = xp.zeros(2**31 + 2**17, "float16")  # pages that nobody touches take no memory on the CPU
    wide = xp.lib.stride_tricks.as_strided(
        far, arrays[name].shape, ((2**31 + past) * 2, *arrays[name].strides[1:])
    )
    wide[...] = arrays[name]
    result = cufa.attention(*{**arrays, name: wide}.values(), return_lse=True)
    assert_within_rounding(result, problem.exact())


@pytest.mark.parametrize("past", [-64, 0, 64], ids="SZ8 {}".format)
def test_offsets_of_the_output_may_exceed_32_bits(xp, past):
    problem = case(20, 30, batch=2, kv_heads=1, layout="bhsd")
    far = xp.zeros(2**31 + 2**17, "float16")
    out = xp.lib.stride_tricks.as_strided(
        far, (2, 2, 20, 64), ((2**31 + past) * 2, 20 * 64 * 2, 128, 2)
    )
    cufa.attention(*problem.arrays(xp), out=out)
    assert_within_rounding(out, problem.exact())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "head_dim"),
    [
        pytest.param(65536, 8, 4, 64, id="SZ1"),
        pytest.param(65537, 16, 1, 80, id="SZ2"),
        pytest.param(1600, 729, 16, 72, id="SZ5"),
        pytest.param(1, 3, 71280, 128, id="SZ3"),
        pytest.param(2, 3, 100_000, 64, id="SZ3 100000 heads"),
        pytest.param(40, 4096, 128, 128, id="SZ4"),
    ],
)
def test_the_last_batch_of_a_large_tensor_is_right(cupy, batch, seqlen, heads, head_dim):
    shape = batch, seqlen, heads, head_dim
    arrays = [_noise(cupy, shape, seed) for seed in range(3)]
    out, lse = cufa.attention(*arrays, layout="bshd", return_lse=True)
    head = slice(-3, None)
    q, k, v = (to_numpy(a[-1:, :, head]) for a in arrays)
    expected = exact(q[:, -50:], k, v, layout="bshd")
    assert_within_rounding((out[-1:, -50:, head], lse[-1:, head, -50:]), expected)


def _noise(cupy, shape, seed):
    """float16 noise of any size, made on the device a piece at a time."""
    a = cupy.empty(shape, "float16")
    flat, piece = a.reshape(-1), 1 << 26
    rng = cupy.random.default_rng(seed)
    for start in range(0, flat.size, piece):
        part = flat[start : start + piece]
        part[...] = rng.standard_normal(part.size, "float32")
    return a


@pytest.mark.gpu
def test_sz7_rows_of_a_huge_mask_do_not_wrap(cupy):
    n = 73728
    q, k, v = (_noise(cupy, (n, 64), seed) for seed in range(3))
    out, lse = cufa.attention(q, k, v, mask=cupy.tri(n, dtype=bool), return_lse=True)
    for stop in (65540, n):  # rows that 2**32 / n and 2**31 / n elements of the mask precede
        rows = slice(stop - 40, stop)
        seen = (to_numpy(a) for a in (q[rows], k[:stop], v[:stop]))
        assert_within_rounding((out[rows], lse[rows]), exact(*seen, causal=True))


@pytest.mark.gpu
def test_de3_memory_from_the_pool_may_hold_anything(cupy):
    problem = case(1, 5000, batch=2, heads=8, kv_heads=2)
    arrays = problem.arrays(cupy)
    expected = problem.exact()
    for _ in range(3):
        poison = cupy.full(1 << 28, np.nan, "float32")
        del poison
        assert_within_rounding(cufa.attention(*arrays, layout="bshd", return_lse=True), expected)
