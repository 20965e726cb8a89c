"""Random attention problems and what their answers must be, for our kernels and other people's.

>>> from hypothesis import given
>>> from cufa.testing import assert_within_rounding, cases
>>> @given(case=cases(dtypes=["float16"], causal=True))
... def test_my_kernel(case):
...     q, k, v = case.arrays(cupy)
...     out = my_kernel(q, k, v, causal=True, layout=case.layout)
...     assert_within_rounding(out, case.exact())

Needs hypothesis, and `ml_dtypes` for bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cufa.bounds import Array, Exact, fractions, to_numpy
from cufa.case import (
    CONTIGUOUS,
    FEATURES,
    FEW,
    FLOATS,
    SCORES,
    Case,
    Memory,
    Placed,
    Rectangle,
    largest,
    numpy_dtype,
    place,
)
from cufa.gradient_bounds import ExactGradients

__all__ = [
    "CONTIGUOUS",
    "FEATURES",
    "FEW",
    "FLOATS",
    "SCORES",
    "Case",
    "Memory",
    "Placed",
    "assert_gradients_within_rounding",
    "assert_within_rounding",
    "cases",
    "jumps",
    "largest",
    "memories",
    "numpy_dtype",
    "place",
    "rectangles",
    "to_numpy",
]


def assert_within_rounding(result: Any, expected: Exact) -> None:
    """Fail unless `result`, ``out`` or ``(out, lse)``, is as near as its dtype allows.

    Shape and dtype must be right, and NaN and infinities stand exactly where the formula has them.
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert out.dtype == expected.dtype, f"out is {out.dtype}, not {expected.dtype}"
    _assert_near("out", out, expected.out, expected.out_bound)
    if lse is not None:
        wide = "float64" if expected.dtype == np.float64 else "float32"
        assert lse.dtype == wide, f"lse is {lse.dtype}, not {wide}"
        _assert_near("lse", lse, expected.lse, expected.lse_bound)


def assert_gradients_within_rounding(result: Any, expected: ExactGradients) -> None:
    """Fail unless `result`, the five of `cufa.Gradients`, is as near as the dtypes allow.

    Each must have the shape and dtype of its input, and be None where none is expected: there is
    no input, or its gradient is not wanted.
    """
    wanted = zip(*expected[:2], expected.dtypes, strict=True)
    names = type(expected.gradients)._fields
    for name, got, (want, bound, dtype) in zip(names, result, wanted, strict=True):
        if want is None or bound is None:
            assert got is None, f"{name} is given, and there is no such input, or it is not wanted"
            continue
        assert got is not None, f"{name} is None, and it is wanted"
        assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
        _assert_near(name, got, want, bound)


def _assert_near(name: str, got: Any, want: Array, bound: Array) -> None:
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    got = to_numpy(got)
    wrong = fractions(got, want, bound) > 1
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name} is wrong in {wrong.sum()} of {wrong.size} elements, first at {at}: "
            f"{float(got[at])!r} where the formula gives {float(want[at])!r}, with room for "
            f"{bound[at]:.2g}"
        )


