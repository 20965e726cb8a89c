"""The oracle against values that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cufa import reference

LOG2, LOG3 = math.log(2), math.log(3)
#: Two keys of scores log 3 and 0: weights 3/4 and 1/4.
Q, K, V = [[1.0]], [[LOG3], [0.0]], [[4.0], [8.0]]
CAPPED = LOG3 * math.tanh(1)
INF = math.inf


@pytest.mark.parametrize(
    ("options", "out", "lse"),
    [
        pytest.param({}, 5, math.log(4), id="weights of 3/4 and 1/4"),
        pytest.param({"scale": 0}, 6, LOG2, id="scale 0 is the mean"),
        pytest.param({"scale": -1}, 7, math.log(4 / 3), id="negative scale"),
        pytest.param({"bias": [[0.0, LOG3]]}, 6, math.log(6), id="bias evens the scores"),
        pytest.param({"mask": [[False, True]]}, 8, 0, id="mask leaves one key"),
        pytest.param({"mask": [[False, False]]}, 0, -INF, id="mask leaves none"),
        pytest.param({"bias": [[-INF, -INF]]}, 0, -INF, id="bias leaves none"),
        pytest.param({"sink": [math.log(4)]}, 2.5, math.log(8), id="sink takes half"),
        pytest.param({"sink": [7.0], "mask": [[False, False]]}, 0, 7, id="sink alone"),
        pytest.param({"sink": [-INF]}, 5, math.log(4), id="sink of -inf"),
        pytest.param({"alibi_slopes": [-LOG3]}, 4.4, math.log(10), id="alibi lifts the first key"),
        pytest.param({"causal": "top_left"}, 4, LOG3, id="top_left sees the first key"),
        pytest.param({"causal": True}, 5, math.log(4), id="causal sees both"),
        pytest.param({"window": (0, None)}, 8, 0, id="window of the last key"),
        pytest.param({"window": (None, -1)}, 5, math.log(4), id="-1 is open"),
        pytest.param(
            {"softcap": LOG3},
            4 + 4 / (1 + math.exp(CAPPED)),
            math.log(1 + math.exp(CAPPED)),
            id="softcap",
        ),
    ],
)
def test_one_query_and_two_keys(options, out, lse):
    got = reference.attention(Q, K, V, **options)
    np.testing.assert_allclose(got[0], [[out]], rtol=1e-14)
    np.testing.assert_allclose(got[1], [lse], rtol=1e-14)


@pytest.mark.parametrize(
    ("causal", "seqlen_q", "seqlen_k", "seen"),
    [
        (True, 2, 5, [4, 5]),
        (True, 5, 2, [0, 0, 0, 1, 2]),
        ("top_left", 2, 5, [1, 2]),
        ("top_left", 5, 2, [1, 2, 2, 2, 2]),
        (False, 2, 3, [3, 3]),
    ],
)
def test_each_row_sees_this_many_keys(causal, seqlen_q, seqlen_k, seen):
    q, k = np.zeros((seqlen_q, 1)), np.zeros((seqlen_k, 1))
    _, lse = reference.attention(q, k, k, causal=causal)
    np.testing.assert_array_equal(np.exp(lse).round(12), seen)


def test_query_heads_share_keys_in_order():
    q = np.zeros((6, 1, 1))
    k = np.zeros((2, 1, 1))
    v = np.array([1.0, 2.0]).reshape(2, 1, 1)
    out, lse = reference.attention(q, k, v)
    np.testing.assert_array_equal(out.ravel(), [1, 1, 1, 2, 2, 2])
    assert lse.shape == (6, 1)


def test_bshd_swaps_heads_and_rows():
    q, k, v = (np.sin(np.arange(2 * 3 * n * 4)).reshape(2, 3, n, 4) for n in (5, 6, 6))
    out, lse = reference.attention(q, k, v)
    swapped, same = reference.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), layout="bshd")
    np.testing.assert_array_equal(swapped, out.swapaxes(1, 2))
    np.testing.assert_array_equal(same, lse)
    assert out.shape == (2, 3, 5, 4)
    assert lse.shape == (2, 3, 5)
