"""`LongSequenceAttention`: blocks change nothing, hold what they say, and outlive their process."""

from __future__ import annotations

import importlib
import math
import re
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gradient_parts import largest_sums
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paper_streams import PaperCard

import cufa
from cufa import (
    ArgumentError,
    LongSequenceAttention,
    blocks,
    reference,
)
from cufa.bounds import exact, merged, smallest_normal, spacing
from cufa.long import call as long_call
from cufa.long import plan as long_plan
from cufa.testing import (
    Case,
    assert_gradients_within_rounding,
    assert_within_rounding,
    cases,
    numpy_dtype,
)

#: Block sizes that cut these lengths into one part or many, whole or not.
SIZES = st.tuples(st.integers(7, 90), st.integers(7, 90))
long_cases = cases(
    max_elements=1 << 16,
    seqlen_q=st.integers(0, 100),
    seqlen_k=st.integers(0, 100),
    head_dim=st.sampled_from([4, 16]),
    head_dim_v=st.sampled_from([4, 16]),
)


def servable(case: Case) -> Case:
    """With bottom-right alignment where ALiBi needs it."""
    unequal = case.seqlen_q != case.seqlen_k
    return replace(case, causal=bool(case.causal)) if case.alibi and unequal else case


def exact_in_blocks(case: Case, keys: int):
    """The answer, with the bounds of results that are merged from those over blocks of keys."""
    shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    options = case.options(np)
    mask = np.broadcast_to(options.pop("mask", True), shape)
    sink = options.pop("sink", None)
    columns = np.arange(case.seqlen_k)

    def over(first, last, **more):
        seen = mask & (columns >= first) & (columns < last)
        return exact(*case.arrays(np), mask=seen, **options, **more)

    found = over(0, keys)
    for start in range(keys, case.seqlen_k, keys):
        part = over(start, start + keys)
        found = merged(over(0, start + keys), found, part, layout=case.layout)
    if sink is not None:
        none = np.zeros_like(found.out)  # a key of value 0
        lse = np.broadcast_to(sink.astype(np.float64)[:, None], shape[:3]).reshape(found.lse.shape)
        last = found._replace(out=none, lse=lse, out_bound=none, lse_bound=np.zeros_like(lse))
        found = merged(over(0, case.seqlen_k, sink=sink), found, last, layout=case.layout)
    return found


def gradients_in_blocks(case: Case, sizes: tuple[int, int]):
    """The gradients, with the bounds of sums whose parts are rounded to the dtype of `q`, and in
    which what is below the smallest normal number may count as zero, as it does to CuPy."""
    expected = case.exact_gradients()
    dtype = numpy_dtype(case.dtype)
    queries, keys = (
        math.ceil(n / size) for n, size in zip((case.seqlen_q, case.seqlen_k), sizes, strict=True)
    )
    parts = {"dq": keys, "dk": queries * case.group, "dv": queries * case.group}
    lost, bounds = smallest_normal(dtype), expected.bounds
    for name, largest in largest_sums(case).items():
        # Parts of wider dtypes are as exact as the sums.
        rounded = 2 * spacing(dtype, largest) if dtype.itemsize == 2 else 0
        wider = getattr(bounds, name) + parts[name] * (rounded + lost)
        bounds = bounds._replace(**{name: wider})
    return expected._replace(bounds=bounds)


def without_bias(expected):
    return expected.only({"q", "k", "v", "sink"})


@pytest.fixture
def paper(monkeypatch):
    """`cufa.gpu.streaming` on a card on paper, taken for one of this machine."""
    card = PaperCard()
    cupy = card.cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.delitem(sys.modules, "cufa.gpu.streaming", raising=False)
    streaming = importlib.import_module("cufa.gpu.streaming")
    monkeypatch.setattr(long_call, "_streaming", lambda: streaming)
    monkeypatch.setattr(streaming, "_CHUNK", 2000)  # some arrays take several
    monkeypatch.setattr(streaming, "_THREADED", 1500)
    yield card
    sys.modules.pop("cufa.gpu.streaming", None)


@given(case=long_cases.map(servable), sizes=SIZES)
def test_blocks_of_any_size_give_the_formula(case, sizes):
    long = LongSequenceAttention(sizes, device="cpu")
    result = long(*case.arrays(np), return_lse=True, **case.options(np))
    assert_within_rounding(result, exact_in_blocks(case, sizes[1]))


@given(case=long_cases.map(servable), sizes=SIZES)
def test_gradients_in_blocks_are_those_of_the_formula(case, sizes):
    arrays, options, (dout, dlse) = case.arrays(np), case.options(np), case.back(np)
    out, lse = cufa.attention(*arrays, return_lse=True, **options)
    long = LongSequenceAttention(sizes, device="cpu")
    got = long.backward(dout, *arrays, out, lse, dlse=dlse, **options)
    assert_gradients_within_rounding(got, without_bias(gradients_in_blocks(case, sizes)))


