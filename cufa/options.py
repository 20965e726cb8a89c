"""Options as plain values: what a caller may write, reduced to what the caches can hash.

Each function raises if the value is of the wrong kind, before anything else looks at it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np

from cufa.errors import ArgumentError, DTypeError

#: Bytes of an element; bfloat16 is a dtype of `ml_dtypes`, which NumPy alone does not know.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOAT_DTYPES = tuple(ITEMSIZE)
LAYOUTS = ("bhsd", "bshd")
ALGORITHMS = ("auto", "fa1", "fa2", "fa3", "standard")
CAUSAL = (False, True, "top_left")
#: Lengths stay below this so that row + diagonal + window fits a signed 32-bit integer in the
#: kernels.
MAX_SEQLEN = (1 << 30) - 1


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of a dtype; bfloat16 is the one of `ml_dtypes`."""
    return dtype.name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name.

    Raises
    ------
    DTypeError
        It is bfloat16, and `ml_dtypes` is not installed.
    """
    scalar: Any = name
    if name == "bfloat16":
        try:
            from ml_dtypes import bfloat16 as scalar
        except ImportError as error:
            raise DTypeError("bfloat16 is a dtype of the package ml_dtypes; install it") from error
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


def shown(value: Any) -> str:
    """A value as messages show it; an array by its facts, as it may be large, or on a GPU."""
    if isinstance(value, (list, tuple)):
        parts = ", ".join(map(shown, value))
        end = "," if len(value) == 1 else ""
        return f"[{parts}]" if isinstance(value, list) else f"({parts}{end})"
    shape = getattr(value, "shape", None)
    if isinstance(value, np.generic) or not (isinstance(shape, tuple) and hasattr(value, "dtype")):
        return repr(value)
    return f"an array of shape {tuple(shape)} and dtype {value.dtype}"


def plain_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """An option that is one of a few words or truth values."""
    plain: Any = None
    if type(value) in (bool, str):
        plain = value
    elif isinstance(value, np.bool_):
        plain = bool(value)
    elif isinstance(value, str):
        plain = str.__str__(value)  # a subclass may be equal to others, and yet another key
    if plain in allowed:
        return plain
    raise ArgumentError(
        f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, allowed))}"
    )


def plain_window(window: Any) -> tuple[int | None, int | None]:
    """A window as two plain integers, None for an open side."""
    if not (isinstance(window, Sequence) and not isinstance(window, str) and len(window) == 2):
        raise ArgumentError(f"window is {shown(window)}; it must be a pair (left, right) or None")
    return _bound("left", window[0]), _bound("right", window[1])


def _bound(side: str, bound: Any) -> int | None:
    if bound is None:
        return None
    try:
        bound = operator.index(bound)
    except TypeError:
        raise DTypeError(
            f"window has {side} bound {shown(bound)}; it must be an integer or None"
        ) from None
    if bound < -1:
        raise ArgumentError(
            f"window has {side} bound {bound}; it must be at least 0 (keys on that side of the "
            "diagonal, inclusive), or None or -1 for no bound"
        )
    return None if bound == -1 else min(bound, MAX_SEQLEN)


def plain_number(name: str, value: Any) -> float:
    """An option as a plain float, from any kind of real number that is in host memory."""
    if type(value) is float:  # most are, and this takes a tenth of the time of what follows
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, Real):
        given = f"{name} is {shown(value)}, a {type(value).__name__}"
        raise DTypeError(f"{given}; it must be a real number in host memory")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} is {value}; it must be finite") from None


def plain_integer(name: str, value: Any, least: int) -> int:
    """An option as a plain integer."""
    try:
        value = operator.index(value)
    except TypeError:
        raise DTypeError(
            f"{name} is {shown(value)}, a {type(value).__name__}; it must be an integer"
        ) from None
    if value < least:
        raise ArgumentError(f"{name} is {value}; it must be at least {least}")
    return int(value)


def plain_probability(name: str, value: Any) -> float:
    """An option that is the probability of being dropped, as a plain float."""
    p = plain_number(name, value)
    if not 0 <= p < 1:
        raise ArgumentError(f"{name} is {p}; it must be at least 0 and below 1")
    return p


def plain_seed(name: str, value: Any) -> int:
    """A seed of 64 bits as a plain integer, from any kind of integer that is in host memory."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (int, Integral)):  # ABCs are slow to ask
        given = f"{name} is {shown(value)}, a {type(value).__name__}"
        raise DTypeError(f"{given}; it must be an integer in host memory")
    seed = int(value)
    if not 0 <= seed < 1 << 64:
        raise ArgumentError(f"{name} is {seed}; it must be at least 0 and below 2**64")
    return seed


def plain_dtype(name: str, value: Any) -> str:
    """An option that names one of the float dtypes, by its name or as NumPy writes it."""
    if not isinstance(value, str) and value is not None:  # None is NumPy's float64
        with contextlib.suppress(TypeError):
            value = dtype_name(np.dtype(value))
    if not (isinstance(value, str) and value in FLOAT_DTYPES):
        raise ArgumentError(
            f"{name} is {shown(value)}; it must be one of {', '.join(FLOAT_DTYPES)}"
        )
    return str(value)


#: Options that a caller may hold in a list or an array, which can change, and their plain values.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "window": plain_window,
    "softcap": partial(plain_number, "softcap"),
    "scale": partial(plain_number, "scale"),
    "dropout_p": partial(plain_probability, "dropout_p"),
    "dropout_seed": partial(plain_seed, "dropout_seed"),
}


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `attention` to be kept for a later call: none changes with what the caller holds.

    Arrays stay as they are, and so does what `attention` will refuse by its name.
    """
    return {
        name: value if value is None or name not in _PLAIN else _PLAIN[name](value)
        for name, value in options.items()
    }
