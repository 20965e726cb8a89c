"""Random layers, what they are called with, and the formula of a layer in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import cufa
from cufa import reference, testing
from cufa.bounds import exact, rounding, spacing
from cufa.testing import FLOATS, Case, numpy_dtype

LENGTHS = st.integers(0, 24)


@dataclass(frozen=True)
class LayerCase:
    """A layer around the attention of `case`, whose own q, k and v are not used."""

    case: Case
    embed_dim: int
    #: None: self-attention.
    context_dim: int | None
    projection_bias: bool
    rotary: bool
    rotary_base: float
    offset: int

    @property
    def layer(self) -> cufa.MultiHeadAttention:
        return cufa.MultiHeadAttention(
            self.embed_dim,
            self.case.heads,
            kv_heads=self.case.kv_heads,
            head_dim=self.case.head_dim,
            context_dim=self.context_dim,
            projection_bias=self.projection_bias,
            rotary=self.rotary,
            rotary_base=self.rotary_base,
        )

    def few_kernels(self) -> LayerCase:
        """This problem bent so that all together need few compiled kernels."""
        return replace(self, case=self.case.few_kernels())

    def arrays(self, xp: Any) -> tuple[dict[str, Any], Any, Any]:
        """Parameters, x and context."""
        rng = np.random.default_rng([self.case.seed, 3])
        dtype = numpy_dtype(self.case.dtype)
        params = self.layer.init(rng, dtype)
        params |= {
            name: rng.standard_normal(a.shape).astype(dtype)
            for name, a in params.items()
            if a.ndim == 1
        }
        batch = (self.case.batch,) if self.case.rank == 4 else ()
        x = rng.standard_normal((*batch, self.case.seqlen_q, self.embed_dim)).astype(dtype)
        context = None
        if self.context_dim:
            shape = (*batch, self.case.seqlen_k, self.context_dim)
            context = xp.asarray(rng.standard_normal(shape).astype(dtype))
        return {name: xp.asarray(a) for name, a in params.items()}, xp.asarray(x), context

    def options(self, xp: Any) -> dict[str, Any]:
        """All that a call of the layer takes beside its arrays."""
        options = self.case.options(xp)
        del options["layout"]
        return {"offset": self.offset, **options}

    def back(self, xp: Any) -> Any:
        """`dy`, the derivative of a loss by each element of the result."""
        _, x, _ = self.arrays(np)
        dy = np.random.default_rng([self.case.seed, 4]).standard_normal(x.shape)
        return xp.asarray(dy.astype(x.dtype))


@st.composite
def layer_cases(
    draw: st.DrawFn,
    /,
    dtypes: Any = FLOATS,
    context: Any = None,
    rotary: Any = None,
    offset: Any = None,
    lengths: Any = LENGTHS,
    **fixed: Any,
) -> LayerCase:
    """Layers of every kind, with short sequences; `fixed` is of the attention."""
    crossed = draw(st.booleans() if context is None else st.just(context))
    turning = draw(st.booleans() if rotary is None else st.just(rotary))
    half = draw(st.integers(1, 12))
    head_dim = 2 * half - (0 if turning else draw(st.integers(0, 1)))
    seqlen_q = draw(lengths)
    problem = {
        "layout": "bshd",
        "rank": st.sampled_from([4, 4, 3]),
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "seqlen_q": seqlen_q,
        "seqlen_k": draw(lengths) if crossed else seqlen_q,
        "dropout_p": st.sampled_from([0.0, 0.0, 0.5]),
        "scores": "normal",
        "v_size": 1.0,
    }
    case = draw(testing.cases(dtypes=dtypes, max_elements=1 << 15, **{**problem, **fixed}))
    return LayerCase(
        case,
        embed_dim=draw(st.integers(1, 20)),
        context_dim=draw(st.integers(1, 20)) if crossed else None,
        projection_bias=draw(st.booleans()),
        rotary=turning,
        rotary_base=draw(st.sampled_from([10000.0, 10.0, 0.5])),
        offset=draw(st.integers(0, 1000) if offset is None else offset),
    )


class Value(NamedTuple):
    """What the formula gives, and how far rounding may lead from it; both in float64."""

    exact: Any
    off: Any = 0.0

    def each(self, change: Callable[[Any], Any]) -> Value:
        """Both with other axes."""
        return Value(change(self.exact), change(np.broadcast_to(self.off, self.exact.shape)))


class Rounding:
    """How far a layer of this dtype may be from its formula.

    With ``eps`` of the accumulator and ``u``, the dtype's unit roundoff, a product of n terms is
    off by ``(sqrt(n) + 8) * eps`` times what it adds up, as in `cufa.bounds`, and by what its
    factors are off; every array is rounded by ``u``, and half its dtype's smallest number.
    """

    def __init__(self, dtype: Any) -> None:
        self.eps = rounding(dtype)[0]
        self.unit, self.least = spacing(dtype, 1) / 2, spacing(dtype, 0) / 2

    def rounded(self, a: Value) -> Value:
        return Value(a.exact, a.off + self.unit * (abs(a.exact) + a.off) + self.least)

    def product(self, a: Value, b: Any, bias: Any = None) -> Value:
        """``a @ b``, rounded; with a bias that is added then, and rounded again, as by CuPy."""
        sums = (math.sqrt(len(b)) + 8) * self.eps
        product = Value(a.exact @ b, a.off @ abs(b) + sums * (abs(a.exact) @ abs(b)))
        total = self.rounded(product)
        if bias is None:
            return total
        return self.rounded(Value(total.exact + bias, total.off + self.eps * abs(bias)))

    def turned(self, a: Value, base: float, start: int, sign: int = 1) -> Value:
        """By complex numbers: pair i of position n times ``exp(1j * n * base**(-2 * i / d))``."""
        seqlen, _, head_dim = a.exact.shape[-3:]
        half = head_dim // 2
        angles = np.arange(start, start + seqlen)[:, None, None] / base ** (np.arange(half) / half)
        pairs = a.exact[..., :half] + 1j * a.exact[..., half:]
        turned = pairs * np.exp(sign * 1j * angles)
        size, off = (x[..., :half] + x[..., half:] for x in (abs(a.exact), a.off))
        # Cosines are off by their own rounding, and by that of the angle, in float64.
        off = off + 8 * (self.eps + np.finfo(np.float64).eps * angles) * (size + off)
        parts = np.concatenate([turned.real, turned.imag], axis=-1)
        return self.rounded(Value(parts, np.concatenate([off, off], axis=-1)))


def formula(problem: LayerCase, offset: int | None = None) -> Value:
    """The layer's result by the formula of attention, at an offset instead of the problem's own."""
    params, x, context = problem.arrays(np)
    options = {**problem.options(np), "layout": "bshd"}
    own = options.pop("offset")
    parts = _projected(problem, params, x, context, own if offset is None else offset)
    out = _attended(x.dtype, parts, options)
    joined = out.each(lambda a: a.reshape(*x.shape[:-1], len(params["wo"])))
    return Rounding(x.dtype).product(joined, *_weight_and_bias(params, "o"))


def _projected(
    problem: LayerCase, params: dict[str, Any], x: Any, context: Any, offset: int
) -> dict[str, Value]:
    rounding, parts = Rounding(x.dtype), {}
    for name, given, start in _sources(problem, x, context, offset):
        product = rounding.product(exactly(given), *_weight_and_bias(params, name))
        heads = product.each(lambda a: a.reshape(_split_shape(a, problem.case.head_dim)))
        turns = problem.rotary and name != "v"
        parts[name] = rounding.turned(heads, problem.rotary_base, start) if turns else heads
    return parts


def _weight_and_bias(params: dict[str, Any], name: str) -> tuple[Any, Any]:
    """In float64, or None."""
    weight, bias = params[f"w{name}"], params.get(f"b{name}")
    return weight.astype(np.float64), None if bias is None else bias.astype(np.float64)


def _split_shape(a: Any, head_dim: int) -> tuple[int, ...]:
    return *a.shape[:-1], a.shape[-1] // head_dim, head_dim


def _sources(problem: LayerCase, x: Any, context: Any, offset: int) -> list[tuple[str, Any, int]]:
    """What queries, keys and values are made of, and where its positions begin."""
    of_keys = (x, offset) if context is None else (context, 0)
    return [("q", x, offset), ("k", *of_keys), ("v", *of_keys)]


def exactly(a: Any) -> Value:
    """An array that is off by nothing."""
    wide = a.astype(np.float64)
    return Value(wide, np.zeros(wide.shape))


def projection_gradients(problem: LayerCase, back: dict[str, Any]) -> dict[str, Value]:
    """By parameters, "x" and "context", from those by queries, keys and values, `back`."""
    params, x, context = problem.arrays(np)
    rounding, found, back_of = Rounding(x.dtype), {}, {}
    for name, given, start in _sources(problem, x, context, problem.offset):
        dy = exactly(back[name])
        if problem.rotary and name != "v":
            dy = rounding.turned(dy, problem.rotary_base, start, sign=-1)
        back_of[name] = _parameter_gradients(rounding, found, params, name, given, dy)
    shared = {"x": "qkv"} if context is None else {"x": "q", "context": "kv"}
    for given, names in shared.items():
        shape = (x if given == "x" else context).shape
        found[given] = _input_gradient(rounding, params, shape, {n: back_of[n] for n in names})
    return found


def join_gradients(problem: LayerCase, out: Any, dy: Any) -> dict[str, Value]:
    """By parameters and "out", from those by the layer's result."""
    params, x, _ = problem.arrays(np)
    found: dict[str, Value] = {}
    joined = out.reshape(*x.shape[:-1], len(params["wo"]))
    rounding = Rounding(x.dtype)
    rows = _parameter_gradients(rounding, found, params, "o", joined, exactly(dy))
    return {**found, "out": _input_gradient(rounding, params, out.shape, {"o": rows})}


