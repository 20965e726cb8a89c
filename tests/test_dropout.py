"""Dropout: the mask, its counters on all machines, and what attention makes of it."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from emulator.card import Launch, Runner, on_every_machine
from emulator.run import Access
from foreign import Lender, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import attend, cases

import cufa
from cufa import blocks, dropout, reference
from cufa.options import MAX_SEQLEN
from cufa.problem import make_problem
from cufa.testing import assert_within_rounding, to_numpy

#: Counter, key and words of Philox4x32-10, from file tests/kat_vectors of Random123, the library of
#: Salmon et al.: all zeros, all ones, digits of pi.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
N = 256
SEEDS = st.integers(0, 2**64 - 1)
RATES = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.1, 0.5, 0.9])
#: Of a call in which something is dropped.
DROPPED = st.sampled_from([0.1, 0.5, 0.9]) | st.floats(2**-20, 1 - 2**-20)
#: Of a row or column: any, and near what 16, 32 and 30 bits hold.
PLACES = st.integers(0, MAX_SEQLEN - 40) | st.sampled_from([0, 2**16 - 20, MAX_SEQLEN - 40])
HEADS = st.integers(0, dropout.MAX_HEADS - 1)
SIZES = st.integers(1, 40)
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 70), st.integers(0, 70))


def hexadecimal(text):
    """Hexadecimal words as arrays."""
    return [np.array(int(word, 16), np.uint64) for word in text.split()]


def deviation(count):
    """What the mean of so many independent numbers of 0 to 1 exceeds with probability 1e-12 at
    most, to either side (Hoeffding 1963, theorem 2)."""
    return math.sqrt(math.log(2e12) / (2 * count))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
@pytest.mark.parametrize("philox", [dropout.philox, reference.philox4x32])
def test_philox_gives_the_known_answers(philox, counter, key, answer):
    key = tuple(int(word) for word in hexadecimal(key))
    np.testing.assert_array_equal(philox(hexadecimal(counter), key), hexadecimal(answer))


@given(seed=SEEDS, p=RATES, shape=SHAPES)
def test_the_mask_is_that_of_the_words_of_each_position(seed, p, shape):
    mask = cufa.dropout_mask(seed, shape, p)
    want = reference.dropout_words(seed, *np.ogrid[tuple(map(slice, shape))])
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, want >= dropout.threshold(p))


@given(
    seed=SEEDS, p=RATES, batch=HEADS, head=HEADS, row=PLACES, column=PLACES, height=SIZES,
    width=SIZES,
)  # fmt: skip
def test_a_block_from_anywhere_is_a_part_of_the_mask(
    xp, seed, p, batch, head, row, column, height, width
):
    rows, columns = slice(row, row + height), slice(column, column + width)
    block = dropout.keep_block(xp, seed, p, xp.asarray(batch), xp.asarray(head), rows, columns)
    want = reference.dropout_words(seed, batch, head, *np.ogrid[rows, columns])
    np.testing.assert_array_equal(to_numpy(block), want >= dropout.threshold(p))


@given(seed=SEEDS, p=RATES, shape=SHAPES, piece=st.integers(1, 3000))
def test_the_pieces_of_a_mask_may_have_any_size(seed, p, shape, piece):
    want = cufa.dropout_mask(seed, shape, p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "_PIECE", piece)
        patch.setattr(dropout, "_STRIP", piece)
        np.testing.assert_array_equal(cufa.dropout_mask(seed, shape, p), want)


@given(seed=SEEDS, p=RATES, shape=SHAPES, axes=st.integers(2, 4))
def test_a_smaller_mask_is_the_corner_of_a_larger(seed, p, shape, axes):
    whole = cufa.dropout_mask(seed, (3, 3, 70, 70), p)
    corner = (0,) * (4 - axes) + tuple(map(slice, shape[4 - axes :]))
    np.testing.assert_array_equal(cufa.dropout_mask(seed, shape[4 - axes :], p), whole[corner])


@given(seed=SEEDS, p=RATES)
def test_weights_are_kept_at_the_rate_asked_for(seed, p):
    mask = cufa.dropout_mask(seed, (2, 2, 128, 128), p)
    assert abs(mask.mean() - (1 - p)) <= deviation(mask.size)


@given(p=RATES)
def test_the_threshold_is_the_rate_in_units_of_a_word(p):
    assert abs(dropout.threshold(p) - p * 2**32) <= 1
    assert dropout.threshold(p) < 2**32


@given(seed=SEEDS, row=PLACES, column=PLACES)
def test_a_word_at_the_threshold_is_kept_and_one_below_is_not(seed, row, column):
    place = slice(row, row + 1), slice(column, column + 1)
    word = int(reference.dropout_words(seed, 0, 0, row, column))
    assert dropout.keep_block(np, seed, word / 2**32, 0, 0, *place).all()
    above = min(word + 1, 2**32 - 1) / 2**32
    assert dropout.keep_block(np, seed, above, 0, 0, *place).any() == (word == 2**32 - 1)


# DR1
@given(
    seed=SEEDS, other=SEEDS, head=st.tuples(HEADS, HEADS), other_head=st.tuples(HEADS, HEADS),
    at=st.tuples(PLACES, PLACES), other_at=st.tuples(PLACES, PLACES), swap=st.booleans(),
)  # fmt: skip
def test_masks_of_other_seeds_heads_batches_and_places_are_independent(
    seed, other, head, other_head, at, other_at, swap
):
    def block(seed, head, at):
        rows, columns = (slice(x // 64 * 64, x // 64 * 64 + 64) for x in at)
        return dropout.keep_block(np, seed, 0.5, *head, rows, columns)

    if swap:  # nothing differs but the order of two numbers
        other, other_head, other_at = seed, head[::-1], at[::-1]
    a, b = (seed, head, at), (other, other_head, other_at)
    same = (block(*a) == block(*b)).mean()
    tiles = [(s, h, tuple(x // 64 for x in place)) for s, h, place in (a, b)]
    assert same == 1 if tiles[0] == tiles[1] else abs(same - 0.5) <= deviation(64 * 64)


# SZ7
@given(seed=SEEDS, row=st.integers(0, 2**16 - 64), seqlen_k=st.sampled_from([2**16, 2**20, 2**29]))
def test_rows_are_told_apart_beyond_2_to_the_32_weights(seed, row, seqlen_k):
    far = row + (1 << 32) // seqlen_k
    here, there = (
        dropout.keep_block(np, seed, 0.5, 0, 0, slice(i, i + 1), slice(0, 4096)) for i in (row, far)
    )
    assert abs((here == there).mean() - 0.5) <= deviation(here.size)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_thread_of_tensor_cores_needs_no_word_for_another(transposed):
    # PTX ISA, accumulators of mma.m16n8: rows g and g + 8, columns 2 t and 2 t + 1; here two tiles.
    tile = np.arange(256).reshape(16, 16)
    words = reference.dropout_words(0, 0, 0, *np.ogrid[:16, :16])
    words, tile = (words.T, tile.T) if transposed else (words, tile)
    held, computed = [], []
    for lane in range(32):
        group, pair = lane // 4, 2 * (lane % 4)
        rows, columns = [group, group + 8], [pair, pair + 1, pair + 8, pair + 9]
        held.append(set(words[np.ix_(rows, columns)].ravel().tolist()))
        places = [divmod(int(n), 16) for n in tile[np.ix_(rows[:1], columns[:2])].ravel()]
        counters = [[np.array(n, np.uint64) for n in (j, i, 0, 0)] for i, j in places]
        computed.append({int(word) for c in counters for word in dropout.philox(c, (0, 0))})
    assert held == computed


BAD_MASKS = [
    (0, (4, 4), 1.0, cufa.ArgumentError, r"p is 1\.0; .*below 1"),
    (0, (4, 4), -0.1, cufa.ArgumentError, r"p is -0\.1; .*at least 0"),
    (0, (4, 4), math.nan, cufa.ArgumentError, r"p is nan"),
    (0, (4, 4), "0.1", cufa.DTypeError, r"p is '0\.1', a str; .*real number"),
    (-1, (4, 4), 0.1, cufa.ArgumentError, r"seed is -1; .*at least 0 and below 2\*\*64"),
    (2**64, (4, 4), 0.1, cufa.ArgumentError, r"seed is 18446744073709551616; .*2\*\*64"),
    (1.0, (4, 4), 0.1, cufa.DTypeError, r"seed is 1\.0, a float; .*integer in host memory"),
    (None, (4, 4), 0.1, cufa.DTypeError, r"seed is None, a NoneType; .*integer"),
    (0, 4, 0.1, cufa.DTypeError, r"shape is 4; .*sequence of integers"),
    (0, (4, 2.5), 0.1, cufa.DTypeError, r"shape is \(4, 2\.5\); .*integers"),
    (0, (4,), 0.1, cufa.ShapeError, r"shape is \(4,\); .*2 axes"),
    (0, (1,) * 5, 0.1, cufa.ShapeError, r"or 4 \(batch"),
    (0, (4, -1), 0.1, cufa.ShapeError, r"at least 0"),
    (0, (1, 2**30), 0.1, cufa.ShapeError, r"seqlens must be at most 1073741823"),
    (0, (2**16, 2**16, 1, 1), 0.1, cufa.ShapeError, r"65536 batches of 65536 heads; .*2147483648"),
]


@pytest.mark.parametrize(("seed", "shape", "p", "error", "message"), BAD_MASKS)
def test_a_bad_mask_is_refused(seed, shape, p, error, message):
    with pytest.raises(error, match=message):
        cufa.dropout_mask(seed, shape, p)


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.array])
def test_a_seed_is_its_value_whatever_holds_it(kind):  # DR2
    want = cufa.dropout_mask(7, (40, 40), 0.5)
    np.testing.assert_array_equal(cufa.dropout_mask(kind(7), (40, 40), 0.5), want)


@on_every_machine
@settings(max_examples=max(1, settings().max_examples // 4))
@given(seed=st.integers(0, 2**32 - 1))
def test_kernels_have_the_same_words_and_masks(machine: Runner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counter = rng.integers(0, 2**32, (4, N), dtype=np.uint32)
    key = rng.integers(0, 2**32, (2, N), dtype=np.uint32)
    seeds = rng.integers(0, 2**64, N, dtype=np.uint64)
    batch, head = rng.integers(0, dropout.MAX_HEADS, (2, N), dtype=np.int32)
    row, column = rng.integers(0, MAX_SEQLEN, (2, N), dtype=np.int32) >> rng.integers(0, 30, (2, N))
    row, column = row.astype(np.int32), column.astype(np.int32)
    thresholds = rng.integers(0, 2**32, N, dtype=np.uint32)
    own = zip(seeds.tolist(), batch, head, row, column, strict=True)
    words = np.array([reference.dropout_words(*place) for place in own]).astype(np.uint32)
    thresholds[::2] = words[::2] + rng.integers(0, 2, N // 2, dtype=np.uint32)  # the edge

    def kept(rows, columns):
        found = [
            reference.dropout_words(int(s), *place)
            for s, *place in zip(seeds, batch, head, rows, columns, strict=True)
        ]
        return (np.array(found) >= thresholds).astype(np.uint8)

    of_tile = [
        (row & ~8 | 8 * down, column & ~8 | 8 * right) for down in (0, 1) for right in (0, 1)
    ]
    philox = [
        reference.philox4x32(list(c), k)
        for c, k in zip(counter.T.astype(np.uint64), key.T.tolist(), strict=True)
    ]
    expected = {
        "philox": np.array(philox).T.astype(np.uint32),
        "keep": kept(row, column),
        "keep_tile": np.array([kept(*place) for place in of_tile]),
    }
    inputs = {"counter": counter, "key": key, "seed": seeds, "batch": batch, "head": head}
    inputs |= {"row": row, "column": column, "threshold": thresholds}
    arrays = {name: (np.ascontiguousarray(a), Access.READ) for name, a in inputs.items()}
    arrays |= {
        name: (np.zeros(a.shape, a.dtype), Access.WRITE_ONCE) for name, a in expected.items()
    }
    machine.check(Launch("dropout", arrays, {"n": N}, grid=(N // 128,)), expected, seed)


@given(case=cases(dropout_p=DROPPED))
def test_attention_with_dropout_is_the_formula(xp, fit, case):
    case = fit(case)
    assert_within_rounding(attend(xp, case), case.exact())


@given(
    case=cases(max_elements=1 << 20, algorithm="auto", dropout_p=DROPPED),
    scores=st.integers(30, 2000),
    rows=st.integers(1, 50),
)
def test_the_blocks_of_the_cpu_may_have_any_size_and_drop_the_same(case, scores, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_SCORES", scores)
        patch.setattr(blocks, "_BLOCK_ROWS", rows)
        assert_within_rounding(attend(np, case), case.exact())


# DR4
@given(
    seed=SEEDS, p=st.sampled_from([0.25, 0.5, 0.75]), batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3), group=st.integers(1, 3), seqlen_q=st.integers(1, 300),
    seqlen_k=st.sampled_from([1, 16, 64, 128]), algorithm=st.sampled_from(["auto", "standard"]),
)  # fmt: skip
def test_an_identity_of_values_shows_the_mask(
    xp, seed, p, batch, kv_heads, group, seqlen_q, seqlen_k, algorithm
):
    heads = kv_heads * group
    q = xp.zeros((batch, heads, seqlen_q, 16), "float32")
    k = xp.zeros((batch, kv_heads, seqlen_k, 16), "float32")
    v = xp.broadcast_to(xp.eye(seqlen_k, dtype="float32"), (batch, kv_heads, seqlen_k, seqlen_k))
    out = cufa.attention(q, k, v, dropout_p=p, dropout_seed=seed, algorithm=algorithm)
    mask = cufa.dropout_mask(seed, (batch, heads, seqlen_q, seqlen_k), p)
    got = to_numpy(out) * seqlen_k  # each weight is 1 / seqlen_k, a power of two
    np.testing.assert_array_equal(got != 0, mask)
    np.testing.assert_array_max_ulp(got[mask], np.full(mask.sum(), 1 / (1 - p), "float32"), 2)


@given(case=cases(dropout_p=DROPPED))
def test_dropout_leaves_lse_as_it_is(xp, fit, case):
    case = fit(case)
    if xp is not np:  # kernels have other tiles with dropout: test_dropout_kernels.py
        case = replace(case, algorithm="standard")
    lse, want = (attend(xp, c)[1] for c in (case, replace(case, dropout_p=0.0)))
    assert_same_bits(to_numpy(lse), to_numpy(want))


@given(case=cases(), seed=SEEDS)
def test_a_rate_of_0_is_no_dropout(xp, fit, case, seed):
    case = fit(case)
    plain, with_seed = attend(xp, case), attend(xp, case, dropout_p=0.0, dropout_seed=seed)
    for a, b in zip(plain, with_seed, strict=True):
        assert_same_bits(to_numpy(a), to_numpy(b))


@given(case=cases(dropout_p=DROPPED))
def test_a_seed_gives_the_same_result_again(xp, fit, case):
    case = fit(case)
    for a, b in zip(attend(xp, case), attend(xp, case), strict=True):
        assert_same_bits(to_numpy(a), to_numpy(b))


@given(case=cases(layout="bhsd", dropout_p=DROPPED, max_elements=1 << 20))
def test_the_layout_of_arrays_does_not_matter_to_dropout(xp, fit, case):
    case = fit(case)
    turned = replace(case, layout="bshd")
    want = case.exact().out
    if case.rank > 2:
        want = want.swapaxes(-2, -3)
    np.testing.assert_array_equal(turned.exact().out, want)
    assert_within_rounding(attend(xp, turned), turned.exact())


@given(case=cases(rank=4, layout="bhsd", algorithm="auto"), seed=SEEDS, p=DROPPED)
def test_names_of_flash_attn_have_dropout(case, seed, p):
    q, k, v = case.arrays(np)
    out = cufa.flash_attn_func(q, k, v, dropout_p=p, dropout_seed=seed)
    assert_same_bits(out, cufa.attention(q, k, v, dropout_p=p, dropout_seed=seed))


def test_far_rows_have_masks_of_their_own_in_attention():  # SZ7
    seqlen = 73728  # row 58254 and later are beyond 2**32 weights
    q = np.zeros((seqlen, 1), "float32")
    v = np.eye(16, dtype="float32")[np.arange(seqlen) % 16]  # 16 neighbouring keys, told apart
    out = cufa.attention(q, q, v, window=(15, 0), dropout_p=0.5, dropout_seed=1 << 40)
    i = np.arange(15, seqlen)[:, None]
    keys = i - (i - np.arange(16)) % 16  # that of each column of v, among i - 15 .. i
    kept = reference.dropout_words(1 << 40, 0, 0, i, keys) >= dropout.threshold(0.5)
    np.testing.assert_array_equal(out[15:], kept / 8)


def test_a_new_seed_makes_nothing_ready_anew():
    q = np.ones((3, 5, 7), "float32")
    cufa.attention(q, q, q, dropout_p=0.25, dropout_seed=0)
    before = make_problem.cache_info().misses
    for seed in range(9):
        cufa.attention(q, q, q, dropout_p=0.25, dropout_seed=seed)
    assert make_problem.cache_info().misses == before


@pytest.mark.parametrize("algorithm", ["auto", "standard"])
def test_arrays_of_other_libraries_have_dropout(algorithm):
    q, k, v = np.random.default_rng().standard_normal((3, 2, 40, 16), "float32")
    options = {"dropout_p": 0.5, "dropout_seed": 2**64 - 1, "algorithm": algorithm}
    out = cufa.attention(*map(Lender, (q, k, v)), **options)
    assert_same_bits(out, cufa.attention(q, k, v, **options))


def test_memory_of_a_mask_does_not_grow_with_the_heads_of_standard_attention():
    def peak(heads, **options):
        q = np.ones((heads, 1024, 1), "float32")
        tracemalloc.start()
        cufa.attention(q, q, q, algorithm="standard", **options)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    beside = [peak(heads, dropout_p=0.5, dropout_seed=0) - peak(heads) for heads in (2, 8)]
    assert beside[1] <= beside[0] + (1 << 20)


BAD_DROPOUT = [  # AR1
    (9.9e9, 0, cufa.ArgumentError, r"dropout_p is 9900000000\.0; .*below 1"),
    (-0.1, 0, cufa.ArgumentError, r"dropout_p is -0\.1; .*at least 0"),
    (1.0, 0, cufa.ArgumentError, r"dropout_p is 1\.0; .*below 1"),
    (math.nan, 0, cufa.ArgumentError, r"dropout_p is nan"),
    (None, 0, cufa.DTypeError, r"dropout_p is None, a NoneType; .*number"),
    (0.1, None, cufa.ArgumentError, r"dropout_p is 0\.1 and dropout_seed is None; pass one"),
    (0.1, -1, cufa.ArgumentError, r"dropout_seed is -1; .*at least 0"),
    (0.0, 2**64, cufa.ArgumentError, r"dropout_seed is \d+; .*below 2\*\*64"),
    (0.1, 0.5, cufa.DTypeError, r"dropout_seed is 0\.5, a float; .*integer in host memory"),
]


@pytest.mark.parametrize("call", [cufa.attention, cufa.flash_attn_func])
@pytest.mark.parametrize(("p", "seed", "error", "message"), BAD_DROPOUT)
def test_bad_dropout_is_refused(xp, call, p, seed, error, message):
    q = xp.ones((1, 1, 4, 8), "float32")
    with pytest.raises(error, match=message):
        call(q, q, q, dropout_p=p, dropout_seed=seed)


def test_more_heads_than_counters_tell_apart_are_refused():
    q = np.broadcast_to(np.float32(1), (2**16, 2**16, 0, 1))
    with pytest.raises(cufa.ShapeError, match=r"65536 batches of 65536 heads; .*2147483648"):
        cufa.attention(q, q, q, dropout_p=0.1, dropout_seed=0)
