"""Algorithm "standard" beyond the laws that hold for all, and cuBLAS without a GPU, which layers
use too."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tracemalloc
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cufa
from cufa import standard
from cufa.arrays import Arrays, sign
from cufa.bounds import exact
from cufa.gpu import cublas
from cufa.problem import make_problem
from cufa.testing import FLOATS, Case, Memory, assert_within_rounding, cases, numpy_dtype, to_numpy

#: library_types.h, cudaDataType, and cublas_api.h, cublasComputeType_t.
TYPES = {2: "float16", 14: "bfloat16", 0: "float32", 1: "float64"}
COMPUTE = {68: "float32", 70: "float64"}


class HostCuBlas(cublas.CuPy):
    """What runs on a card, over NumPy arrays: `calls` are those that cuBLAS would get, `mode` is
    that of its products."""

    def __init__(self, arch: int = 90, mode: int = 0) -> None:
        super().__init__(np, self, lambda: 0)
        self.arch, self.mode, self.calls = arch, mode, []

    def gemmStridedBatchedEx(self, *call):
        self.calls.append(call)
        gemm_strided_batched(*call)

    def getMathMode(self, handle):
        return self.mode

    def setMathMode(self, handle, mode):
        self.mode = mode

    def free_bytes(self):
        return 1 << 40

    def _address(self, x):
        return x.ctypes.data

    def _arch(self):
        return self.arch


def gemm_strided_batched(*call):
    """cublasGemmStridedBatchedEx on host memory, as its manual has it: column-major."""
    _, op_a, op_b, m, n, k, alpha, a, a_type, lda, stride_a = call[:11]
    b, b_type, ldb, stride_b, beta, c, c_type, ldc, stride_c, batch, compute, _ = call[11:]
    wide = np.dtype(COMPUTE[compute])
    assert TYPES[c_type] == wide
    assert a_type == b_type
    assert lda >= (k if op_a else m)
    assert ldb >= (n if op_b else k)
    assert ldc >= m
    assert min(stride_a, stride_b, stride_c) >= 0
    assert all(0 < n < 1 << 31 for n in (m, n, k, lda, ldb, ldc, batch))
    a = columns(a, a_type, (batch, k, m) if op_a else (batch, m, k), lda, stride_a)
    b = columns(b, b_type, (batch, n, k) if op_b else (batch, k, n), ldb, stride_b)
    c = columns(c, c_type, (batch, m, n), ldc, stride_c)
    a, b = (x.swapaxes(1, 2) if op else x for x, op in ((a, op_a), (b, op_b)))
    alpha, beta = (columns(p, c_type, (1, 1, 1), 1, 1)[0, 0, 0] for p in (alpha, beta))
    assert (alpha, beta) == (1, 0)
    with np.errstate(all="ignore"):
        c[...] = a.astype(wide) @ b.astype(wide)


def columns(address, kind, shape, ld, stride):
    """The column-major matrices at an address."""
    dtype = numpy_dtype(TYPES[kind])
    steps = (stride * dtype.itemsize, dtype.itemsize, ld * dtype.itemsize)
    size = 1 + sum(step * (n - 1) for step, n in zip((stride, 1, ld), shape, strict=True))
    memory = (ctypes.c_byte * (size * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory, 0, steps)


def call(case: Case, out=None):
    """A case as its arrays and its problem."""
    options = case.options(np)
    named = {n: options.get(n) for n in ("mask", "bias", "alibi_slopes", "sink")}
    arrays = Arrays(*case.arrays(np), **named, out=out)
    rest = (options[n] for n in ("causal", "window", "softcap", "scale", "layout"))
    dropout = case.dropout_p, options.get("dropout_seed")
    return arrays, make_problem(sign(arrays, *rest, True, "standard", *dropout))


def run(library, case: Case, out=None):
    """Algorithm "standard" on a library."""
    arrays, problem = call(case, out)
    seed = case.options(np).get("dropout_seed")
    return standard.run(library, problem, arrays, case.layout, seed)


@given(case=cases(dropout_p=st.sampled_from([0.0, 0.0, 0.3, 0.9])), arch=st.sampled_from([70, 90]))
def test_products_by_cublas_give_the_formula(case, arch):
    assert_within_rounding(run(HostCuBlas(arch), case), case.exact())


BATCH, KV_HEADS, GROUP = 3, 2, 4
GROUPED = Case(batch=BATCH, kv_heads=KV_HEADS, group=GROUP, dtype="float16")
SHARED = Memory(step=(1, 0, 1, 1))


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        pytest.param(replace(GROUPED, group=1), 1, id="one head for each"),
        pytest.param(GROUPED, 1, id="grouped heads are more rows"),
        pytest.param(replace(GROUPED, kv_heads=1), 1, id="one key/value head for all"),
        pytest.param(replace(GROUPED, k_memory=SHARED, v_memory=SHARED), 1, id="repeated heads"),
        pytest.param(replace(GROUPED, group=1, layout="bshd"), KV_HEADS, id="heads side by side"),
        pytest.param(
            replace(GROUPED, layout="bshd"), BATCH * KV_HEADS, id="grouped heads side by side"
        ),
    ],
)
def test_a_product_is_as_few_launches_as_the_strides_allow(case, launches):
    if case.layout == "bshd":
        order = Memory(order=(0, 2, 1, 3))
        case = replace(case, q_memory=order, k_memory=order, v_memory=order)
    library = HostCuBlas()
    q, k, _ = (placed.array for placed in case.placed(np))
    q = q.reshape(case.batch, case.kv_heads, case.group, *q.shape[2:])
    product = library.product(q, k[:, :, None].swapaxes(-1, -2))
    assert len(library.calls) == launches
    wide = (a.astype("float32") for a in (q, k[:, :, None].swapaxes(-1, -2)))
    np.testing.assert_allclose(product, np.matmul(*wide), rtol=1e-4, atol=1e-4)


@given(case=cases(dtypes=["float16", "bfloat16"], k_memory=Memory(), q_memory=Memory()))
def test_contiguous_keys_are_read_where_they_lie(case):
    library, (q, k, _) = HostCuBlas(), (placed.array for placed in case.placed(np))
    q = q.reshape(case.batch, case.kv_heads, case.group, *q.shape[2:])
    library.product(q, k[:, :, None].swapaxes(-1, -2))
    begin = k.ctypes.data
    assert all(begin <= call[7] < begin + k.nbytes for call in library.calls)


class Watched:
    """A matrix whose product is the mode that cuBLAS has meanwhile, or an error."""

    dtype = np.dtype("float16")
    shape = (2, 2)

    def __init__(self, library, fails=False):
        self.library, self.fails = library, fails

    def __len__(self):
        return self.shape[0]

    def __matmul__(self, other):
        if self.fails:
            raise MemoryError
        return self.library.mode


#: cublas_api.h, cublasMath_t: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, which is a flag.
SUMS_ARE_NOT_ROUNDED = 16


@pytest.mark.parametrize("mode", [0, 3, SUMS_ARE_NOT_ROUNDED])
def test_cublas_rounds_no_sum_of_a_layer_on_the_way_and_those_of_others_as_it_did(mode):
    library = HostCuBlas(mode=mode)
    a, bad = Watched(library), Watched(library, fails=True)
    assert library.matmul(a, a) == mode | SUMS_ARE_NOT_ROUNDED
    assert library.mode == mode
    with pytest.raises(MemoryError):
        library.matmul(bad, bad)
    assert library.mode == mode


@pytest.mark.parametrize(
    ("dtype", "arch", "rows"),
    [
        *((dtype, arch, 1) for dtype in FLOATS for arch in (70, 90)),
        ("bfloat16", 70, 3),
    ],
)
def test_what_cupy_does_not_multiply_as_wanted_is_cublas_s_to_multiply(dtype, arch, rows):
    """A row and a column, of which CuPy would round each term: 300 * 300 is no float16. And
    bfloat16 where cuBLAS has none."""
    library, dtype = HostCuBlas(arch), numpy_dtype(dtype)
    a = np.tile(np.array([300, 300, 1], dtype), (rows, 1))
    b = np.tile(np.array([300, -300, 7], dtype), (rows, 1)).T
    product = library.matmul(a, b)
    assert (len(library.calls), product.dtype, product.shape) == (1, dtype, (rows, rows))
    assert (product == 7).all()


def test_without_cublas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
    cublas.load.cache_clear()
    with pytest.raises(cufa.BuildError, match=r"nvidia-cublas .*nvidia-cublas-cu12 .*\"fa2\""):
        cublas.load()


class Full(HostCuBlas):
    """A machine whose memory is nearly full."""

    def __init__(self, free, refuses=False):
        super().__init__()
        self.free, self.refuses = free, refuses

    def free_bytes(self):
        return self.free

    def place(self):
        return "the moon"

    def product(self, a, b):
        if self.refuses:
            raise MemoryError("no room")
        return super().product(a, b)


#: 3 x 8 x 16 x 16 scores of 4 bytes, and of 2 for weights in float16.
NEEDED = 3 * 8 * 16 * 16 * 6


def test_scores_that_just_fit_are_computed():
    assert_within_rounding(run(Full(NEEDED), GROUPED), GROUPED.exact())


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        pytest.param(Full(NEEDED - 1), rf"{NEEDED - 1} bytes\) are free on the moon", id="before"),
        pytest.param(
            Full(None, refuses=True), r"an allocation failed \(no room\)", id="on the way"
        ),
    ],
)
def test_scores_that_do_not_fit_are_refused_and_nothing_is_written(library, reason):
    out = np.full((3, 8, 16, 64), 7, "float16")
    said = rf"scores of shape \(3, 8, 16, 16\).*{NEEDED} bytes.*{reason}.*\"fa2\" holds none"
    with pytest.raises(cufa.OutOfMemoryError, match=said):
        run(library, GROUPED, out)
    assert (out == 7).all()


def test_a_machine_says_how_much_it_has():
    assert (1 << 20) < standard.NUMPY.free_bytes() < (1 << 50)


def test_attention_refuses_what_no_machine_holds(xp):
    q = xp.broadcast_to(xp.zeros((), "float32"), (64, 1 << 24, 64))
    with pytest.raises(MemoryError, match=r'algorithm="standard" holds scores .* are free on '):
        cufa.attention(q, q, q, algorithm="standard")


@given(
    case=cases(
        features=["causal", "mask", "bias", "alibi", "softcap", "sink"],
        rank=4,
        kv_heads=4,
        group=2,
        batch=2,
        seqlen_q=st.integers(150, 250),
        seqlen_k=st.integers(150, 250),
        head_dim=8,
        head_dim_v=8,
        extra_dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    )
)
def test_the_bytes_named_are_those_taken(case):
    arrays, problem = call(case)
    needed = standard.score_bytes(problem)
    tracemalloc.start()
    try:
        standard.run(standard.NUMPY, problem, arrays, case.layout)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    scores = case.batch * case.heads * case.seqlen_q * case.seqlen_k
    copies = 8 * 16 * case.batch * case.heads * (case.seqlen_q + case.seqlen_k)
    by_position = 24 * case.seqlen_q * case.seqlen_k
    weights_in_16_bits = 2 * scores if case.dtype in ("float16", "bfloat16") else 0
    # NumPy does without these.
    assert needed - weights_in_16_bits <= peak <= needed + by_position + 2 * copies


@pytest.mark.gpu
def test_float32_is_never_tf32(cupy):
    code = """
