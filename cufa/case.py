"""One random attention problem: its sizes, options and numbers, and where they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cufa import bounds
from cufa.bounds import Exact, exact
from cufa.gradient_bounds import ExactGradients, exact_gradients

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
#: And with dropout beside them.
FEW_DROPPED = (frozenset[str](), frozenset(["causal"]), frozenset(FEATURES))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name; bfloat16 is the one of `ml_dtypes`."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401, teaches NumPy the name
    return np.dtype(name)


def largest(dtype: str) -> float:
    """The largest finite number of the dtype of that name."""
    return bounds.largest(numpy_dtype(dtype))


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
    #: Of "q", "k", "v", "bias" and "sink" those whose gradient is not wanted; see `wrt`.
    constants: tuple[str, ...] = ()
    #: Whether gradients must be the same, bit for bit, from run to run.
    deterministic: bool = False
    q_memory: Memory = CONTIGUOUS
    k_memory: Memory = CONTIGUOUS
    v_memory: Memory = CONTIGUOUS
    extra_memory: Memory = CONTIGUOUS
    dout_memory: Memory = CONTIGUOUS
    seed: int = 0

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def wrt(self) -> tuple[str, ...]:
        """Whose gradients are wanted: of what is given all but `constants`, or all if no other
        is."""
        given = {"q": True, "k": True, "v": True, "bias": self.bias is not None, "sink": self.sink}
        names = tuple(name for name, is_given in given.items() if is_given)
        return tuple(name for name in names if name not in self.constants) or names

    def exact(self) -> Exact:
        """The answer in float64 with error bounds; see `exact`."""
        return exact(*self.arrays(np), **self.options(np))

    def exact_gradients(self, through_lse: bool = True) -> ExactGradients:
        """The gradients for `back`, those in `wrt`, in float64 with error bounds; see
        `exact_gradients`."""
        dout, dlse = self.back(np)
        dlse = dlse if through_lse else None
        expected = exact_gradients(dout, *self.arrays(np), dlse=dlse, **self.options(np))
        return expected.only(self.wrt)

    def back(self, xp: Any, poison: float = np.nan) -> tuple[Any, Any]:
        """`dout` and `dlse`, the derivatives of a loss by output and lse, about as large as 1.

        Where values are large `dout` is small, so that the gradients fit into the dtype.
        """
        rng = np.random.default_rng([self.seed, 2])
        rows = (self.batch, self.heads, self.seqlen_q)
        dout = rng.standard_normal((*rows, self.head_dim_v)) / self.v_size
        placed = place(xp, dout.astype(numpy_dtype(self.dtype)), self.dout_memory, poison)
        dlse = rng.standard_normal(rows)[(0,) * (4 - self.rank)]
        wide = "float64" if self.dtype == "float64" else "float32"
        return self.caller_axes(placed.array), xp.asarray(dlse.astype(wide))

    def few_kernels(self) -> Case:
        """This case bent so that all cases together need about a hundred compiled kernels.

        Head dims fall into 33..64 or 97..128, features into the sets of `FEW`, or
        beside dropout of `FEW_DROPPED`, a bias into float32; gradients by `k` and `v` are wanted
        together or not at all.
        """
        on = frozenset(f for f in FEATURES if getattr(self, f) not in (None, False))
        fitting = [few for few in (FEW_DROPPED if self.dropout_p else FEW) if few <= on]
        largest = [few for few in fitting if len(few) == max(map(len, fitting))]
        keep = largest[self.seed % len(largest)]
        drop: dict[str, Any] = {f: False if f in ("causal", "sink") else None for f in on - keep}
        if not keep & {"mask", "bias"}:
            drop["rectangles"] = ()
        first = 97 if self.head_dim > 96 else 33
        first_v = max(first, 97 if self.head_dim_v > 96 else 33)
        sizes = first + (self.head_dim - 1) % 32, first_v + (self.head_dim_v - 1) % 32
        if len({"k", "v"} & {*self.constants}) == 1:
            drop["constants"] = tuple(n for n in self.constants if n not in ("k", "v"))
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

    def backward_options(self) -> dict[str, Any]:
        """Those of `cufa.attention_vjp` beside `options`."""
        return {"wrt": self.wrt, "deterministic": self.deterministic}

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