_NEAR_TILES = st.builds(
    lambda tile, blocks, off: tile * blocks + off,
    st.sampled_from([16, 64, 128]),
    st.integers(1, 2),
    st.integers(-1, 1),
)
LENGTHS = st.integers(1, 40) | st.sampled_from([0, 1, 2, 300]) | _NEAR_TILES
HEAD_DIMS = st.sampled_from([16, 32, 64, 128, 1, 40, 72, 80, 192, 256]) | st.integers(1, 256)
_COUNTS = {"kv_heads": [1, 2, 3], "group": [1, 2, 3, 5, 7], "batch": [1, 2, 3, 0]}
#: By dtype, a size of `v` that leaves room for a sum over keys of float32 weights up to 256.
_LARGE = {"float16": 1e4, "bfloat16": 1e30, "float32": 1e30, "float64": 1e300}
#: Sizes of jumps: any, and where float32 no longer holds their exponential.
_SIZES = st.builds(
    lambda sign, size: sign * size,
    st.sampled_from([1, -1]),
    st.integers(-16, 32).map(lambda n: 10 ** (n / 8)) | st.integers(320, 440).map(lambda n: n / 4),
)
_EITHER, _SEEDS = st.booleans(), st.integers(0, 2**32 - 1)
_VARIES = st.tuples(*[st.booleans()] * 4)
_BOUND = st.sampled_from([None, -1, 0, 1]) | st.integers(0, 200)
#: Values of an option that is on.
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.sampled_from([True, "top_left"]),
    "window": st.tuples(_BOUND, _BOUND),
    "mask": _VARIES,
    "bias": _VARIES,
    "alibi": st.sampled_from([1, 2]),
    "softcap": st.sampled_from([0.5, 10.0, 50.0]),
    "sink": st.just(True),
}
_OFF = {name: False if name in ("causal", "sink") else None for name in _OPTIONS}
_ON = st.sampled_from(FEW) | st.frozensets(st.sampled_from(FEATURES))
_TILE_EDGES = st.builds(lambda tile, n: tile * n, st.sampled_from([32, 64, 128]), st.integers(0, 4))
_BLOCK_EDGES = st.builds(
    lambda tile, n: tile * n, st.sampled_from([16, 64, 128]), st.integers(0, 3)
)
_TENTHS = st.integers(0, 9)
_ORDERS = {axes: st.permutations(range(axes)) for axes in (3, 4)}


@lru_cache(maxsize=None, typed=True)  # 1 is not 1.0
def _among(*values: Any) -> st.SearchStrategy[Any]:
    """One of these. Hypothesis checks a strategy at its first use, which takes longer than to draw
    from it: so what is known before is made but once."""
    return st.sampled_from(values)


@st.composite
def memories(draw: st.DrawFn, /, axes: int = 3, repeat: bool = True) -> Memory:
    """Layouts in memory.

    Parameters
    ----------
    axes : {3, 4}
        3 keeps the last axis innermost and contiguous most of the time; 4 moves it like the others.
    repeat : bool
        Whether an axis may have stride 0; not for arrays that are written.
    """
    steps = _among(1, 1, 1, 1, 2, -1, 0) if repeat else _among(1, 1, 1, 2, -1)
    moves = axes == 4 or draw(_TENTHS) == 9
    order = tuple(draw(_ORDERS[axes]))
    margins = _among(0, 0, 1, 3)
    return Memory(
        order=order if axes == 4 else (*order, 3),
        step=(*(draw(steps) for _ in range(3)), draw(steps) if moves else 1),
        margin=(*(draw(margins) for _ in range(3)), draw(_among(0, 0, 1, 8))),
        offset=draw(_among(0, 0, 1, 8)),
    )


_MEMORIES = st.just(CONTIGUOUS) | memories()
_MEMORIES_OF_EXTRAS = st.just(CONTIGUOUS) | memories(axes=4)


@st.composite
def jumps(draw: st.DrawFn, /, seqlen_k: int) -> tuple[tuple[int, float], ...]:
    """A few jumps of scores, by 0.01 to 10000 up or down, most where key blocks may begin."""
    edges = _BLOCK_EDGES.map(lambda n: min(n, seqlen_k))
    keys = st.integers(0, max(0, seqlen_k - 1)) | edges
    return tuple(draw(st.lists(st.tuples(keys, _SIZES), min_size=1, max_size=4)))


