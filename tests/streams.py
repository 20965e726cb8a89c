"""What tests of streams on a GPU share: arrays, and work that takes a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.testing import numpy_dtype

SHAPE = (2, 4, 200, 64)
BUSY_CYCLES = 2_000_000_000  # of a second, on any card about
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


def spinning(cupy: Any) -> Callable[..., None]:
    """Puts work of so many seconds into CuPy's current stream; compiled."""
    spin = cupy.RawKernel(_SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()

    def busy(seconds: float = 0.1) -> None:
        spin((1,), (1,), (np.int64(seconds * BUSY_CYCLES),))

    return busy


def normal(cupy: Any, *shape: int, dtype: str = "float16") -> Any:
    """Normal numbers that are there for every stream."""
    a = cupy.asarray(np.random.default_rng().standard_normal(shape), numpy_dtype(dtype))
    cupy.cuda.Device().synchronize()
    return a
