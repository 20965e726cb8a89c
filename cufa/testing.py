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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cufa.bounds import Array, Exact, exact, fractions
from cufa.bounds import to_numpy as to_numpy

Shape = tuple[int, ...]
Rectangle = tuple[int, int, int, int, float]
FLOATS = ("float16", "bfloat16", "float32", "float64")
#: What scores look like; each has broken some kernel. Queries and keys are normal noise times a
#: factor, plus one common vector times another; for keys the latter depends on their place in the
#: sequence, which runs from 0 to 1. A query and a key that are just that vector have score 200.
#: `Case.jumps` are multiples of it too, and "jumping" has nothing else.
# fmt: off
SCORES: dict[str, tuple[float, float, float, Callable[[Any], Any]]] = {
    # name       q noise  common  k noise  common
    "normal":      ( 1.0,    0.0,     1.0, lambda place: 0 * place),
    "large":       (10.0,    0.0,    10.0, lambda place: 0 * place),
    "tiny":        (1e-3,    0.0,    1e-3, lambda place: 0 * place),
    "negative":    ( 0.3,    1.0,     0.3, lambda place: 0 * place - 1),
    "equal":       ( 1.0,    0.0,     0.0, lambda place: 0 * place + 1),
    "growing":     ( 0.3,    1.0,     0.3, lambda place: place),
    "falling":     ( 0.3,    1.0,     0.3, lambda place: -place),
    "first_key":   ( 0.3,    1.0,     1.0, lambda place: 0.1 * (place == 0)),
    "jumping":     ( 0.3,    1.0,     0.3, lambda place: 0 * place),
}
# fmt: on
FEATURES = ("causal", "window", "mask", "bias", "alibi", "softcap", "sink")
#: Sets of features that get a kernel of their own in `Case.few_kernels`.
FEW = (
    frozenset[str](),
    *(frozenset([f]) for f in FEATURES),
    frozenset(["causal", "alibi"]),
    frozenset(["mask", "bias"]),
    frozenset(["causal", "window", "softcap", "sink"]),
    frozenset(FEATURES),
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name; bfloat16 is the one of `ml_dtypes`."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401, teaches NumPy the name
    return np.dtype(name)


def largest(dtype: str) -> float:
    """The largest finite number of the dtype of that name."""
    infinity = np.array(np.inf, numpy_dtype(dtype))
    return float(np.nextafter(infinity, numpy_dtype(dtype).type(0)))


@dataclass(frozen=True)
class Memory:
    """How an array of four axes lies in its buffer."""

    #: Axes from the outermost to the innermost.
    order: Shape = (0, 1, 2, 3)
    #: 2 takes every second element of a wider buffer, -1 runs backwards, 0 repeats one element.
    step: Shape = (1, 1, 1, 1)
    #: Unused elements after each axis: a slice of a larger array.
    margin: Shape = (0, 0, 0, 0)
    #: Elements between a 256-byte boundary and the buffer's first.
    offset: int = 0


CONTIGUOUS = Memory()


class Placed(NamedTuple):
    """An array in the middle of a buffer whose other bytes belong to nobody."""

    array: Any
    #: All bytes of the buffer.
    raw: Any
    #: Which of them belong to `array`, a NumPy array.
    inside: NDArray[np.bool_]


def place(xp: Any, values: Any, memory: Memory = CONTIGUOUS, poison: Any = np.nan) -> Placed:
    """Lay `values`, of four axes, out as `memory` says, in a buffer that is otherwise `poison`.

    NumPy and CuPy arrays of one `memory` have the same strides and the same alignment.
    """
    shape, itemsize, guard = values.shape, values.dtype.itemsize, 256
    strides, first, width = [0] * 4, guard + memory.offset, 1
    for axis in reversed(memory.order):
        step, size = memory.step[axis], shape[axis]
        strides[axis] = step * width
        extent = 1 + abs(step) * max(size - 1, 0)
        first += width * (extent - 1) if step < 0 else 0
        width *= extent + memory.margin[axis]
    total = guard + memory.offset + width + guard

    storage = np.empty(total * itemsize + 256, np.uint8)
    start = -storage.ctypes.data % 256
    raw = storage[start : start + total * itemsize]
    raw.view(values.dtype)[...] = poison
    steps = tuple(s * itemsize for s in strides)
    view: NDArray[Any] = np.ndarray(shape, values.dtype, raw, first * itemsize, steps)
    marks = np.zeros(raw.shape, bool)
    for byte in range(itemsize):
        np.ndarray(shape, bool, marks, first * itemsize + byte, steps)[...] = True
    if values.size:
        repeated = tuple(slice(0, 1) if s == 0 else slice(None) for s in memory.step)
        view[...] = values[repeated]
    if xp is np:
        return Placed(view, raw, marks)
    device = xp.asarray(raw)
    view = xp.ndarray(shape, values.dtype, device.data + first * itemsize, steps)
    return Placed(view, device, marks)


@dataclass(frozen=True)
class Case:
    """One attention problem: sizes, options, and the seed of its numbers."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    seqlen_q: int = 16
    seqlen_k: int = 16
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    rank: int = 4
    layout: str = "bhsd"
    scores: str = "normal"
    #: (key, size): from this key on, scores are about `size` higher, where queries have the common
    #: vector of `SCORES` and the scale is the default. Sizes may be negative.
    jumps: tuple[tuple[int, float], ...] = ()
    #: What `v` is multiplied by; it stays within half of what its dtype can hold, also when it is
    #: divided by ``1 - dropout_p``.
    v_size: float = 1.0
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    #: For each axis (batch, heads, seqlen_q, seqlen_k) whether the mask varies along it.
    mask: tuple[bool, ...] | None = None
    #: Fraction of keys that a mask hides, or a bias of -inf.
    hidden: float = 0.25
    #: (top, bottom, left, right, hidden): what is hidden instead of queries top .. bottom - 1 and
    #: keys left .. right - 1. Later ones lie over earlier ones.
    rectangles: tuple[Rectangle, ...] = ()
    #: Whether some rows are hidden altogether.
    dead_rows: bool = False
    bias: tuple[bool, ...] | None = None
    #: Dtype of bias, ALiBi slopes and sink.
    extra_dtype: str = "float32"
    #: Axes of the ALiBi slopes: 1 is (heads,), 2 is (batch, heads).
    alibi: int | None = None
    sink: bool = False
    #: Its own seed is drawn from `seed`.
    dropout_p: float = 0.0
    algorithm: str = "auto"
    q_memory: Memory = CONTIGUOUS
    k_memory: Memory = CONTIGUOUS
    v_memory: Memory = CONTIGUOUS
    extra_memory: Memory = CONTIGUOUS
    seed: int = 0

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def exact(self) -> Exact:
        """The answer in float64 with error bounds; see `exact`."""
        return exact(*self.arrays(np), **self.options(np))

    def few_kernels(self) -> Case:
        """This case bent so that all cases together need about a hundred compiled kernels.

        Head dims fall into 33..64 or 97..128, features into the sets of `FEW`, a bias into float32.
        """
        on = frozenset(f for f in FEATURES if getattr(self, f) not in (None, False))
        fitting = [few for few in FEW if few <= on]
        largest = [few for few in fitting if len(few) == max(map(len, fitting))]
        keep = largest[self.seed % len(largest)]
        drop: dict[str, Any] = {f: False if f in ("causal", "sink") else None for f in on - keep}
        if not keep & {"mask", "bias"}:
            drop["rectangles"] = ()
        first = 97 if self.head_dim > 96 else 33
        first_v = max(first, 97 if self.head_dim_v > 96 else 33)
        sizes = first + (self.head_dim - 1) % 32, first_v + (self.head_dim_v - 1) % 32
        return replace(self, **drop, head_dim=sizes[0], head_dim_v=sizes[1], extra_dtype="float32")

    def arrays(self, xp: Any, poison: float = np.nan) -> tuple[Any, Any, Any]:
        """q, k and v as views that `xp` (numpy or cupy) would make, in buffers full of `poison`."""
        q, k, v = (self.caller_axes(placed.array) for placed in self.placed(xp, poison))
        return q, k, v

    def placed(self, xp: Any, poison: float = np.nan) -> tuple[Placed, Placed, Placed]:
        """q, k and v of axes (batch, heads, seqlen, head_dim), with their buffers."""
        dtype, memories = numpy_dtype(self.dtype), (self.q_memory, self.k_memory, self.v_memory)
        values = (a.astype(dtype) for a in self._values())
        q, k, v = (place(xp, a, m, poison) for a, m in zip(values, memories, strict=True))
        return q, k, v

    def caller_axes(self, a: Any) -> Any:
        """An array of axes (batch, heads, seqlen, head_dim) with the axes of this call."""
        if self.layout == "bshd" and self.rank > 2:
            a = a.swapaxes(1, 2)
            return a if self.rank == 4 else a[0]
        return a[(0,) * (4 - self.rank)]

    def options(self, xp: Any) -> dict[str, Any]:
        """Every option as keyword arguments of `cufa.attention`, arrays included."""
        rng = np.random.default_rng([self.seed, 1])
        full = (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        dtype = numpy_dtype(self.extra_dtype)
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "layout": self.layout,
        }
        if self.dropout_p:
            options["dropout_p"] = self.dropout_p
            own = np.random.default_rng([self.seed, 2])
            options["dropout_seed"] = int(own.integers(2**64, dtype=np.uint64))
        if self.algorithm != "auto":
            options["algorithm"] = self.algorithm
        if self.mask is not None:
            visible = self._visible(rng, tuple(np.where(self.mask, full, 1)))
            options["mask"] = self._broadcast(place(xp, visible, self.extra_memory, poison=True))
        if self.bias is not None:
            shape = tuple(np.where(self.bias, full, 1))
            bias = np.where(self._visible(rng, shape), 2 * rng.standard_normal(shape), -np.inf)
            options["bias"] = self._broadcast(place(xp, bias.astype(dtype), self.extra_memory))
        if self.alibi is not None:
            rows = self.batch if self.alibi == 2 else 1
            slopes = rng.random((1, 1, rows, self.heads)).astype(dtype)
            placed = place(xp, slopes, Memory(step=(1, 1, 1, 2))).array
            options["alibi_slopes"] = placed[(0,) * (4 - self.alibi)]
        if self.sink:
            sink = 3 * rng.standard_normal((1, 1, 1, self.heads))
            backwards = Memory(step=(1, 1, 1, -1))
            options["sink"] = place(xp, sink.astype(dtype), backwards).array[0, 0, 0]
        return options

    def _broadcast(self, placed: Placed) -> Any:
        """Without its leading axes of one element, in half of the cases."""
        leading = next((axis for axis, n in enumerate(placed.array.shape) if n != 1), 3)
        return placed.array[(0,) * leading] if self.seed % 2 else placed.array

    def _visible(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.bool_]:
        dead = self.dead_rows * 0.3 > rng.random((*shape[:3], 1))
        hidden = np.full(shape[2:], self.hidden)
        for top, bottom, left, right, fraction in self.rectangles:
            hidden[top:bottom, left:right] = fraction
        return (rng.random(shape) >= hidden) & ~dead

    def _values(self) -> tuple[NDArray[np.float64], ...]:
        rng = np.random.default_rng([self.seed, 0])
        q = rng.standard_normal((self.batch, self.heads, self.seqlen_q, self.head_dim))
        k = rng.standard_normal((self.batch, self.kv_heads, self.seqlen_k, self.head_dim))
        v = rng.standard_normal((self.batch, self.kv_heads, self.seqlen_k, self.head_dim_v))
        q_noise, q_common, k_noise, k_common = SCORES[self.scores]
        common = math.sqrt(200 / math.sqrt(self.head_dim))  # in each component
        in_common = k_common(np.linspace(0, 1, self.seqlen_k)[:, None])
        for key, size in self.jumps:
            in_common[key:] += size / 200
        most = largest(self.dtype) / 2 * (1 - self.dropout_p)
        v = np.clip(self.v_size * v, -most, most)
        return q_noise * q + q_common * common, k_noise * k + in_common * common, v


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


def _assert_near(name: str, got: Any, want: Array, bound: Array) -> None:
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    got = to_numpy(got).astype(np.float64)
    wrong = fractions(got, want, bound) > 1
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name} is wrong in {wrong.sum()} of {wrong.size} elements, first at {at}: "
            f"{got[at]!r} where the formula gives {want[at]!r}, with room for {bound[at]:.2g}"
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
_FEW_TILES = st.integers(0, 4)
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
    steps = st.sampled_from([1, 1, 1, 1, 2, -1, 0] if repeat else [1, 1, 1, 2, -1])
    last = steps if axes == 4 or draw(st.integers(0, 9)) == 9 else st.just(1)
    order = tuple(draw(st.permutations(range(axes))))
    margins = st.sampled_from([0, 0, 1, 3])
    return Memory(
        order=order if axes == 4 else (*order, 3),
        step=(*(draw(steps) for _ in range(3)), draw(last)),
        margin=(*(draw(margins) for _ in range(3)), draw(st.sampled_from([0, 0, 1, 8]))),
        offset=draw(st.sampled_from([0, 0, 1, 8])),
    )


@st.composite
def jumps(draw: st.DrawFn, /, seqlen_k: int) -> tuple[tuple[int, float], ...]:
    """A few jumps of scores, by 0.01 to 10000 up or down, most where key blocks may begin."""
    block = st.builds(lambda tile, n: tile * n, st.sampled_from([16, 64, 128]), st.integers(0, 3))
    keys = st.integers(0, max(0, seqlen_k - 1)) | block.map(lambda n: min(n, seqlen_k))
    return tuple(draw(st.lists(st.tuples(keys, _SIZES), min_size=1, max_size=4)))


@st.composite
def rectangles(draw: st.DrawFn, /, seqlen_q: int, seqlen_k: int) -> tuple[Rectangle, ...]:
    """Parts of a mask that are whole, hidden or in between, most from where tiles may begin to
    where they may end."""

    def side(seqlen: int) -> tuple[int, int]:
        tiles = st.builds(lambda tile, n: tile * n, st.sampled_from([32, 64, 128]), _FEW_TILES)
        ends = st.sampled_from([0, seqlen]) | tiles.map(lambda n: min(n, seqlen))
        low, high = sorted(draw(st.tuples(*[ends | st.integers(0, seqlen)] * 2)))
        return low, high

    fractions = st.sampled_from([0.0, 1.0, 0.5])
    count = draw(st.integers(0, 4))
    return tuple((*side(seqlen_q), *side(seqlen_k), draw(fractions)) for _ in range(count))


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
        A value, or a strategy, for any field of `Case`. `dropout_p` is 0 unless given here.
    """

    def pick(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        given = fixed.pop(name, strategy)
        return draw(given) if isinstance(given, st.SearchStrategy) else given

    head_dim = pick("head_dim", head_dims)
    head_dim_v = pick("head_dim_v", st.just(head_dim) | head_dims)
    seqlen_q, seqlen_k = pick("seqlen_q", LENGTHS), pick("seqlen_k", LENGTHS)
    rank = pick("rank", st.sampled_from([4, 4, 3, 2]))
    counts, budget = {}, max_elements // max(1, seqlen_q * seqlen_k * (head_dim + head_dim_v))
    for name, sizes in _COUNTS.items():
        many = rank == 4 or (rank == 3 and name != "batch")
        fits = [n for n in sizes if many and n <= budget] or [1]
        counts[name] = pick(name, st.sampled_from(fits))
        budget //= max(1, counts[name])
    on = draw(st.sampled_from(FEW) | st.frozensets(st.sampled_from(FEATURES))) & {*features}
    scores = pick("scores", st.sampled_from(tuple(SCORES)))
    dtype = pick("dtype", st.sampled_from(dtypes))
    off = {name: st.just(False if name in ("causal", "sink") else None) for name in FEATURES}
    options = {name: pick(name, s if name in on else off[name]) for name, s in _OPTIONS.items()}
    hides, painted = options["mask"] or options["bias"], rectangles(seqlen_q, seqlen_k)
    return Case(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        rank=rank,
        **counts,
        **options,
        dtype=dtype,
        dropout_p=pick("dropout_p", st.just(0.0)),
        algorithm=pick("algorithm", st.just("auto")),
        layout=pick("layout", st.sampled_from(["bhsd", "bshd"])),
        scores=scores,
        jumps=pick("jumps", jumps(seqlen_k) if scores == "jumping" else st.just(())),
        v_size=pick("v_size", st.sampled_from([1.0, 1.0, 1.0, _LARGE[dtype]])),
        scale=pick("scale", st.sampled_from([None, None, None, 0.0, -0.3, 0.05, 1.0])),
        hidden=pick("hidden", st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0])),
        rectangles=pick("rectangles", painted if hides else st.just(())),
        dead_rows=pick("dead_rows", st.booleans()),
        extra_dtype=pick("extra_dtype", st.sampled_from(FLOATS)),
        q_memory=pick("q_memory", st.just(CONTIGUOUS) | memories()),
        k_memory=pick("k_memory", st.just(CONTIGUOUS) | memories()),
        v_memory=pick("v_memory", st.just(CONTIGUOUS) | memories()),
        extra_memory=pick("extra_memory", st.just(CONTIGUOUS) | memories(axes=4)),
        seed=pick("seed", st.integers(0, 2**32 - 1)),
        **fixed,
    )