@pytest.mark.parametrize("slope", [1e38, -1e38])
def test_a_row_that_sees_no_key_is_zero_however_steep_alibi_is(slope):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 90, 8), dtype=np.float32)
    mask = np.ones((90, 90), bool)
    mask[70] = False
    options = {"mask": mask, "alibi_slopes": np.full(2, slope)}  # infinite times a distance
    long = LongSequenceAttention(20, device="cpu")
    out, lse = long(q, k, v, return_lse=True, **options)
    assert (out[:, 70] == 0).all()
    assert (lse[:, 70] == -np.inf).all()
    saved = cufa.attention(q, k, v, return_lse=True, **options)
    got = long.backward(v, q, k, v, *saved, **options)
    want = cufa.attention_backward(v, q, k, v, *saved, **options)
    assert (got.dq[:, 70] == 0).all()
    for a, b in zip(got[1:3], want[1:3], strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def problem_of(call, **options):
    arrays = cufa.arrays.Arrays(*call)
    given = {"causal": False, "window": None, "softcap": None, "scale": None, "layout": "bhsd"}
    return long_call.checked(arrays, 0.0, **(given | options))[1]


def zeros(seqlen_q, seqlen_k, heads=1, kv_heads=1, head_dim=8, dtype="float32"):
    """Arrays that take no memory."""
    shapes = (heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k)
    return [np.broadcast_to(np.zeros((), dtype), (*shape, head_dim)) for shape in shapes]


@given(
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    sizes=SIZES,
    causal=st.sampled_from([False, True, "top_left"]),
    window=st.none() | st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
    alibi=st.booleans(),
    by_keys=st.booleans(),
)
def test_every_key_that_a_query_sees_is_in_one_piece(
    lengths, sizes, causal, window, alibi, by_keys
):
    """And what it does not see in none, or hidden by the piece's window; and ALiBi's distances are
    those of the piece, or on one side."""
    causal = bool(causal) if alibi else causal
    problem = problem_of(zeros(*lengths), causal=causal, window=window)
    if alibi:
        problem = replace(problem, alibi_slopes=problem.q)
    sees = np.zeros(lengths, int)
    for block in long_plan.blocks(problem, long_plan.Sizes(1, *sizes), by_keys):
        for inner in block.inner:
            pair = (inner, block.outer) if by_keys else (block.outer, inner)
            found = long_plan.pieces(problem, *pair)
            assert found or inner == slice(0, 0)
            for rows, keys, bounds, side in found:
                i, j = np.ogrid[: rows.stop - rows.start, : keys.stop - keys.start]
                behind = j - i - (j.size - i.size)
                left, right = bounds or (None, None)
                seen = (left is None or behind >= -left) & (right is None or behind <= right)
                sees[rows, keys] += np.broadcast_to(seen, (i.size, j.size))
                beyond = j + keys.start - (i + rows.start) - (lengths[1] - lengths[0])
                told = {"left": beyond <= 0, "right": beyond >= 0, "across": beyond == behind}
                assert side == "" or told[side].all()
    q, k, _ = zeros(*lengths)
    visible = reference.scores(q, k, causal=causal, window=window)[0, 0] > -np.inf
    np.testing.assert_array_equal(sees, visible)


@given(
    lengths=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
    heads=st.sampled_from([(1, 1), (8, 8), (12, 3), (64, 1)]),
    head_dim=st.sampled_from([1, 64, 200]),
    dtype=st.sampled_from(["float16", "float64"]),
    max_bytes=st.integers(20, 30).map(lambda n: 1 << n),
    backward=st.booleans(),
)
def test_blocks_are_the_longest_that_fit(lengths, heads, head_dim, dtype, max_bytes, backward):
    call = zeros(*lengths, *heads, head_dim, dtype)
    long = LongSequenceAttention(max_bytes=max_bytes, device="cpu")
    least = long_plan.held_bytes(problem_of(call), long_plan.Sizes(1, 128, 128), backward)
    if least > max_bytes:
        with pytest.raises(ArgumentError, match=f"max_bytes is {max_bytes}; .* take {least}"):
            long.plan(*call, backward=backward)
        return
    plan = long.plan(*call, backward=backward)
    assert plan.bytes <= max_bytes
    assert 1 <= plan.heads <= heads[1]
    whole = plan.queries >= lengths[0] and plan.keys >= lengths[1]
    sizes = long_plan.Sizes(plan.heads, *(2 * n + 256 for n in (plan.queries, plan.keys)))
    problem = problem_of(call)
    assert whole or long_plan.held_bytes(problem, sizes, backward) > max_bytes


PAGE = Path(__file__).parents[1] / "docs" / "long.md"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dtype", "a"), [("float16", 4), ("float32", 4), ("float64", 8)])
def test_the_page_states_the_formula_of_the_plan(dtype, a, backward):
    line = re.search(f"^{'backward' if backward else 'forward'} +(.+)$", PAGE.read_text(), re.M)
    q, k, v = zeros(700, 500, 6, 3, 24, dtype)
    problem = problem_of((q, k, v[..., :16]))
    held = long_plan.held_bytes(problem, long_plan.Sizes(2, 300, 200), backward)
    named = {"H": 4, "h": 2, "n": 300, "m": 200, "d": 24, "d_v": 16, "a": a, "e": q.itemsize}
    products = re.sub(r"(?<=[\w)]) +(?=[\w(])", "*", line[1])
    assert held == eval(products, {"max": max}, named) + (1 << 20)


def test_one_block_of_keys_gives_the_bits_of_attention():
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 200, 16), dtype=np.float32)
    want = cufa.attention(q, k, v, causal=True, return_lse=True)
    long = LongSequenceAttention((200, 200), device="cpu")
    for got, a in zip(long(q, k, v, causal=True, return_lse=True), want, strict=True):
        np.testing.assert_array_equal(got, a)


