"""Faults to be planted in kernels, and as what each must be seen.

Where nothing is checked, a fault marked silent leaves the numbers right in every order of threads
that was tried, one marked at times in some: only a report can tell of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from cufa.testing import Case, Memory, largest
from emulator import linear_attention
from emulator.run import Kind

BOUNDS, RACE, UNWRITTEN, IN_FLIGHT = Kind.BOUNDS, Kind.RACE, Kind.UNWRITTEN, Kind.IN_FLIGHT
OUTPUT, DEADLOCK, DIVERGENCE = Kind.OUTPUT, Kind.DEADLOCK, Kind.DIVERGENCE
PROTOCOL, UNDEFINED = Kind.PROTOCOL, Kind.UNDEFINED


class Symptom(Enum):
    """What shows without a report."""

    WRONG = "a result that is not the formula"
    CONFLICTS = "a right result, but bank conflicts"


WRONG, CONFLICTS = Symptom.WRONG, Symptom.CONFLICTS


class Fault(NamedTuple):
    """An edit of a kernel."""

    what: str
    seen: Kind | Symptom
    #: The problems that show it, by their name in PROBLEMS.
    problems: str
    file: str
    #: Occurs once. Any white space matches any other.
    old: str
    new: str

    def edit(self, file: str, text: str) -> str:
        """The text of a file with the fault in it; lines keep their numbers."""
        if file != self.file:
            return text
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            raise LookupError(f"{self.what}: {self.old!r} occurs {len(found)} times in {file}")
        lost = found[0][0].count("\n") - self.new.count("\n")
        return text[: found[0].start()] + "\n" * lost + self.new + text[found[0].end() :]


# Rows lie 16 bytes apart, and behind the last is room for twice as many: what is read past a row's
# end or past the last row belongs to no array.
_APART = Memory(order=(0, 2, 1, 3), margin=(2, 1, 0, 8))


def _case(seqlen_q: int, seqlen_k: int, **fields: object) -> Case:
    memory = {f"{name}_memory": _APART for name in "qkv"}
    return replace(Case(1, 1, 2, seqlen_q, seqlen_k, **memory), **fields)  # type: ignore[arg-type]


def _attention(dtype: str) -> dict[str, tuple[Case, ...]]:
    """Each name has the problems of one unit."""
    cases = {
        "plain": (
            _case(65, 129),
            _case(127, 128, scores="growing"),
            _case(129, 193, scores="falling"),
        ),
        "grouped": (_case(20, 33, kv_heads=2),),
        "causal": (_case(129, 129, causal=True), _case(150, 70, causal=True, scores="falling")),
        "window": (_case(130, 255, window=(40, 20)),),
        "narrow": (_case(20, 65, head_dim=40, head_dim_v=40),),
        "half slab": (_case(20, 65, head_dim=32, head_dim_v=32),),
        "mask": (_case(20, 65, mask=(True,) * 4),),
        "bias": (_case(20, 65, bias=(True,) * 4),),
        "dropout": (_case(80, 129, kv_heads=2, dropout_p=0.5),),
    }
    return {name: tuple(replace(c, dtype=dtype) for c in of) for name, of in cases.items()}


def _hopper() -> dict[str, tuple[Case, ...]]:
    """Tiles of 64 to 192 queries, and as many keys or fewer."""

    def case(seqlen_q: int, seqlen_k: int, **fields: object) -> Case:
        sizes = {"head_dim": 32, "head_dim_v": 32, "dtype": "bfloat16"}
        return _case(seqlen_q, seqlen_k, **{**sizes, **fields})

    jump = {"scores": "jumping", "jumps": ((0, 200.0), (200, -200.0))}
    half = {"scores": "jumping", "jumps": ((0, 20.0), (200, -20.0)), "dtype": "float16"}
    return {
        "plain": (
            case(200, 400, kv_heads=2, scores="growing"),
            case(65, 700, scores="falling"),
        ),
        "wide": (case(65, 129, head_dim=96),),
        "causal": (case(450, 257, causal=True),),
        "hidden": (case(200, 300, head_dim=256, causal=True),),
        "hidden beside": (case(256, 320, head_dim=128, causal=True),),
        "ones": (case(65, 129, head_dim_v=64),),
        "mask": (case(200, 400, mask=(True,) * 4),),
        "dropout": (case(130, 300, dropout_p=0.5),),
        "sparse": (case(200, 900, mask=(False, False, True, True), hidden=0.99995),),
        "past its end": (
            case(1300, 40, mask=(True, True, False, True), causal="top_left", window=(10, None)),
        ),
        "jumps": (case(200, 400, **jump), case(200, 400, scores="large", scale=0.06)),
        "float16": (
            case(20, 400, **half),
            case(1, 400, **{**half, "jumps": ((0, 91.5), (1, -91.5))}),
        ),
    }


def _masks() -> dict[str, tuple[Case, ...]]:
    """Blocks of 128 queries and 128 keys. Of the first queries the second block is hidden, the
    third one whole, and of the first one the first keys are; of the others, few see any key."""
    first = ((0, 128, 0, 4, 0.0), (0, 128, 128, 256, 1.0), (0, 128, 256, 384, 0.0))
    rectangles = (*first, (128, 200, 0, 400, 1.0), (140, 150, 380, 400, 0.5))
    sizes = {"batch": 2, "head_dim": 32, "head_dim_v": 32, "dtype": "bfloat16"}
    case = _case(200, 400, **sizes, mask=(True,) * 4, rectangles=rectangles)
    repeated = replace(case, rectangles=(), mask=(False, True, False, True), causal=True)
    return {
        "blocks": (case, replace(case, seqlen_k=403)),
        "apart": (replace(case, extra_memory=Memory(step=(1, 1, 1, 2), margin=(0, 0, 0, 1))),),
        "odd": (replace(case, extra_memory=Memory(offset=1)),),
        "repeated": (repeated,),
    }


@dataclass(frozen=True)
class _Extreme(Case):
    """The last number of one of q, k, v and dout is the largest float32, which TF32 rounds to
    infinity; what it is multiplied by is 0."""

    extreme: str = "q"

    def arrays(self, xp: Any, poison: float = np.nan) -> tuple[Any, Any, Any]:
        q, k, v = super().arrays(xp, poison)
        self._change(q=q, k=k, v=v)
        return q, k, v

    def back(self, xp: Any, poison: float = np.nan) -> tuple[Any, Any]:
        dout, dlse = super().back(xp, poison)
        self._change(dout=dout)
        return dout, dlse

    def _change(self, **arrays: Any) -> None:
        factor = {"q": "k", "k": "q", "v": "dout", "dout": "v"}[self.extreme]
        if factor in arrays:
            arrays[factor][..., -1] = 0
        if self.extreme in arrays:
            arrays[self.extreme][..., -1, -1] = largest(self.dtype)


def _backward(**fields: object) -> dict[str, tuple[Case, ...]]:
    """Tiles of 64 queries and 64 keys."""

    def case(seqlen_q: int, seqlen_k: int, **more: object) -> Case:
        sizes = {"head_dim": 32, "head_dim_v": 32, "dtype": "float32"}
        return _case(seqlen_q, seqlen_k, **{**sizes, **fields, **more})

    return {
        "plain": (case(65, 129, batch=2), case(130, 70)),
        "grouped": (case(20, 33, kv_heads=2),),
        "causal": (case(129, 129, causal=True), case(150, 70, causal=True)),
        "window": (case(130, 255, window=(40, 20)),),
        "narrow": (case(20, 65, head_dim=24),),
        "dead rows": (case(40, 65, mask=(True,) * 4, dead_rows=True),),
        "dead wide": (case(40, 65, head_dim_v=96, mask=(True,) * 4, dead_rows=True),),
        "softcap": (case(40, 65, softcap=0.5),),
        "repeated": (case(70, 65, batch=2, bias=(False,) * 4),),
        "dropout": (case(70, 65, kv_heads=2, dropout_p=0.5),),
    }


def _backward_tf32() -> dict[str, tuple[Case, ...]]:
    """Small ones, since the kernel is long. Tiles of 64 queries, or of 32 where scores are more
    than scaled, and 64 keys; in "shared" two warps have the same keys."""

    def case(seqlen_q: int, seqlen_k: int, **more: object) -> Case:
        return _case(seqlen_q, seqlen_k, **{"head_dim": 32, "head_dim_v": 32, **more})

    tiny = case(65, 20, group=1, scores="tiny")
    return {
        "plain": (case(65, 66),),
        "shared": (case(40, 33, head_dim=72, head_dim_v=96),),
        "causal": (case(65, 65, causal=True),),
        "dead rows": (case(40, 33, mask=(True,) * 4, dead_rows=True),),
        "softcap": (case(40, 33, softcap=0.5, dropout_p=0.5),),
        "extreme": tuple(_Extreme(**vars(tiny), extreme=name) for name in ("v", "q", "k", "dout")),
    }


_LINEAR = linear_attention.Problem
Problem = Case | _LINEAR
#: By kernel, and dtype if it is served differently.
PROBLEMS: dict[str, dict[str, tuple[Problem, ...]]] = {
    "fa2_fwd": _attention("float16"),
    "fa2_fwd float32": _attention("float32"),
    "fa2_fwd float64": _attention("float64"),
    "fa2_fwd_simt": _attention("float32"),
    "fa1_fwd": {  # several blocks of keys, which are longer there
        "plain": (
            _case(65, 257, head_dim=96, dtype="float16"),
            _case(40, 300, head_dim=96, dtype="float16", scores="growing"),
            _case(40, 300, head_dim=96, dtype="float16", scores="falling"),
        ),
        "causal": (_case(150, 70, head_dim=96, dtype="float16", causal=True),),
        "dropout": (_case(40, 200, head_dim=96, dtype="float16", dropout_p=0.5),),
    },
    "fa1_fwd_simt": _attention("float32"),
    "fa3_fwd_sm90": _hopper(),
    "fa3_fwd_sm90 mask": _masks(),
    "fa2_bwd": _backward(dtype="float16"),
    "fa2_bwd_dq": _backward(dtype="bfloat16"),
    "fa2_bwd_tf32": _backward_tf32(),
    "fa2_bwd_simt": _backward(),
    "fa2_bwd_dq_simt": _backward(),
    "fa2_bwd_dbias_simt": _backward(bias=(True,) * 4, hidden=0.0),
    "bwd_rows": {**_backward(), "extreme": _backward_tf32()["extreme"]},
    "bwd_queries": _backward(),
    "bwd_queries_mma": _backward(dtype="float16"),
    "bwd_sink": _backward(sink=True),
    "linear_attention_sm90": {
        "plain": (_LINEAR(), _LINEAR(2, 2, 2, seqlen_q=129, seqlen_k=321)),
    },
}
