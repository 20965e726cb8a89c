"""Which library an array belongs to, and what the checks need to know of it.

Imports no GPU library.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cufa.errors import ArgumentError, DTypeError
from cufa.options import (
    ALGORITHMS,
    CAUSAL,
    LAYOUTS,
    plain_choice,
    plain_number,
    plain_probability,
    plain_seed,
    plain_window,
)
from cufa.problem import ArrayFacts, Shape, Signature

CPU = -1
#: JAX takes host memory without a copy only if it starts at a multiple of this.
_HOST_ALIGNMENT = 64
#: Results of fewer bytes are left where NumPy puts them: a copy costs less than a place of choice.
_SMALL = 1 << 14
#: Of `ArrayFacts`, and whether the array starts at a multiple of 16 bytes: True on the CPU.
Facts = tuple[Shape, Shape, np.dtype[Any], int, bool]


class ForeignArray(DTypeError):
    """An array of a third library: `cufa.interop` can borrow it for a call that takes such."""


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


class _Libraries(dict[type, str]):
    """The library whose arrays are of a type, if their memory can be taken as it is."""

    def __missing__(self, kind: type) -> str:
        names = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
        if issubclass(kind, (np.ma.MaskedArray, np.matrix)):
            self[kind] = ""
        elif issubclass(kind, np.ndarray):
            self[kind] = "numpy"
        else:
            self[kind] = "cupy" if ("cupy", "ndarray") in names else ""
        return self[kind]


_libraries = _Libraries()


def is_cupy(a: Any) -> bool:
    """Whether `a` is a CuPy array; true only if CuPy has been imported by whoever made `a`."""
    return _libraries[type(a)] == "cupy"


def is_foreign(a: Any) -> bool:
    """Whether `a` is neither NumPy's nor CuPy's, but lends its memory by one of two protocols."""
    return not (_libraries[type(a)] or isinstance(a, np.ndarray)) and (
        hasattr(a, "__dlpack__") or hasattr(a, "__cuda_array_interface__")
    )


def describe(name: str, a: Any) -> ArrayFacts:
    """Shape, strides, dtype and device of a NumPy or CuPy array.

    Raises
    ------
    ForeignArray
        `a` is neither, but `cufa.interop` can make one of it.
    DTypeError
        `a` is neither, or is a subclass whose extra meaning would be lost.
    """
    return array_facts(facts_of(name, a))


def array_facts(given: Facts) -> ArrayFacts:
    """All but where the array starts."""
    return ArrayFacts._make(given[:-1])


def facts_of(name: str, a: Any) -> Facts:
    """`describe`, for a key: a plain tuple, which is made in a fraction of the time."""
    library = _libraries[type(a)]
    if library == "cupy":
        data = a.data
        return a.shape, a.strides, a.dtype, data.device_id, data.ptr % 16 == 0
    if library == "numpy":
        return a.shape, a.strides, a.dtype, CPU, True
    if isinstance(a, np.ndarray):
        raise DTypeError(
            f"{name} is a {type(a).__name__}; pass a plain array (and mask= for masked keys)"
        )
    if is_foreign(a):
        raise ForeignArray(
            f"{name} is a {type(a).__name__}; it must be a NumPy or CuPy array here "
            "(np.from_dlpack, cupy.from_dlpack and cupy.asarray make one of it)"
        )
    hint = " (np.asarray makes one of it)" if isinstance(a, np.generic) else ""
    raise DTypeError(
        f"{name} is a {type(a).__name__}; it must be a NumPy or CuPy array{hint}, or one with "
        "__dlpack__ or __cuda_array_interface__"
    )


def namespace(a: Any) -> ModuleType:
    """The module, numpy or cupy, that `a` belongs to."""
    if is_cupy(a):
        return importlib.import_module("cupy")
    return np


def host_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """`np.empty`, from where other libraries too can take a large array without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return np.empty(shape, dtype)
    raw = np.empty(size + _HOST_ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, -raw.ctypes.data % _HOST_ALIGNMENT)


def narrowed(a: Any, dtype: str) -> Any:
    """`a` in a float dtype; what is finite stays finite, so that a lowest number is no infinity."""
    if a.dtype.itemsize <= np.dtype(dtype).itemsize:
        return a.astype(dtype, copy=False)
    xp, limit = namespace(a), float(np.finfo(dtype).max)
    return xp.where(xp.isinf(a), a, xp.clip(a, -limit, limit)).astype(dtype)


def distinct(a: Any) -> Any:
    """`a` with one element along each axis that only repeats it."""
    return a[tuple(slice(1) if stride == 0 else slice(None) for stride in a.strides)]


