"""The errors cufa raises, each a subclass of the built-in that a caller would expect."""

from __future__ import annotations


class CufaError(Exception):
    """Base of every error that cufa raises on purpose."""


class ArgumentError(CufaError, ValueError):
    """An option has a value outside its range (window, scale, softcap, layout, algorithm)."""


class ShapeError(CufaError, ValueError):
    """The arrays do not fit together; the message names the axis, the sizes and the rule."""


class DTypeError(CufaError, TypeError):
    """An array has a dtype, or an object a type, that the argument does not take."""


class DeviceError(CufaError, ValueError):
    """The arrays do not live on one device, or the device cannot be used."""


class UnsupportedError(CufaError, NotImplementedError):
    """The request is meaningful but no kernel here serves it; the message names the limits."""


class OutOfMemoryError(CufaError, MemoryError):
    """What the call must hold does not fit into memory; the message names the bytes."""


class BuildError(CufaError, RuntimeError):
    """A kernel could not be compiled or loaded; the message carries the compiler's log."""


class RankError(CufaError, RuntimeError):
    """Work that several ranks share has failed on another one; the message names it."""


class RankTimeoutError(RankError, TimeoutError):
    """Another rank has not done its part in time; the message names it."""
