"""Attention's share of one transformer layer: the rest of a layer is matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple

from cufa.options import numpy_dtype
from cufa.tools.results import Result, significant
from cufa.tools.rigs import Rig
from cufa.tools.timing import Contender, Figures, compare
from cufa.tools.workloads import Workload, noise


class Product(NamedTuple):
    """``x (tokens, inner) @ w (inner, outer)``."""

    name: str
    inner: int
    outer: int


def products(work: Workload) -> list[Product]:
    """The matrix products of a GPT layer around an attention: four times as wide in between."""
    hidden = work.heads * work.head_dim
    return [
        Product("q, k, v", hidden, hidden + 2 * work.kv_heads * work.head_dim),
        Product("out", hidden, hidden),
        Product("up", hidden, 4 * hidden),
        Product("down", 4 * hidden, hidden),
    ]


def product_flop(work: Workload) -> int:
    """Two for each multiplication in the layer's matrix products."""
    tokens = work.batch * work.seqlen_q
    return sum(2 * tokens * p.inner * p.outer for p in products(work))


def share(result: Result, timed: Figures | str) -> dict[str, Any]:
    """What attention is of the layer's forward step, in FLOPs and in time.

    `timed` is of the products, or why they could not be timed.
    """
    flop = product_flop(result.work)
    found: dict[str, Any] = {
        "attention_flop": result.work.flop,
        "products_flop": flop,
        "flop_share": result.work.flop / (result.work.flop + flop),
    }
    if isinstance(timed, Figures):
        found["products_ms"] = timed.median_ms
        found["time_share"] = {
            name: f.median_ms / (f.median_ms + timed.median_ms)
            for name, f in result.figures.items()
        }
    else:
        found["products_reason"] = timed
    return found


def lines(layer: dict[str, Any]) -> list[str]:
    """The same for people."""
    attention, rest = layer["attention_flop"] / 1e12, layer["products_flop"] / 1e12
    text = [
        f"One layer forward: {significant(attention)} TFLOP in attention, {significant(rest)} in "
        f"matrix products; attention is {layer['flop_share']:.1%} of the FLOPs."
    ]
    if "products_ms" in layer:
        ms = layer["products_ms"]
        text.append(
            f"The products by cuBLAS take {significant(ms)} ms, {significant(rest / ms * 1e3)} "
            "TFLOP/s. Of the time of both, attention is"
        )
        text += [f"  {share:.1%} by {name}" for name, share in layer["time_share"].items()]
    else:
        text.append(f"The products could not be timed: {layer['products_reason']}")
    return text


def time_products(rig: Rig, work: Workload, rounds: int) -> Figures | str:
    """Time the layer's products, or say why they cannot be timed."""
    if rig.backend != "cupy":
        return "there is no GPU"
    dtype, tokens = numpy_dtype(work.dtype), work.batch * work.seqlen_q
    operands = [
        (noise(rig.xp, dtype, (tokens, p.inner)), noise(rig.xp, dtype, (p.inner, p.outer)))
        for p in products(work)
    ]

    def multiply() -> None:
        for x, w in operands:
            x @ w

    return compare([Contender("products", [multiply])], rig.clock, rounds)["products"]
