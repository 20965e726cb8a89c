"""A machine for the launcher whose kernels are their keys: it notes what it is to launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.gpu.device import Device
from cufa.gpu.params import Buffers, GradientBuffers
from cufa.gpu.plan import KernelKey, Step
from cufa.testing import numpy_dtype


class PaperMachine:
    """One device; its arrays are NumPy's, and nothing is computed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.launched: list[tuple[Step, Buffers]] = []
        #: Arguments that were copied, and the dtypes of the copies.
        self.copies: list[Any] = []
        self.counters: list[Any] = []

    def device(self, ordinal: int) -> Device:
        return self._device

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        return key

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def workspace(self, size: int, dtype: Any) -> Any:
        return self.empty((size,), dtype)

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        self.copies.append(a)
        made = np.empty(a.nbytes + 8 * a.size + 16, np.uint8)  # at a multiple of 16, as on a card
        start = -made.ctypes.data % 16
        copy = np.ndarray(a.shape, numpy_dtype(dtype) if dtype else a.dtype, made, start)
        copy[...] = a
        return copy

    def tickets(self) -> Any:
        self.counters.append(np.zeros(1, np.uint32))
        return self.counters[-1]

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        self.launched.append((step, buffers))

    def launch_backward(
        self,
        kernel: Any,
        step: Step,
        buffers: Buffers,
        gradients: GradientBuffers,
        seed: Any = None,
    ) -> None:
        self.launched.append((step, buffers))
