"""How a sequence lies on ranks, and which calls of attention that makes; without any ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa.distributed.ring import _steps
from cufa.distributed.sequence import chunks_of, visible_parts, zigzag_join, zigzag_split
from cufa.errors import ArgumentError, ShapeError
from cufa.problem import Band


class Whole(NamedTuple):
    """What there is to know of the problem of the whole sequences."""

    band: Band
    alibi_slopes: None = None


BOUNDS = st.none() | st.integers(0, 30)
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@st.composite
def splits(draw):
    """How queries and keys lie on some ranks."""
    if draw(st.booleans()):
        size = draw(st.integers(1, 5))
        seqlens = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
        lengths = [[zigzag_length(n, rank, size) for rank in range(size)] for n in seqlens]
        return [chunks_of("zigzag", of, "q") for of in lengths]
    queries = draw(LENGTHS)
    keys = draw(st.lists(st.integers(0, 12), min_size=len(queries), max_size=len(queries)))
    return [chunks_of("contiguous", of, "q") for of in (queries, keys)]


def zigzag_length(seqlen, rank, size):
    return len(zigzag_split(np.zeros(seqlen), rank, size, axis=0))


@given(both=splits(), left=BOUNDS, right=BOUNDS, diagonal=st.integers(-40, 40))
def test_parts_hold_every_visible_pair_once_and_no_other(both, left, right, diagonal):
    band = Band(left, right, diagonal)
    seqlens = [sum(chunk.length for chunks in side for chunk in chunks) for side in both]
    seen = np.zeros(seqlens, int)
    for queries in both[0]:
        for keys in both[1]:
            rows, columns = (places(chunks) for chunks in (queries, keys))
            for part in visible_parts(queries, keys, Whole(band)):
                # The rule of `attention`, about the diagonal of the part.
                i, j = (np.arange(len(x)) for x in (rows[part.rows], columns[part.keys]))
                away = j - (i[:, None] + len(j) - len(i))
                before, after = part.window or (None, None)
                assert all(bound is None or bound >= 0 for bound in (before, after))
                visible = np.ones(away.shape, bool)
                visible &= True if before is None else away >= -before
                visible &= True if after is None else away <= after
                seen[np.ix_(rows[part.rows], columns[part.keys])] += visible
    away = np.arange(seqlens[1]) - (np.arange(seqlens[0])[:, None] + diagonal)
    wanted = np.ones(away.shape, bool)
    wanted &= True if left is None else away >= -left
    wanted &= True if right is None else away <= right
    np.testing.assert_array_equal(seen, wanted)


def places(chunks):
    """Where a rank's rows belong."""
    return np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])


@given(seqlen=st.integers(8, 200), size=st.integers(1, 4), rank=st.integers(0, 3))
def test_a_rank_computes_its_own_zigzag_block_in_one_causal_call(seqlen, size, rank):
    chunks = chunks_of("zigzag", [zigzag_length(seqlen, n, size) for n in range(size)], "q")
    own = chunks[rank % size]
    if min(chunk.length for chunk in own) > 1:  # a square of one is no triangle
        (part,) = visible_parts(own, own, Whole(Band(None, 0, 0)))
        length = sum(chunk.length for chunk in own)
        assert part[:3] == (slice(0, length), slice(0, length), (None, 0))


@given(seqlen=st.integers(0, 50), size=st.integers(1, 6), axis=st.sampled_from([-1, -2, -3]))
def test_joining_undoes_splitting(seqlen, size, axis):
    a = np.moveaxis(np.arange(6 * seqlen).reshape(seqlen, 2, 3), 0, axis)
    parts = [zigzag_split(a, rank, size, axis=axis) for rank in range(size)]
    np.testing.assert_array_equal(zigzag_join(parts, axis=axis), a)


@given(seqlen=st.integers(0, 200), size=st.integers(1, 6))
def test_zigzag_gives_all_ranks_as_many_pairs_of_a_causal_problem(seqlen, size):
    rows = [zigzag_split(np.arange(seqlen), rank, size, axis=0) for rank in range(size)]
    pairs = [int((own + 1).sum()) for own in rows]
    assert max(pairs) - min(pairs) <= 2 * seqlen + 1  # by what chunks of whole rows differ


def test_rows_that_are_no_zigzag_are_refused():
    with pytest.raises(ShapeError, match="k has seqlen 2 on rank 0; of 7 rows in all"):
        chunks_of("zigzag", [2, 5], "k")
    with pytest.raises(ArgumentError, match="rank is 2 and size is 2"):
        zigzag_split(np.zeros((4, 1)), 2, 2)


@pytest.mark.parametrize(
    ("band", "steps"),
    [
        (Band(None, None, 0), 4),
        (Band(None, 0, 0), 4),
        (Band(9, 0, 0), 2),  # ten rows a rank: the first of them sees nine of the rank before
        (Band(10, 0, 0), 2),
        (Band(11, 0, 0), 3),
        (Band(0, 0, 0), 1),
        (Band(0, 1, 0), 4),  # what comes after travels all the way round
    ],
)
def test_the_ring_ends_when_nobody_sees_what_would_come(band, steps):
    chunks = chunks_of("contiguous", [10] * 4, "q")
    assert _steps(chunks, chunks, Whole(band)) == steps