def _input_gradient(
    rounding: Rounding, params: Any, shape: tuple[int, ...], back: dict[str, Value]
) -> Value:
    """By what several projections are of, from those by their rows: one sum, rounded once."""
    rows = Value(*(np.concatenate(parts, axis=1) for parts in zip(*back.values(), strict=True)))
    weight = np.concatenate([params[f"w{name}"] for name in back], axis=1, dtype=np.float64)
    return rounding.product(rows, weight.T).each(lambda a: a.reshape(shape))


def _parameter_gradients(
    rounding: Rounding, found: dict[str, Value], params: Any, name: str, given: Any, dy: Value
) -> Value:
    """Those by a projection's parameters go into `found`; `dy` as rows."""
    width = params[f"w{name}"].shape[1]
    rows = dy.each(lambda a: a.reshape(math.prod(given.shape[:-1]), width))
    columns, flat = rows.each(np.transpose), given.reshape(len(rows.exact), given.shape[-1])
    by_weight = rounding.product(columns, flat.astype(np.float64))
    found[f"w{name}"] = by_weight.each(np.transpose)
    if f"b{name}" in params:
        found[f"b{name}"] = rounding.product(columns, np.ones((len(flat), 1))).each(np.ravel)
    return rows


def _attended(dtype: Any, parts: dict[str, Value], options: dict[str, Any]) -> Value:
    """Attention, off by its own rounding and by what queries, keys and values are off."""
    q, k, v = (parts[name].exact for name in "qkv")
    own = exact(*(a.astype(dtype) for a in (q, k, v)), **options)
    out, lse = reference.attention(q, k, v, **options)
    of_scores = {n: a for n, a in options.items() if n not in ("sink", "dropout_p", "dropout_seed")}
    scores = reference.scores(q, k, **of_scores)
    plain = {"layout": "bshd", "scale": options.get("scale")}
    if plain["scale"] is not None:
        plain["scale"] = abs(plain["scale"])
    moved = reference.scores(parts["q"].off, abs(k) + parts["k"].off, **plain)
    moved += reference.scores(abs(q), parts["k"].off, **plain)
    lse = lse.reshape(scores.shape[:3])[..., None]
    p = np.exp(scores - np.where(lse == -np.inf, 0, lse))
    change = p * np.expm1(moved + (p * moved).sum(-1, keepdims=True))
    if options.get("dropout_p"):
        keep = reference.kept(options["dropout_seed"], options["dropout_p"], p.shape)
        p, change = (a * keep / (1 - options["dropout_p"]) for a in (p, change))
    values, off = (
        reference.per_query_head(reference.four_axes(a, "bshd"), scores.shape[1])
        for a in (abs(v), parts["v"].off)
    )
    bound = (change @ (values + off) + p @ off).swapaxes(1, 2).reshape(out.shape)
    return Value(out, own.out_bound + bound)
