"""Which library an array belongs to, and what the checks need to know of it.

Imports no GPU library.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cufa.errors import ArgumentError, DTypeError
from cufa.problem import ArrayFacts, Signature, plain_number, plain_window

CPU = -1


class Arrays(NamedTuple):
    """The arrays of one call, as the caller gave them."""

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    out: Any = None


def is_cupy(a: Any) -> bool:
    """Whether `a` is a CuPy array; true only if CuPy has been imported by whoever made `a`."""
    return type(a).__module__.partition(".")[0] == "cupy" and hasattr(a, "__cuda_array_interface__")


def describe(name: str, a: Any) -> ArrayFacts:
    """Shape, strides, dtype and device of a NumPy or CuPy array.

    Raises
    ------
    DTypeError
        `a` is neither, or is a subclass whose extra meaning would be lost.
    """
    if isinstance(a, np.ndarray):
        if isinstance(a, (np.ma.MaskedArray, np.matrix)):
            raise DTypeError(
                f"{name} is a {type(a).__name__}; pass a plain array (and mask= for masked keys)"
            )
        return ArrayFacts(a.shape, a.strides, a.dtype, CPU)
    if is_cupy(a):
        return ArrayFacts(a.shape, a.strides, a.dtype, a.data.device_id)
    raise DTypeError(f"{name} is a {type(a).__name__}; it must be a NumPy or CuPy array")


def namespace(a: Any) -> ModuleType:
    """The module, numpy or cupy, that `a` belongs to."""
    if is_cupy(a):
        return importlib.import_module("cupy")
    return np


#: Exact answers for ordinary views; NumPy gives up on contrived ones after this many candidates.
_BOUNDED: Any = {"max_work": 10_000}


def check_overlap(out: Any, inputs: dict[str, Any]) -> None:
    """Raise if `out` shares an element with an input: it would be overwritten while still read."""
    target = _as_addresses(out)
    for name, a in inputs.items():
        if a is None:
            continue
        try:
            shared = np.shares_memory(target, _as_addresses(a), **_BOUNDED)
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            raise ArgumentError(f"out shares memory with {name}; pass an array of its own")


class _Addresses:
    def __init__(self, a: Any) -> None:
        itemsize = a.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (a.data.ptr, False),
            "shape": a.shape,
            "strides": a.strides,
            "typestr": f"|V{itemsize}",
        }


def _as_addresses(a: Any) -> np.ndarray[Any, Any]:
    """`a`, or a NumPy array that covers the same addresses and is never read."""
    return a if isinstance(a, np.ndarray) else np.asarray(_Addresses(a))


def are_aligned(arrays: Arrays) -> bool:
    """Whether q, k, v and out start at multiples of 16 bytes; False if one is no CuPy array."""
    try:
        pointers = arrays.q.data.ptr | arrays.k.data.ptr | arrays.v.data.ptr
        return bool((pointers | (0 if arrays.out is None else arrays.out.data.ptr)) % 16 == 0)
    except AttributeError:
        return False


def sign(
    arrays: Arrays,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    algorithm: Any,
) -> Signature:
    """The call as hashable facts; options of another type than documented are refused here."""
    for name, option in (("causal", causal), ("layout", layout), ("algorithm", algorithm)):
        if not isinstance(option, (bool, str, np.bool_)):
            raise ArgumentError(
                f"{name} is {option!r}, of type {type(option).__name__}; see the documentation"
            )
    q, k, v, mask, bias, alibi_slopes, sink, out = arrays
    facts = describe("q", q)
    return Signature(
        facts,
        describe("k", k),
        describe("v", v),
        None if mask is None else describe("mask", mask),
        None if bias is None else describe("bias", bias),
        None if alibi_slopes is None else describe("alibi_slopes", alibi_slopes),
        None if sink is None else describe("sink", sink),
        None if out is None else describe("out", out),
        causal,
        None if window is None else plain_window(window),
        None if softcap is None else plain_number("softcap", softcap),
        None if scale is None else plain_number("scale", scale),
        layout,
        bool(return_lse),
        algorithm,
        facts.device == CPU or are_aligned(arrays),
    )
