"""Tensor maps as the emulator takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.gpu.tensor_map import TensorMap
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


def of_array(a: Any, box: tuple[int, ...], swizzle_bytes: int) -> TensorMap:
    """For an array whose last axis is dimension 0."""
    return TensorMap(a.dtype.name, a.shape[::-1], a.strides[-2::-1], box, swizzle_bytes)


def emulated(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes that the emulator takes for a map."""
    m = np.zeros(1, _EMULATED)
    rank = len(tensor_map.dims)
    m["base"], m["rank"] = address, rank
    m["item_bytes"] = numpy_dtype(tensor_map.dtype).itemsize
    m["swizzle_bytes"] = tensor_map.swizzle_bytes
    m["dims"][0, :rank], m["box"][0, :rank] = tensor_map.dims, tensor_map.box
    m["strides"][0, : rank - 1] = tensor_map.strides
    return m.tobytes()
