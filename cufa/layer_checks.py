"""The checks on what is given to a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cufa import cpu
from cufa.arrays import CPU, Arrays, ForeignArray, describe, sign
from cufa.attention import attention
from cufa.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from cufa.options import (
    dtype_name,
    plain_integer,
    shown,
)
from cufa.problem import ArrayFacts, Shape, Signature, check_float, make_problem, place_of

Params = Mapping[str, Any]
#: Options of attention that a layer does not take, and why.
_OWN = {
    "layout": "its arrays are (batch, seqlen, embed_dim)",
    "return_lse": "lse stays inside",
    "out": "the result is that of the last projection",
    "wrt": "it gives all gradients",
}
#: Those that it passes on, with their defaults, and which of them are arrays.
_PASSED_ON = {n: a for n, a in (attention.__kwdefaults__ or {}).items() if n not in _OWN}
_ARRAYS = ("mask", "bias", "alibi_slopes", "sink")
#: float64 counts up to here.
_POSITIONS = 2**53


def check_heads(embed_dim: int, heads: int, kv_heads: int, head_dim: int | None) -> None:
    """Raise unless the heads divide what they must.

    Raises
    ------
    ArgumentError
    """
    if heads % kv_heads:
        raise ArgumentError(
            f"heads is {heads} and kv_heads is {kv_heads}; the first must be a multiple of the "
            "second (grouped-query attention)"
        )
    if head_dim is None and embed_dim % heads:
        raise ArgumentError(
            f"embed_dim is {embed_dim} and heads is {heads}; the first must be a multiple of the "
            "second, or head_dim be given"
        )


def check_rotary(head_dim: int, base: float) -> None:
    """Raise unless rotary positions can turn such heads.

    Raises
    ------
    ArgumentError
    """
    if head_dim % 2:
        raise ArgumentError(
            f"head_dim is {head_dim} and rotary is True; rotary positions turn pairs, so head_dim "
            "must be even"
        )
    if not 0 < base < math.inf:
        raise ArgumentError(f"rotary_base is {base}; it must be positive and finite")


def plain_generator(rng: Any) -> np.random.Generator:
    """What `init` draws from.

    Raises
    ------
    ArgumentError, DTypeError
        It is neither a generator nor a seed for one.
    """
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        kind = DTypeError if isinstance(error, TypeError) else ArgumentError
        raise kind(
            f"rng is {rng!r}; it must be a numpy.random.Generator, or a seed for one ({error})"
        ) from None


def check_library(xp: Any) -> None:
    """Raise unless it is NumPy or CuPy.

    Raises
    ------
    DTypeError
    """
    if not (isinstance(xp, ModuleType) and xp.__name__ in ("numpy", "cupy")):
        raise DTypeError(f"xp is {xp!r}; it must be a module, numpy or cupy")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if there is one that a layer does not pass on.

    Raises
    ------
    ArgumentError
        A layer sets it itself.
    TypeError
        Attention has no such option, as Python says of a misspelled keyword.
    """
    for name, value in options.items():
        if name in _OWN:
            raise ArgumentError(
                f"{name} is {shown(value)}; it is an option of cufa.attention that a layer does "
                f"not take: {_OWN[name]}"
            )
        if name not in _PASSED_ON:
            raise TypeError(f"a layer has no option {name}; it takes {', '.join(_PASSED_ON)}")


