"""What is measured: attention problems, their FLOPs and bytes, and the presets that name many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cufa.options import ITEMSIZE, numpy_dtype

#: The FlashAttention papers' amount of work: tokens of a batch, and heads times head_dim.
TOKENS, HIDDEN = 16384, 2048
#: A thirtieth of that, for a CPU.
HOST_AMOUNT = {"tokens": 2048, "hidden": 512}
#: Copies of the inputs at most; a burst has few more calls than that.
_MAX_COPIES = 64
#: Numbers of a block of noise: odd, so that no two heads are alike.
_BLOCK = (1 << 18) + 1
#: What is computed: the result, the gradients by q, k and v from a result that is there, or one
#: after the other.
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Workload:
    """One problem: ``q (batch, heads, seqlen_q, head_dim)`` and so on."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    #: float32, of shape (seqlen_q, seqlen_k).
    bias: bool = False
    #: cufa is given the array for its result.
    out: bool = False
    #: One of `DIRECTIONS`.
    direction: str = "forward"

    @property
    def pairs(self) -> int:
        """Of a query and a key, in one head. Causal of a square counts as half of it, as papers
        have it; else the pairs that are visible."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        if self.seqlen_q == self.seqlen_k:
            return self.seqlen_q * self.seqlen_k // 2
        rows = np.arange(self.seqlen_q, dtype=np.int64) + 1 + self.seqlen_k - self.seqlen_q
        return int(np.clip(rows, 0, None).sum())

    @property
    def flop(self) -> int:
        """Two for each multiplication in ``q @ k.T`` and ``p @ v``; backward, where ``q @ k.T`` is
        computed again, in that, ``dout @ v.T``, ``p.T @ dout``, ``ds @ k`` and ``ds.T @ q``."""
        d, d_v = self.head_dim, self.head_dim_v
        each = {"forward": d + d_v, "backward": 3 * d + 2 * d_v, "both": 4 * d + 3 * d_v}
        return 2 * self.batch * self.heads * self.pairs * each[self.direction]

    @property
    def bytes(self) -> int:
        """Of q, k, v and the result, once each; backward, of those and of their gradients."""
        queries = self.batch * self.heads * self.seqlen_q
        keys = self.batch * self.kv_heads * self.seqlen_k
        once = ITEMSIZE[self.dtype] * (queries + keys) * (self.head_dim + self.head_dim_v)
        return once * {"forward": 1, "backward": 2, "both": 3}[self.direction]

    def __str__(self) -> str:
        lengths = _one_or_both(self.seqlen_q, "x", self.seqlen_k)
        return (
            f"{self.dtype} d{self._dims} {lengths} {self._rule}, {self.batch}x{self._heads} heads"
            f"{self._more}"
        )

    @property
    def family(self) -> str:
        """What problems have in common that differ in nothing but their lengths and batch."""
        return f"{self.dtype}, {self._heads} heads of {self._dims}, {self._rule}{self._more}"

    @property
    def _heads(self) -> str:
        return _one_or_both(self.heads, "/", self.kv_heads)

    @property
    def _dims(self) -> str:
        return _one_or_both(self.head_dim, "/", self.head_dim_v)

    @property
    def _rule(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def _more(self) -> str:
        direction = {"forward": "", "backward": ", backward", "both": ", forward and backward"}
        more = f"{', bias' if self.bias else ''}{', out=' if self.out else ''}"
        return more + direction[self.direction]


def _one_or_both(a: int, between: str, b: int) -> str:
    return f"{a}" if a == b else f"{a}{between}{b}"


class Inputs(NamedTuple):
    """Arrays of one call."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    #: Of a backward pass: the derivative by the result.
    dout: Any = None