@pytest.mark.usefixtures("paper")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=long_cases.map(servable), sizes=SIZES)
@example(case=Case(1, 1, 1, 1, 0, head_dim=4, head_dim_v=4), sizes=(7, 7))  # nothing to copy of k
def test_blocks_whose_copies_are_late_give_the_formula_too(case, sizes):
    """Copies to a card and back, each made as late as it may be, in memory full of NaN."""
    arrays, options, (dout, dlse) = case.arrays(np), case.options(np), case.back(np)
    long = LongSequenceAttention(sizes, device="gpu")
    result = long(*arrays, return_lse=True, **options)
    assert_within_rounding(result, exact_in_blocks(case, sizes[1]))
    saved = cufa.attention(*arrays, return_lse=True, **options)
    got = long.backward(dout, *arrays, *saved, dlse=dlse, **options)
    assert_gradients_within_rounding(got, without_bias(gradients_in_blocks(case, sizes)))


def test_blocks_that_nobody_sees_are_not_copied(paper):
    q, k, v = np.ones((3, 1, 800, 8), np.float32)
    k[:, 500:], v[:, 500:] = np.nan, np.nan
    long = LongSequenceAttention(100, device="gpu")
    out = long(q[:, :500], k, v, causal="top_left")
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    # Each block of queries but the first begins with the keys that the one before has left.
    pairs = long.plan(q[:, :500], k, v, causal="top_left").pairs
    assert pairs == 15
    assert paper.copied < 4 * 100 * 8 * (5 + 2 * pairs)


@pytest.mark.usefixtures("paper")
def test_what_progress_raises_ends_the_call_and_its_threads():
    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    call = np.ones((3, 1, 300, 8), np.float32)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        LongSequenceAttention(100, device="gpu", progress=stop)(*call)
    assert threading.active_count() == before


def test_blocks_hidden_by_the_lowest_number_count_alike():
    """What docs/long.md says of a row whose lse cannot tell how many keys a block has."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 25, 4), dtype=np.float32)
    bias = np.full((25, 25), np.finfo(np.float32).min)
    out = LongSequenceAttention((25, 20), device="cpu")(q, k, v, bias=bias)
    means = v[:, :20].mean(1, keepdims=True), v[:, 20:].mean(1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(sum(means) / 2, out.shape), atol=1e-6)


@pytest.mark.usefixtures("paper")
def test_keys_that_fit_are_copied_once(paper):
    q, k, v = np.ones((3, 1, 800, 8), np.float32)
    LongSequenceAttention((100, 400), device="gpu")(q, k, v)
    assert paper.copied == q.nbytes + k.nbytes + v.nbytes


@given(case=long_cases.map(servable), sizes=SIZES, backward=st.booleans())
def test_progress_goes_up_to_the_total(case, sizes, backward):
    steps = []
    long = LongSequenceAttention(sizes, device="cpu", progress=lambda *step: steps.append(step))
    arrays, options = case.arrays(np), case.options(np)
    if backward:
        out, lse = cufa.attention(*arrays, return_lse=True, **options)
        long.backward(case.back(np)[0], *arrays, out, lse, **options)
    else:
        long(*arrays, **options)
    total = long.plan(*arrays, backward=backward, **options).pairs
    assert steps == [(done, total) for done in range(total + 1)]


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("option", ["causal", "mask", "bias", "alibi_slopes", "sink"])
def test_memory_is_what_the_plan_says(monkeypatch, option, backward):
    """Beside inputs and results; what attention itself works with comes on top, here, on the CPU,
    some blocks of one thread."""
    monkeypatch.setattr(blocks, "_processors", lambda: 1)
    monkeypatch.setattr(long_call._streaming(), "_CHUNK", 1 << 16)
    monkeypatch.setattr(long_call._streaming(), "_THREADED", 1 << 20)
    heads, n, d = 2, 1000, 256
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, heads, n, d), dtype=np.float32)
    values = {
        "causal": True,
        "mask": rng.random((1, n, n), np.float32) < 0.9,
        "bias": rng.random((heads, 1, n), np.float32),
        "alibi_slopes": np.ones(heads, np.float32),
        "sink": np.ones(heads, np.float32),
    }
    options = {option: values[option]}
    long = LongSequenceAttention(500, device="gpu")
    plan = long.plan(q, k, v, backward=backward, **options)
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    results = 3 * q.nbytes + lse.nbytes if backward else out.nbytes + lse.nbytes
    tracemalloc.start()
    if backward:
        long.backward(out, q, k, v, out, lse, **options)
    else:
        long(q, k, v, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.8 * plan.bytes < peak - results < plan.bytes + 4e6