def check_attention(
    x: Any, of_q: Shape, of_kv: Shape, return_lse: bool, **options: Any
) -> Signature:
    """Raise what attention would on projections of `x` that are yet to be computed.

    Parameters
    ----------
    x : array
        Their dtype and device.
    of_q, of_kv : tuple of int
        Their shapes, in layout "bshd".
    return_lse : bool
    **options
        Those that a layer passes on.

    Returns
    -------
    Signature
        That of the call that is to come.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
    """
    plain = {**_PASSED_ON, **options}
    arrays = {name: plain.pop(name) for name in _ARRAYS}
    call: Signature | None
    try:
        call = sign(Arrays(x, x, x, **arrays), **plain, layout="bshd", return_lse=return_lse)
    except ForeignArray:
        call = None
    if call is None:
        from cufa import interop

        again = partial(check_attention, x, of_q, of_kv, return_lse, **plain)
        found: Signature = interop.lend(again, arrays, writes=None)
        return found
    q, kv = _made(of_q, call.q), _made(of_kv, call.q)
    call = call._replace(q=q, k=kv, v=kv)  # x was there for the options' sake
    if q.device == CPU:
        cpu.check_algorithm(call.algorithm)
    make_problem(call)
    return call


def _made(shape: Shape, like: ArrayFacts) -> ArrayFacts:
    """A contiguous array that is yet to be made."""
    strides = [like.dtype.itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape))]
    return like._replace(shape=shape, strides=tuple(strides))


def check_inputs(
    shapes: Mapping[str, Shape], params: Params, x: Any, context: Any, offset: Any
) -> Any:
    """What keys and values are made of, `x` or `context`, once everything fits together.

    `shapes` is what the layer's parameters have.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
    """
    (embed_dim, _), (context_dim, _) = shapes["wq"], shapes["wk"]
    facts = describe("x", x)
    check_float("x", facts)
    if len(facts.shape) not in (2, 3) or facts.shape[-1] != embed_dim:
        raise ShapeError(
            f"x has shape {facts.shape}; it must be (batch, seqlen, {embed_dim}), or without batch"
        )
    seqlen = facts.shape[-2]
    if plain_integer("offset", offset, 0) + seqlen > _POSITIONS:
        raise ArgumentError(
            f"offset is {offset} and x has {seqlen} rows; their positions must be below 2**53, up "
            "to where float64 counts"
        )
    check_params(params, shapes, "x", x)
    if context is None:
        if context_dim != embed_dim:
            raise ShapeError(
                f"context is None; keys and values of this layer are made of a context that is "
                f"{context_dim} wide, and x is {embed_dim}"
            )
        return x
    describe("context", context)  # raises if it is no array
    seqlen_k = context.shape[-2] if context.ndim > 1 else 0
    check_belongs("context", context, (*x.shape[:-2], seqlen_k, context_dim), "x", x)
    return context


def check_params(params: Params, shapes: Mapping[str, tuple[int, ...]], of: str, like: Any) -> None:
    """Raise unless `params` has these shapes, and dtype and device of `like`, an array `of`.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
    """
    if not isinstance(params, Mapping):
        raise DTypeError(f"params is a {type(params).__name__}; it must be a dict of arrays")
    if params.keys() != shapes.keys():
        raise ArgumentError(
            f"params has {', '.join(sorted(map(str, params))) or 'nothing'}; this layer takes "
            f"{', '.join(shapes)} (init makes them)"
        )
    for name, shape in shapes.items():
        check_belongs(f"params[{name!r}]", params[name], shape, of, like)


def check_belongs(name: str, a: Any, shape: tuple[int, ...], of: str, like: Any) -> None:
    """Raise unless `a` has this shape, and dtype and device of `like`, an array called `of`.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
    """
    facts, wanted = describe(name, a), describe(of, like)
    if facts.shape != shape:
        raise ShapeError(f"{name} has shape {facts.shape}; it must be {shape}")
    if facts.dtype != wanted.dtype:
        check_float(name, facts)  # which knows of another byte order
        raise DTypeError(
            f"{name} is {dtype_name(facts.dtype)} and {of} is {dtype_name(wanted.dtype)}; all "
            "arrays of a layer must have one dtype"
        )
    if facts.device != wanted.device:
        raise DeviceError(
            f"{name} is on {place_of(facts.device)} and {of} is on {place_of(wanted.device)}; all "
            "arrays must be on one device (cupy.asarray and cupy.asnumpy move them)"
        )
