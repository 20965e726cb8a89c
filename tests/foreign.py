"""Stand-ins for arrays of other libraries: over NumPy or CuPy, with one protocol and no more."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import numpy as np

from cufa.interop import Relay
from cufa.testing import to_numpy

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of a GPU
UINT, BFLOAT = 1, 4  # DLDataTypeCode


class Lender:
    """An array of which nothing is known but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        a = self.array
        if a.dtype.name == "bfloat16":
            a = Relay(a.view(np.uint16), UINT, BFLOAT)
        return a.__dlpack__(**options)


class InterfaceOnly:
    """A CuPy array of which nothing is known but the CUDA array interface."""

    def __init__(self, array: Any, stream: int | None = None, read_only: bool = False) -> None:
        self.array = array
        interface = {**array.__cuda_array_interface__, "stream": stream}
        interface["data"] = (interface["data"][0], read_only)
        self.__cuda_array_interface__ = interface


def make_library(xp: ModuleType) -> ModuleType:
    """A library with a `from_dlpack`; its arrays' type knows it by name only, as PyTorch's does."""
    library = ModuleType("lending_library")

    class Array(Lender):
        __module__ = library.__name__

    library.Array = Array
    library.from_dlpack = lambda a: Array(xp.from_dlpack(a))
    return library


def pointer(a: Any) -> int:
    """Address of the first element of a NumPy, CuPy, JAX or PyTorch array, or of a stand-in."""
    if isinstance(a, Lender | InterfaceOnly):
        a = a.array
    if isinstance(a, np.ndarray):
        return a.ctypes.data
    if "jax" in sys.modules and isinstance(a, sys.modules["jax"].Array):
        return a.unsafe_buffer_pointer()
    return a.data_ptr() if hasattr(a, "data_ptr") else a.data.ptr


def assert_same_bits(a: Any, b: Any) -> None:
    """Equal bit for bit, NaN included, wherever the arrays are."""
    a, b = (to_numpy(x.array if isinstance(x, Lender | InterfaceOnly) else x) for x in (a, b))
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(
        np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)
    )