@st.composite
def rectangles(draw: st.DrawFn, /, seqlen_q: int, seqlen_k: int) -> tuple[Rectangle, ...]:
    """Parts of a mask that are whole, hidden or in between, most from where tiles may begin to
    where they may end."""

    def side(seqlen: int) -> st.SearchStrategy[Any]:
        ends = _among(0, seqlen) | _TILE_EDGES.map(lambda n: min(n, seqlen))
        return st.tuples(*[ends | st.integers(0, seqlen)] * 2).map(sorted)

    rows, keys = side(seqlen_q), side(seqlen_k)
    count = draw(st.integers(0, 4))
    return tuple((*draw(rows), *draw(keys), draw(_among(0.0, 1.0, 0.5))) for _ in range(count))


@st.composite
def cases(
    draw: st.DrawFn,
    /,
    *,
    dtypes: Sequence[str] = FLOATS,
    head_dims: st.SearchStrategy[int] = HEAD_DIMS,
    features: Sequence[str] = FEATURES,
    max_elements: int = 1 << 24,
    **fixed: Any,
) -> Case:
    """Attention problems.

    Parameters
    ----------
    dtypes : sequence of str
    head_dims : strategy of int
        Draws `head_dim`; `head_dim_v` is the same half of the time, else it is drawn anew.
    features : sequence of str
        Options that may be on.
    max_elements : int
        Most that ``batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v)`` may be; one
        batch of one head may exceed it.
    **fixed
        A value, or a strategy, for any field of `Case`. Unless given here `dropout_p` is 0,
        `dout` contiguous, and all gradients are wanted.
    """

    def pick(name: str, default: Any) -> Any:
        given = fixed.pop(name, default)
        return draw(given) if isinstance(given, st.SearchStrategy) else given

    head_dim = pick("head_dim", head_dims)
    head_dim_v = pick("head_dim_v", st.just(head_dim) | head_dims)
    seqlen_q, seqlen_k = pick("seqlen_q", LENGTHS), pick("seqlen_k", LENGTHS)
    rank = pick("rank", _among(4, 4, 3, 2))
    counts, budget = {}, max_elements // max(1, seqlen_q * seqlen_k * (head_dim + head_dim_v))
    for name, sizes in _COUNTS.items():
        many = rank == 4 or (rank == 3 and name != "batch")
        fits = [n for n in sizes if many and n <= budget] or [1]
        counts[name] = pick(name, _among(*fits))
        budget //= max(1, counts[name])
    dtype = pick("dtype", _among(*dtypes))
    scores = pick("scores", _among(*SCORES))
    case = Case(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        rank=rank,
        **counts,
        dtype=dtype,
        algorithm=pick("algorithm", "auto"),
        layout=pick("layout", _among("bhsd", "bshd")),
        scores=scores,
        jumps=pick("jumps", jumps(seqlen_k) if scores == "jumping" else ()),
        v_size=pick("v_size", _among(1.0, 1.0, 1.0, _LARGE[dtype])),
        scale=pick("scale", _among(None, None, None, 0.0, -0.3, 0.05, 1.0)),
        dropout_p=pick("dropout_p", 0.0),
        q_memory=pick("q_memory", _MEMORIES),
        k_memory=pick("k_memory", _MEMORIES),
        v_memory=pick("v_memory", _MEMORIES),
        dout_memory=pick("dout_memory", CONTIGUOUS),
        constants=pick("constants", ()),
        deterministic=pick("deterministic", False),
        seed=pick("seed", _SEEDS),
    )
    # Last, so that one feature less moves no other draw: hypothesis then finds that it can go.
    on = draw(_ON) & {*features}
    options = {name: pick(name, s if name in on else _OFF[name]) for name, s in _OPTIONS.items()}
    hides = options["mask"] or options["bias"]
    return replace(
        case,
        **options,
        hidden=pick("hidden", _among(0.0, 0.1, 0.5, 0.95, 1.0)),
        rectangles=pick("rectangles", rectangles(seqlen_q, seqlen_k) if hides else ()),
        dead_rows=pick("dead_rows", _EITHER),
        extra_dtype=pick("extra_dtype", _among(*FLOATS)),
        extra_memory=pick("extra_memory", _MEMORIES_OF_EXTRAS),
        **fixed,
    )