def workload(
    seqlen: int,
    head_dim: int,
    *,
    dtype: str = "bfloat16",
    causal: bool = False,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    seqlen_q: int | None = None,
    head_dim_v: int | None = None,
    bias: bool = False,
    out: bool = False,
) -> Workload:
    """A workload whose batch and heads, unless given, make an amount of work: the papers'."""
    heads = heads or max(1, hidden // head_dim)
    return Workload(
        dtype=dtype,
        batch=batch or max(1, tokens // seqlen),
        heads=heads,
        kv_heads=kv_heads or heads,
        seqlen_q=seqlen_q or seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        causal=causal,
        bias=bias,
        out=out,
    )


def copies_beyond(cache_bytes: int, work: Workload) -> int:
    """How many copies of its inputs a workload needs not to find them in a cache."""
    return min(_MAX_COPIES, max(1, -(-2 * cache_bytes // max(1, work.bytes))))


def draw(xp: Any, work: Workload, copies: int = 1) -> list[Inputs]:
    """Normal noise in arrays of NumPy or CuPy, with memory of its own for each copy."""
    w, dtype = work, numpy_dtype(work.dtype)
    q = noise(xp, dtype, (copies, w.batch, w.heads, w.seqlen_q, w.head_dim))
    k = noise(xp, dtype, (copies, w.batch, w.kv_heads, w.seqlen_k, w.head_dim))
    v = noise(xp, dtype, (copies, w.batch, w.kv_heads, w.seqlen_k, w.head_dim_v))
    bias: Any = [None] * copies
    if w.bias:
        bias = noise(xp, np.dtype("float32"), (copies, w.seqlen_q, w.seqlen_k))
    dout: Any = [None] * copies
    if w.direction != "forward":
        dout = noise(xp, dtype, (copies, w.batch, w.heads, w.seqlen_q, w.head_dim_v))
    return [Inputs(*arrays) for arrays in zip(q, k, v, bias, dout, strict=True)]


def noise(xp: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Normal numbers; on zeros a card would draw less power, and be faster.

    A block of them is made in NumPy and repeated on the device, as integers: that needs no library
    of random numbers there.
    """
    block = np.random.default_rng().standard_normal(_BLOCK, np.float32).astype(dtype)
    bits = xp.asarray(block.view(f"i{dtype.itemsize}"))
    count = math.prod(shape)
    repeated = xp.tile(bits, -(-count // _BLOCK))[:count]
    return repeated.view(dtype).reshape(shape)


def to_device(xp: Any, a: np.ndarray[Any, Any]) -> Any:
    """An array of `xp` with these elements; bfloat16 goes as integers."""
    return xp.asarray(a.view(f"i{a.dtype.itemsize}")).view(a.dtype)


def _paper() -> list[Workload]:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    both = (False, True)
    return [
        *[workload(n, d, causal=c) for d in (64, 128, 256) for c in both for n in lengths],
        *[workload(8192, 128, dtype="float16", causal=c) for c in both],
        *[
            workload(n, d, dtype="float32", causal=c)
            for d, n in ((64, 2048), (128, 2048), (128, 8192))
            for c in both
        ],
        workload(2048, 128, dtype="float64", tokens=4096),
        *[  # all host time
            workload(128, 64, dtype="float16", batch=1, heads=1, out=out) for out in (False, True)
        ],
    ]


def _gpt3() -> list[Workload]:
    return [workload(2048, 128, dtype="float16", causal=True, batch=1, heads=96)]


def _llm() -> list[Workload]:
    return [
        workload(n, 128, causal=True, heads=heads, kv_heads=kv_heads)
        for heads, kv_heads in ((64, 8), (32, 8), (28, 4))
        for n in (2048, 4096, 8192, 16384)
    ]


def _claims() -> list[Workload]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    return [workload(n, d, causal=c) for d in (64, 128) for c in (False, True) for n in lengths]


def _cpu() -> list[Workload]:
    def small(seqlen: int, head_dim: int = 64, heads: int = 8, **more: Any) -> Workload:
        fixed = {"dtype": "float32", "batch": 1, "heads": heads}
        return workload(seqlen, head_dim, **{**fixed, **more})

    return [
        small(4096),
        small(4096, causal=True),
        small(4096, bias=True),
        small(4096, dtype="float16"),
        small(2048, 128),
        small(1024),
        small(256),
        small(64, batch=64),
        small(2, 8, heads=1, batch=65537, seqlen_q=1),
        small(8192, 128, heads=32, kv_heads=8, seqlen_q=1),
    ]


#: What each holds is in docs/tools.md.
PRESETS: dict[str, Callable[[], list[Workload]]] = {
    "paper": _paper,
    "gpt3": _gpt3,
    "llm": _llm,
    "claims": _claims,
    "cpu": _cpu,
}
