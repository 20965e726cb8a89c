"""What only a GPU can show of `LongSequenceAttention`: copies beside kernels, and memory."""

from __future__ import annotations

import numpy as np
import pytest
from problems import case
from test_long_sequence import exact_in_blocks, gradients_in_blocks, without_bias

import cufa
from cufa import LongSequenceAttention
from cufa.testing import assert_gradients_within_rounding, assert_within_rounding, numpy_dtype

pytestmark = pytest.mark.gpu
#: Query rows and keys of a block: several of each, none of them whole.
SIZES = (192, 160)
VARIED = (False, True, True, True)
FIELDS = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left", "seqlen_k": 300},
    "window": {"window": (70, 90), "sink": True},
    "mask": {"mask": VARIED, "dead_rows": True},
    "bias": {"bias": (False, True, False, True), "causal": True},
    "alibi": {"alibi": 1},
    "causal alibi": {"alibi": 2, "causal": True, "seqlen_k": 600},
    "alibi and bias": {"alibi": 1, "bias": VARIED, "extra_dtype": "float64"},
    "softcap": {"softcap": 10.0, "layout": "bhsd"},
    "groups": {"heads": 4, "batch": 2, "causal": True},
}


def on(xp, a):
    return a if xp is np or not isinstance(a, np.ndarray) else xp.asarray(a)


@pytest.mark.parametrize("where", ["host", "card"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_blocks_on_a_card_give_the_formula(cupy, fields, dtype, where):
    problem = case(**{"seqlen_q": 500, "dtype": dtype, "kv_heads": 2, **fields})
    xp = cupy if where == "card" else np
    arrays = [on(xp, a) for a in problem.arrays(np)]
    options = {n: on(xp, a) for n, a in problem.options(np).items()}
    long = LongSequenceAttention(SIZES, device="gpu")
    out, lse = long(*arrays, return_lse=True, **options)
    assert isinstance(out, xp.ndarray)
    assert_within_rounding((out, lse), exact_in_blocks(problem, SIZES[1]))
    dout, dlse = (on(xp, a) for a in problem.back(np))
    # With the output and lse of one call, from which the bounds of gradients start.
    saved = [on(xp, cupy.asnumpy(a)) for a in one_call(cupy, problem)]
    got = long.backward(dout, *arrays, *saved, dlse=dlse, **options)
    assert isinstance(got.dq, xp.ndarray)
    assert_gradients_within_rounding(got, without_bias(gradients_in_blocks(problem, SIZES)))


def one_call(cupy, problem):
    options = {n: on(cupy, a) for n, a in problem.options(np).items()}
    arrays = (on(cupy, a) for a in problem.arrays(np))
    return cufa.attention(*arrays, return_lse=True, **options)


def noise(heads, n, head_dim=64, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    shape = (4, heads, n, head_dim)
    return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def poison(cupy):
    """CuPy's pool gives memory full of NaN."""
    cupy.full(1 << 28, 255, "uint8")
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_copies_beside_kernels_change_no_bit(cupy, busy, late):
    """Whether kernels begin at once, or copies are far ahead of them."""
    q, k, v, dout = noise(4, 6000)
    on_card = [cupy.asarray(a) for a in (q, k, v)]
    long = LongSequenceAttention(
        (1024, 640), device="gpu", progress=lambda done, total: late and busy(late)
    )
    here = LongSequenceAttention((1024, 640))
    want = here(*on_card, causal=True, return_lse=True)
    of_keys = here.backward(cupy.asarray(dout), *on_card, *want, causal=True)[1:3]
    for _ in range(3):
        poison(cupy)
        out, lse = long(q, k, v, causal=True, return_lse=True)
        np.testing.assert_array_equal(out, want[0].get())
        np.testing.assert_array_equal(lse, want[1].get())
        poison(cupy)
        gradients = long.backward(dout, q, k, v, out, lse, causal=True)
        for got, a in zip(gradients[1:3], of_keys, strict=True):
            np.testing.assert_array_equal(got, a.get())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("option", ["causal", "mask", "bias", "alibi_slopes", "sink"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_card_holds_no_more_than_the_plan_says(cupy, dtype, option, backward):
    heads, n = 4, 8000
    q, k, v, dout = noise(heads, n, dtype=dtype)
    values = {
        "causal": True,
        "mask": np.random.default_rng(1).random((n, n), np.float32) < 0.9,
        "bias": np.zeros((heads, 1, n), np.float32),
        "alibi_slopes": np.ones(heads, np.float32),
        "sink": np.zeros(heads, np.float32),
    }
    options = {option: values[option]}
    whole = LongSequenceAttention(n).plan(q, k, v, backward=backward, **options)
    limit = whole.bytes // (heads + 2)  # less than one head takes
    long = LongSequenceAttention(max_bytes=limit, device="gpu")
    plan = long.plan(q, k, v, backward=backward, **options)
    assert plan.bytes <= limit
    assert max(plan.queries, plan.keys) < n
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = np.zeros_like(q), np.zeros((heads, n), np.float32)
        if backward:
            long.backward(dout, q, k, v, out, lse, **options)
        else:
            long(q, k, v, **options)
    assert 0 < pool.total_bytes() <= plan.bytes


def test_a_run_on_a_card_goes_on_from_its_blocks(cupy, tmp_path):
    q, k, v, _ = noise(2, 3000)

    def stop(done, total):
        if done == 9:
            raise KeyboardInterrupt

    want = LongSequenceAttention(512, device="gpu")(q, k, v, causal=True)
    interrupted = LongSequenceAttention(512, device="gpu", progress=stop)
    with pytest.raises(KeyboardInterrupt):
        interrupted(q, k, v, causal=True, checkpoint_dir=tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.block")}
    assert kept
    again = LongSequenceAttention(512, device="gpu")
    np.testing.assert_array_equal(again(q, k, v, causal=True, checkpoint_dir=tmp_path), want)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_work_goes_to_the_current_stream(cupy, busy):
    """What was launched there before is waited for, and results are there on return."""
    stream = cupy.cuda.Stream(non_blocking=True)
    q, k, v, _ = noise(2, 1000)
    want = LongSequenceAttention(256, device="gpu")(q, k, v)
    on_card = [cupy.asarray(a) for a in (q, k, v)]
    late = cupy.zeros_like(on_card[0])
    cupy.cuda.Device().synchronize()
    with stream:
        busy()
        late[...] = on_card[0]
        out = LongSequenceAttention(256)(late, *on_card[1:])
        np.testing.assert_array_equal(out.get(), want)
        np.testing.assert_array_equal(LongSequenceAttention(256, device="gpu")(q, k, v), want)