import cupy, cufa
from cufa.bounds import exact
from cufa.testing import assert_within_rounding
q, k, v = cupy.random.default_rng(0).standard_normal((3, 1, 2, 256, 128), dtype="float32")
result = cufa.attention(q, k, v, algorithm="standard", return_lse=True)
assert_within_rounding(result, exact(q.get(), k.get(), v.get()))
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "CUPY_TF32": "1"}, check=True)


@pytest.mark.gpu
def test_the_pools_limit_counts(cupy):
    pool = cupy.get_default_memory_pool()
    before = pool.get_limit()
    pool.free_all_blocks()
    seqlen = math.isqrt((pool.free_bytes() + (64 << 20)) // 64)  # 16 heads of 4 bytes a score
    q = cupy.zeros((16, seqlen, 64), "float16")
    try:
        pool.set_limit(size=pool.total_bytes() + (32 << 20))
        with pytest.raises(cufa.OutOfMemoryError, match=r"are free on GPU 0; .*fa2"):
            cufa.attention(q, q, q, algorithm="standard")
        few = q[:, :100]
        result = cufa.attention(few, few, few, algorithm="standard", return_lse=True)
    finally:
        pool.set_limit(size=before)
    assert_within_rounding(result, exact(*3 * [to_numpy(few)]))
