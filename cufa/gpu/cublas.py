"""Matrix products by cuBLAS, for algorithm "standard" and for layers on CuPy arrays.

CuPy's own `matmul` rounds the product of 16-bit matrices to 16 bits, repeats a key/value head for
every query head that reads it, and takes TF32 for float32 if CUPY_TF32 says so. The products of
"standard" are called directly: 16-bit matrices on tensor cores with float32 sums and results,
float32 in float32. Those of layers are CuPy's, kept from being rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cufa.errors import BuildError
from cufa.gpu.device import get_device

#: library_types.h, enum cudaDataType.
_TYPE = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
#: cublas_api.h, enum cublasComputeType_t: 32F, which is no TF32 in the handle's default mode; 64F.
_COMPUTE = {"float32": 68, "float64": 70}
_DEFAULT_ALGORITHM = -1
#: cublas_api.h, enum cublasMath_t, a flag: parts of a sum are added up as they were summed. Without
#: it the parts of a long one, of a small result, may be rounded to 16 bits first.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_OP_N, _OP_T = 0, 1
_INT_MAX = (1 << 31) - 1
_ONE = {name: np.ones(1, name) for name in _COMPUTE}
_ZERO = {name: np.zeros(1, name) for name in _COMPUTE}


class CuPy:
    """CuPy arrays on the current device; see `cufa.standard.Library`.

    Parameters
    ----------
    xp : module
        cupy.
    blas : module
        cupy.cuda.cublas: `gemmStridedBatchedEx`, `getMathMode` and `setMathMode`.
    handle : function
        Gives their first argument.
    """

    def __init__(self, xp: Any, blas: Any, handle: Callable[[], int]) -> None:
        self.xp = xp
        self._blas, self._handle = blas, handle

    def matmul(self, a: Any, b: Any) -> Any:
        """``a @ b`` of two matrices of one dtype, rounded to it once, from sums in float32, or
        float64."""
        # CuPy multiplies a row and a column by itself, and rounds each term.
        alone = len(a) == b.shape[1] == 1
        if alone or self._lacks(b.dtype):
            return self.product(a, b).astype(b.dtype, copy=False)
        handle = self._handle()
        mode = self._blas.getMathMode(handle)
        self._blas.setMathMode(handle, mode | _DISALLOW_REDUCED_PRECISION_REDUCTION)
        try:
            return a @ b
        finally:
            self._blas.setMathMode(handle, mode)

    def product(self, a: Any, b: Any) -> Any:
        """``a @ b``, with `a` rounded to the dtype of `b`; see `cufa.standard.Library`."""
        wide = "float64" if b.dtype == np.float64 else "float32"
        if self._lacks(b.dtype):
            b = b.astype(wide)
        a = a.astype(b.dtype, copy=False)
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        c = self.xp.empty((*lead, a.shape[-2], b.shape[-1]), wide)
        if not a.shape[-1]:
            c.fill(0)
        elif c.size:
            one, zero, kind = _ONE[wide].ctypes.data, _ZERO[wide].ctypes.data, _TYPE[b.dtype.name]
            a, b = _readable(self.xp, a), _readable(self.xp, b)
            at_a, at_b, at_c = (self._address(x) for x in (a, b, c))
            for call in gemms(a, b, c):
                # Row-major matrices are column-major transposed: C^T = B^T A^T.
                self._blas.gemmStridedBatchedEx(
                    *(self._handle(), call.op_b, call.op_a, call.n, call.m, call.k),
                    *(one, at_b + call.b * b.itemsize, kind, call.ldb, call.stride_b),
                    *(at_a + call.a * a.itemsize, kind, call.lda, call.stride_a),
                    *(zero, at_c + call.c * c.itemsize, _TYPE[wide], call.ldc, call.stride_c),
                    *(call.batch, _COMPUTE[wide], _DEFAULT_ALGORITHM),
                )
        return c

    def free_bytes(self) -> int | None:
        """What the device and CuPy's pool have left, within the pool's limit; else unknown."""
        pool = self.xp.get_default_memory_pool()
        if self.xp.cuda.get_allocator() != pool.malloc:  # RMM's, say, which has a pool of its own
            return None
        free = int(self.xp.cuda.runtime.memGetInfo()[0] + pool.free_bytes())
        limit = pool.get_limit()
        return min(free, limit - pool.used_bytes()) if limit else free

    def place(self) -> str:
        return f"GPU {self.xp.cuda.runtime.getDevice()}"

    def _lacks(self, dtype: Any) -> bool:
        """Whether cuBLAS has no products of this dtype on this device."""
        return dtype.name == "bfloat16" and self._arch() < 80

    def _address(self, x: Any) -> int:
        return int(x.data.ptr)

    def _arch(self) -> int:
        return get_device(self.xp.cuda.runtime.getDevice()).arch


@lru_cache
def load() -> CuPy:
    """CuPy with cuBLAS.

    Raises
    ------
    BuildError
        cuBLAS is not installed.
    """
    import cupy

    try:
        from cupy.cuda import cublas
    except ImportError as error:
        reason = str(error).partition("\n")[0]  # CuPy lists every folder that it has looked into
        raise BuildError(
            f'algorithm="standard" and layers multiply matrices by cuBLAS, and {reason}; '
            "install nvidia-cublas for CUDA 13 or nvidia-cublas-cu12 for CUDA 12; "
            'algorithm="fa2" does without'
        ) from error
    return CuPy(cupy, cublas, cupy.cuda.device.get_cublas_handle)


class Gemm(NamedTuple):
    """One call: `batch` products ``a @ b`` of row-major matrices (m, k) and (k, n).

    `a`, `b` and `c` are where the first ones begin, `ld` how far apart their rows are (columns, if
    `op` is T), and strides lead from one product to the next, all in elements.
    """

    m: int
    n: int
    k: int
    a: int
    op_a: int
    lda: int
    stride_a: int
    b: int
    op_b: int
    ldb: int
    stride_b: int
    c: int
    ldc: int
    stride_c: int
    batch: int


class _Axis(NamedTuple):
    """A leading axis: its length, and the strides of a, b and c along it, 0 where one repeats."""

    size: int
    strides: tuple[int, int, int]


def gemms(a: Any, b: Any, c: Any) -> Iterator[Gemm]:
    """The calls that together compute ``c = a @ b``: as few as strides allow.

    `a` and `b` are as `_readable` makes them, leading axes of one element repeated; `c` is
    contiguous.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    (op_a, lda), (op_b, ldb) = _storage(a) or (0, 0), _storage(b) or (0, 0)
    steps = zip(*(_steps(x) for x in (a, b, c)), strict=True)
    axes = [_Axis(*axis) for axis in zip(c.shape[:-2], steps, strict=True) if axis[0] > 1]
    # Heads that read the same matrix b, and whose rows in a follow one another, are more rows.
    while axes and op_a == _OP_N and axes[-1].strides == (m * lda, 0, m * n):
        if m * axes[-1].size > _INT_MAX:
            break
        m *= axes.pop().size
    axes = [_Axis(1, (0, 0, 0)), *_merged(axes)]
    batch = max((axis for axis in axes if min(axis.strides) >= 0), key=lambda axis: axis.size)
    outer = [axis for axis in axes if axis is not batch]
    for index in np.ndindex(*(axis.size for axis in outer)):
        at_a, at_b, at_c = (
            sum(i * axis.strides[which] for i, axis in zip(index, outer, strict=True))
            for which in range(3)
        )
        stride_a, stride_b, stride_c = batch.strides
        yield Gemm(
            *(m, n, k),
            *(at_a, op_a, lda, stride_a),
            *(at_b, op_b, ldb, stride_b),
            *(at_c, n, stride_c),
            batch.size,
        )


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Axes of which the outer goes on where the inner ends, in all three arrays, made one."""
    merged: list[_Axis] = []
    for axis in axes:
        if merged and merged[-1].strides == tuple(axis.size * step for step in axis.strides):
            axis = _Axis(merged.pop().size * axis.size, axis.strides)
        merged.append(axis)
    return merged


def _steps(x: Any) -> list[int]:
    """Strides of the leading axes, in elements; 0 along those of one element."""
    shape, strides = x.shape[:-2], x.strides[:-2]
    return [0 if n == 1 else step // x.itemsize for n, step in zip(shape, strides, strict=True)]


def _readable(xp: Any, x: Any) -> Any:
    """`x`, or a contiguous copy if cuBLAS cannot read its matrices where they lie."""
    return xp.ascontiguousarray(x) if _storage(x) is None else x


def _storage(x: Any) -> tuple[int, int] | None:
    """How cuBLAS reads the matrices of `x`: by rows (N) or columns (T), and how far apart."""
    (rows, columns), (down, right) = x.shape[-2:], (step // x.itemsize for step in x.strides[-2:])
    by_rows = _OP_N, columns, right, rows, down
    by_columns = _OP_T, rows, down, columns, right
    for op, length, step, count, apart in (by_rows, by_columns):
        ld = apart if count > 1 else length
        if (length == 1 or step == 1) and length <= ld <= _INT_MAX:
            return op, ld
    return None
