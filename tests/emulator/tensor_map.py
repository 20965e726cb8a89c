"""Tensor maps, for the emulator and for a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cufa.testing import numpy_dtype

#: `emu::TensorMap` of host/emu.h.
_EMULATED = np.dtype(
    [
        ("base", "u8"),
        *((name, "i4") for name in ("rank", "item_bytes", "swizzle_bytes", "unused")),
        ("dims", "i4", 5),
        ("box", "i4", 5),
        ("strides", "i8", 4),
        ("padding", "u1", 32),
    ]
)
assert _EMULATED.itemsize == 128


@dataclass(frozen=True)
class TensorMap:
    """A strided array as bulk tensor copies see it, and the box that one of them copies.

    Dimension 0 is the contiguous one; strides count bytes, of dimensions 1 and up.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    @classmethod
    def of(cls, a: Any, box: tuple[int, ...], swizzle_bytes: int) -> TensorMap:
        """For an array whose last axis is dimension 0."""
        return cls(a.dtype.name, a.shape[::-1], a.strides[-2::-1], box, swizzle_bytes)

    def emulated(self, address: int) -> NDArray[np.uint8]:
        """The 128 bytes that the emulator takes for a map."""
        m = np.zeros(1, _EMULATED)
        rank = len(self.dims)
        m["base"], m["rank"] = address, rank
        m["item_bytes"], m["swizzle_bytes"] = numpy_dtype(self.dtype).itemsize, self.swizzle_bytes
        m["dims"][0, :rank], m["box"][0, :rank] = self.dims, self.box
        m["strides"][0, : rank - 1] = self.strides
        return m.view(np.uint8)

    def encoded(self, address: int) -> NDArray[np.uint8]:
        """The 128 bytes that the driver makes of it."""
        from cuda.bindings import driver

        types = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32"}
        swizzle = {0: "NONE", 64: "64B", 128: "128B"}[self.swizzle_bytes]
        status, made = driver.cuTensorMapEncodeTiled(
            getattr(
                driver.CUtensorMapDataType,
                f"CU_TENSOR_MAP_DATA_TYPE_{types[self.dtype]}",
            ),
            len(self.dims),
            address,
            [driver.cuuint64_t(n) for n in self.dims],
            [driver.cuuint64_t(n) for n in self.strides],
            [driver.cuuint32_t(n) for n in self.box],
            [driver.cuuint32_t(1)] * len(self.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        assert not int(status), status
        return np.array([int(word) for word in made.opaque], np.uint64).view(np.uint8)
