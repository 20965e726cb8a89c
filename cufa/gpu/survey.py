"""What of CUDA this machine has. Nothing here fails where something is missing."""

from __future__ import annotations

import ctypes
import warnings
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

from cufa.errors import BuildError
from cufa.gpu import build
from cufa.gpu.device import Device, get_device

#: Distributions that bring a part, any one of them.
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


class Card(NamedTuple):
    """A GPU of this machine."""

    number: int
    device: Device
    memory_bytes: int


class Part(NamedTuple):
    """Something that running or compiling kernels needs."""

    name: str
    #: None: it is missing.
    version: str | None


def driver_version() -> int | None:
    """The newest CUDA that the driver serves, 13000 for 13.0; None without a driver."""
    version = ctypes.c_int()
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
        except OSError:
            continue
        return version.value if status == 0 else None
    return None


def runtime_version() -> int | None:
    """The CUDA runtime that CuPy works with; None without CuPy."""
    cupy = import_cupy()
    return None if cupy is None else int(cupy.cuda.runtime.runtimeGetVersion())


def import_cupy() -> ModuleType | None:
    """CuPy, whether there is a GPU or not; None if it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where there is no driver
            import cupy
    except (ImportError, AttributeError):  # the latter where ml_dtypes is missing
        return None
    found: ModuleType = cupy
    return found


def find_cards() -> list[Card]:
    """The GPUs that CuPy can use."""
    cupy = import_cupy()
    if cupy is None or not cupy.is_available():
        return []
    cards = []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        facts = cupy.cuda.runtime.getDeviceProperties(number)
        cards.append(Card(number, get_device(number), facts["totalGlobalMem"]))
    return cards


def find_parts() -> list[Part]:
    """What running kernels needs, beside a card."""
    driver = driver_version()
    return [
        Part("driver", None if driver is None else f"for CUDA {cuda_version(driver)}"),
        Part("CuPy", _installed(*_CUPY)),
        Part("cuda.core", _installed("cuda-core")),
        Part("cuda.bindings", _installed("cuda-bindings")),
        Part("NVRTC", _nvrtc()),
        Part("ml_dtypes", _installed("ml_dtypes")),
    ]


def cuda_version(number: int) -> str:
    """``13.0`` for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _installed(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nvrtc() -> str | None:
    try:
        return build.compiler_version()
    except (BuildError, RuntimeError):  # no bindings; bindings that find no library
        return None
