"""Tensor maps: what bulk tensor copies (TMA, sm_90 and later) know of an array in global memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cufa.errors import BuildError
from cufa.options import ITEMSIZE
from cufa.problem import Operand

#: Bytes of a map, and what its address, wherever it is passed, is a multiple of.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
#: Strides, in bytes, are below this.
STRIDE_LIMIT = 1 << 40
#: What the array's address and every stride are multiples of, in bytes.
_ALIGNMENT = 16
#: Elements of a box along each axis, at most.
_MAX_BOX = 256
#: Bytes of a row of shared memory within which 16-byte chunks are permuted; a box is as wide.
_SWIZZLE_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """A strided array as bulk tensor copies see it, and the box that one of them copies.

    Parameters
    ----------
    dtype : str
    dims : tuple of int
        In elements; dimension 0 is the contiguous one.
    strides : tuple of int
        In bytes, of dimensions 1 and up: positive multiples of 16, below 2**40.
    box : tuple of int
        In elements, at most 256 along each dimension. What of it lies outside the array is zeros.
    swizzle_bytes : {0, 64, 128}

    Raises
    ------
    ValueError
        The driver would not take it.

    Notes
    -----
    Source: CUDA driver API, cuTensorMapEncodeTiled.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    def __post_init__(self) -> None:
        rules = {
            "dims of at least 1": min(self.dims) >= 1,
            f"strides that are multiples of {_ALIGNMENT}": not any(
                stride % _ALIGNMENT for stride in self.strides
            ),
            "strides from 1 to below 2**40": all(0 < s < STRIDE_LIMIT for s in self.strides),
            f"a box of 1 to {_MAX_BOX} elements": all(1 <= n <= _MAX_BOX for n in self.box),
            "as many axes everywhere": len(self.dims) == len(self.strides) + 1 == len(self.box),
        }
        for rule, kept in rules.items():
            if not kept:
                raise ValueError(f"{self}: a tensor map needs {rule}")

    @classmethod
    def of_rows(cls, a: Operand, rows: int) -> TensorMap:
        """For an operand of attention with adjacent elements in each of its rows.

        Dimensions are (head_dim, seqlen, heads, batch); a box has `rows` rows of 128 bytes, and is
        swizzled by 128 bytes.
        """
        itemsize = ITEMSIZE[a.dtype]
        whole_row = -(-a.shape[3] * itemsize // _ALIGNMENT) * _ALIGNMENT
        strides = (
            stride * itemsize if n > 1 else whole_row  # of one element it may be anything legal
            for stride, n in zip(a.strides[2::-1], a.shape[2::-1], strict=True)
        )
        box = (_SWIZZLE_BYTES // itemsize, rows, 1, 1)
        return cls(a.dtype, a.shape[::-1], tuple(strides), box, _SWIZZLE_BYTES)

    def encoded(self, address: int) -> bytes:
        """The `MAP_BYTES` bytes that the driver makes of it, for an array at an address.

        Raises
        ------
        BuildError
            `cuda.bindings` is missing, or the driver refuses.
        ValueError
            The address is no multiple of 16.
        """
        if address % _ALIGNMENT:
            raise ValueError(f"a tensor map needs an address that is a multiple of {_ALIGNMENT}")
        encode, facts, layout = self._arguments
        status, made = encode(*facts, address, *layout)
        if status:
            raise BuildError(f"the driver makes no tensor map of {self} at {address:#x}: {status}")
        return ctypes.string_at(made.getPtr(), MAP_BYTES)

    @cached_property
    def _arguments(self) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """The driver's function and what it takes before the address and after it.

        Kept, since to make them takes longer than the call.
        """
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BuildError(
                f"tensor maps are made by cuda.bindings, and {error}; install cufa with the extra "
                "cuda12 or cuda13, whichever your CuPy is for"
            ) from error
        swizzle = f"{self.swizzle_bytes}B" if self.swizzle_bytes else "NONE"
        data_type = f"CU_TENSOR_MAP_DATA_TYPE_{self.dtype.upper()}"
        layout = (
            [driver.cuuint64_t(n) for n in self.dims],
            [driver.cuuint64_t(n) for n in self.strides],
            [driver.cuuint32_t(n) for n in self.box],
            [driver.cuuint32_t(1)] * len(self.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        facts = getattr(driver.CUtensorMapDataType, data_type), len(self.dims)
        return driver.cuTensorMapEncodeTiled, facts, layout
