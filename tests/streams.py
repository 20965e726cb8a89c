"""What tests of streams on a GPU share: arrays, and work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def fill_pool(cupy: Any, call: Callable[[], object]) -> None:
    """Call until CuPy's pool has all memory that a call takes from it in the current stream.

    In mode "Global" the device gives none during a capture.
    """
    pool = cupy.get_default_memory_pool()
    for _ in range(5):
        had = pool.total_bytes()
        call()
        if pool.total_bytes() == had:
            return
    raise AssertionError(f"each of 5 calls took memory beyond the {had} bytes that the pool had")


def check_graph_owns_what_it_needs(cupy: Any, mode: str, call: Callable[[], Sequence[Any]]) -> None:
    """A captured call gives the results it gave before, each time that its graph runs, though
    CuPy's pool has given others all that it has; and it writes to nothing of theirs."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        fill_pool(cupy, call)
        want = [a.tobytes() for a in call()]
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        results = call()
        graph = stream.end_capture()
        taken = [cupy.full(1 << n, 255, "uint8") for n in range(5, 24) for _ in range(3)]
        for _ in range(3):
            for a in results:
                a.fill(cupy.nan)
            graph.launch(stream)
            assert [a.tobytes() for a in results] == want
        assert all(bool((a == 255).all()) for a in taken)