def parts_of(a: Any, limit: int) -> Iterator[Any]:
    """Views that make up an array, in order, of at most `limit` elements each."""
    if a.size <= limit:
        yield a
        return
    step = max(1, len(a) * limit // a.size)
    for start in range(0, len(a), step):
        yield from parts_of(a[start : start + step] if step > 1 else a[start], limit)


def four_axes(a: Any, layout: str) -> Any:
    """A view with the axes (batch, heads, rows, columns)."""
    if isinstance(a, np.ndarray):
        a = np.asarray(a)  # of a subclass, such as memmap, whose views are made slowly
    if layout == "bshd" and a.ndim > 2:
        a = a.swapaxes(-2, -3)
    return a[(None,) * (4 - a.ndim)]


def check_overlap(arrays: Arrays, call: Signature) -> None:
    """Raise if `out` shares an element with an input: it would be overwritten while still read."""
    *inputs, (_, below, above) = _reaches(call)
    address = address_of(arrays.out)
    begin, end = address - below, address + above
    for place, below, above in inputs:
        a = arrays[place]
        address = address_of(a)
        near = address - below < end and begin < address + above
        if near and share_elements(arrays.out, a):
            name = Arrays._fields[place]
            raise ArgumentError(f"out shares memory with {name}; pass an array of its own")


@lru_cache(maxsize=4096)
def _reaches(call: Signature) -> tuple[tuple[int, int, int], ...]:
    """Of each array given: its place in `Arrays`, and how many bytes it reaches below the address
    of its first element and above."""
    given = ((place, getattr(call, name)) for place, name in enumerate(Arrays._fields))
    return tuple((place, *_reach(facts)) for place, facts in given if facts is not None)


def _reach(a: ArrayFacts) -> tuple[int, int]:
    if 0 in a.shape:
        return 0, 0
    steps = [stride * (size - 1) for size, stride in zip(a.shape, a.strides, strict=True)]
    return -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + a.dtype.itemsize


def address_of(a: Any) -> int:
    """Of the first element."""
    address: int = a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr
    return address


def share_elements(a: Any, b: Any) -> bool:
    """Whether an element of `a` lies where one of `b` does; both in one place."""
    bounded: Any = {"max_work": 10_000}  # exact for ordinary views; contrived ones count as shared
    try:
        return np.shares_memory(_as_addresses(a), _as_addresses(b), **bounded)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    def __init__(self, a: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (a.data.ptr, False),
            "shape": a.shape,
            "strides": a.strides,
            "typestr": f"|V{a.dtype.itemsize}",
        }


def _as_addresses(a: Any) -> np.ndarray[Any, Any]:
    """`a`, or a NumPy array that covers the same addresses and is never read."""
    return a if isinstance(a, np.ndarray) else np.asarray(_Addresses(a))


def are_aligned(arrays: Arrays) -> bool:
    """Whether q, k, v and out start at multiples of 16 bytes."""
    q, k, v, *_, out = arrays
    of_out = 0 if out is None else address_of(out)
    return (address_of(q) | address_of(k) | address_of(v) | of_out) % 16 == 0


def sign(
    arrays: Arrays,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    algorithm: Any,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
) -> Signature:
    """The call as hashable facts; options of another type than documented are refused here.

    The seed is checked, but is no part of them, as pointers are none: nothing that is made ready
    for one seed would serve the next.
    """
    q, k, v, mask, bias, alibi_slopes, sink, out = arrays
    return _signature(
        facts_of("q", q),
        facts_of("k", k),
        facts_of("v", v),
        None if mask is None else facts_of("mask", mask),
        None if bias is None else facts_of("bias", bias),
        None if alibi_slopes is None else facts_of("alibi_slopes", alibi_slopes),
        None if sink is None else facts_of("sink", sink),
        None if out is None else facts_of("out", out),
        plain_choice("causal", causal, CAUSAL),
        None if window is None else plain_window(window),
        None if softcap is None else plain_number("softcap", softcap),
        None if scale is None else plain_number("scale", scale),
        plain_choice("layout", layout, LAYOUTS),
        plain_choice("return_lse", return_lse, (False, True)),
        plain_choice("algorithm", algorithm, ALGORITHMS),
        _plain_dropout(dropout_p, dropout_seed),
    )


@lru_cache(maxsize=4096)
def _signature(*given: Any) -> Signature:
    """From `Facts` and plain options; to find one takes less than to make it."""
    arrays, options = given[: len(Arrays._fields)], given[len(Arrays._fields) :]
    facts = [None if a is None else array_facts(a) for a in arrays]
    q, k, v, *_, out = arrays
    aligned = all(a[-1] for a in (q, k, v, out) if a is not None)
    return Signature._make([*facts, *options[:-1], aligned, options[-1]])


def _plain_dropout(dropout_p: Any, seed: Any) -> float:
    if seed is None and type(dropout_p) is float and dropout_p == 0:
        return 0.0  # most calls: in a fraction of the time of what follows
    p = plain_probability("dropout_p", dropout_p)
    if seed is not None:
        plain_seed("dropout_seed", seed)
    elif p:
        raise ArgumentError(
            f"dropout_p is {p} and dropout_seed is None; pass one, another for each call: there is "
            "no hidden state to draw one from"
        )
    return p
