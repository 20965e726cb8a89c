"""Arrays of other libraries mean what NumPy's and CuPy's mean, and are not copied."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from foreign import Lender, assert_same_bits, make_library, pointer
from hypothesis import given

import cufa
from cufa import (
    ArgumentError,
    DeviceError,
    DTypeError,
    UnsupportedError,
    cpu,
    gpu,
    interop,
    numerics,
)
from cufa.testing import FLOATS, cases, numpy_dtype

SHAPE = (2, 4, 70, 64)


@pytest.fixture
def library(xp, monkeypatch):
    """A library that imports DLPack."""
    library = make_library(xp)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return library


@pytest.fixture(scope="session")
def jax():
    return pytest.importorskip("jax")


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


def normal(xp, shape=SHAPE, dtype="float32"):
    return xp.asarray(np.random.default_rng().standard_normal(shape), numpy_dtype(dtype))


def lent(a):
    return Lender(a) if hasattr(a, "__dlpack__") else a


# ------------------------------------------------------------------------------ one meaning


@given(case=cases(max_elements=1 << 20))
def test_an_array_means_the_same_from_any_library(xp, fit, case):
    case = fit(case)
    arrays, options = case.arrays(xp), {"return_lse": True, **case.options(xp)}
    borrowed = cufa.attention(
        *map(lent, arrays), **{name: lent(option) for name, option in options.items()}
    )
    for a, b in zip(borrowed, cufa.attention(*arrays, **options), strict=True):
        assert_same_bits(a, b)


def test_options_may_come_from_another_library_than_q(xp):
    q, k, v = normal(xp), normal(xp), normal(xp)
    mask = normal(xp, (70, 70)) > 0
    want = cufa.attention(q, k, v, mask=mask)
    assert_same_bits(cufa.attention(q, k, v, mask=Lender(mask)), want)
    assert_same_bits(cufa.attention(Lender(q), k, v, mask=mask), want)


def test_the_names_of_flash_attn_take_them_too(xp):
    q, k, v = normal(xp), normal(xp), normal(xp)
    got = cufa.flash_attn_func(Lender(q), Lender(k), Lender(v), causal=True)
    assert_same_bits(got, cufa.attention(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_over_two_sets_of_keys_merge(xp, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    q, k, v = (normal(xp, dtype=dtype) for _ in range(3))
    halves = [
        cufa.attention(q, k[..., part, :], v[..., part, :], return_lse=True)
        for part in (slice(0, 33), slice(33, None))
    ]
    want = cufa.merge(*halves[0], *halves[1])
    for a, b in zip(cufa.merge(*map(lent, (*halves[0], *halves[1]))), want, strict=True):
        assert_same_bits(a, b)


def test_a_report_looks_at_arrays_of_any_library(xp):
    q, k, v = normal(xp), normal(xp), normal(xp)
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    lse[0, 1, 2] = np.nan
    want = numerics.report(q, k, v, out=out, lse=lse, causal=True, rows=9)
    q, k, v, out, lse = map(Lender, (q, k, v, out, lse))
    assert numerics.report(q, k, v, out=out, lse=lse, causal=True, rows=9) == want


def test_a_report_reads_results_that_cannot_be_written(jax):
    q = jax.numpy.ones((1, 2, 20, 64))
    out = cufa.attention(q, q, q)
    assert numerics.report(q, q, q, out=out).within_rounding


# ------------------------------------------------------------------------------ no copies, and back


@pytest.mark.parametrize("dtype", [*FLOATS, "bool"])
def test_nothing_is_copied_on_the_way_in(xp, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    a = normal(xp).astype(dtype)[:, ::2, ::-1]

    def same_memory(q):
        assert type(q) is type(a)
        assert (q.dtype, q.shape, q.strides) == (a.dtype, a.shape, a.strides)
        assert pointer(q) == pointer(a)
        return q

    interop.lend(same_memory, {"q": Lender(a)})


def test_results_are_of_the_library_of_q(xp, library):
    q, k, v = (library.Array(normal(xp)) for _ in range(3))
    out, lse = cufa.attention(q, k, v, return_lse=True)
    want = cufa.attention(q.array, k.array, v.array, return_lse=True)
    assert type(out) is type(lse) is library.Array
    assert_same_bits(out, want[0])
    assert_same_bits(lse, want[1])
    assert type(cufa.attention(q.array, k, v)) is type(q.array)
    assert type(cufa.attention(Lender(q.array), k, v)) is type(q.array)


def test_results_are_not_copied_on_the_way_out(xp, library):
    made = []

    def attention(q):
        made.append(q * 2)
        return made[0]

    assert pointer(interop.lend(attention, {"q": library.Array(normal(xp))})) == pointer(made[0])


def test_out_is_written_where_it_is_and_returned_as_itself(xp, library):
    q, k, v = (library.Array(normal(xp)) for _ in range(3))
    out = library.Array(xp.full(SHAPE, np.nan, "float32"))
    returned, lse = cufa.attention(q, k, v, out=out, return_lse=True)
    assert returned is out
    assert type(lse) is library.Array
    assert_same_bits(out, cufa.attention(q.array, k.array, v.array))


def test_an_input_may_not_be_the_output_under_another_library(xp):
    q = normal(xp)
    with pytest.raises(ArgumentError, match="out shares memory with q"):
        cufa.attention(Lender(q), q, q, out=q)


def test_an_out_that_its_library_calls_read_only_is_refused():
    q, out = normal(np), normal(np)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"out is read-only; pass an array that can be written"):
        cufa.attention(q, q, q, out=Lender(out))


# ------------------------------------------------------------------------------ what is refused


def test_an_array_on_no_device_of_ours_is_refused(xp):
    class OnMetal(Lender):
        def __dlpack_device__(self):
            return 8, 1

    q = normal(xp)
    with pytest.raises(DeviceError, match=r"k is on device 1 of DLPack's type 8; .*CUDA GPU"):
        cufa.attention(q, OnMetal(q), q)


def test_what_a_library_says_against_lending_is_passed_on():
    class Sharded(Lender):
        def __dlpack_device__(self):
            raise BufferError("only for unsharded arrays")

    class Sparse(Lender):
        def __dlpack__(self, **options):
            raise BufferError("only for strided arrays")

    q = normal(np)
    with pytest.raises(DeviceError, match=r"v is a Sharded .*: only for unsharded arrays"):
        cufa.attention(q, q, Sharded(q))
    with pytest.raises(DTypeError, match=r"mask is a Sparse .*: only for strided arrays"):
        cufa.attention(q, q, q, mask=Sparse(q))


def test_arrays_that_want_a_gradient_are_refused():
    class Tensor(Lender):
        requires_grad = True

    q = normal(np)
    with pytest.raises(UnsupportedError, match=r"k requires grad.*pass k\.detach\(\)"):
        cufa.attention(q, Tensor(q), q)


def test_device_arrays_without_cupy_name_what_to_install(monkeypatch):
    class OnGpu(Lender):
        def __dlpack_device__(self):
            return 2, 0

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cufa.gpu.exchange", None)
    monkeypatch.delattr(gpu, "exchange", raising=False)
    q = OnGpu(normal(np))
    with pytest.raises(DeviceError, match=r"CuPy cannot be imported.*cuda12 or cuda13"):
        cufa.attention(q, q, q)


def test_what_is_no_array_beside_a_foreign_one_is_refused_as_ever():
    q = Lender(normal(np))
    with pytest.raises(DTypeError, match=r"k is a list; it must be a NumPy or CuPy array"):
        cufa.attention(q, [1.0], q)
    with pytest.raises(DTypeError, match=r"mask is a MaskedArray; pass a plain array"):
        cufa.attention(q, q, q, mask=np.ma.masked_array([True]))


def test_rules_on_arguments_hold_for_foreign_arrays(xp):
    q = normal(xp)
    with pytest.raises(cufa.ShapeError, match=r"q has head_dim 64 and k has head_dim 32"):
        cufa.attention(Lender(q), Lender(q[..., ::2]), Lender(q))


def test_numpy_arrays_alone_load_nothing_of_this():
    code = (
        "import sys, numpy as np, cufa; a = np.ones((3, 2)); cufa.attention(a, a, a);"
        "sys.exit('cufa.interop' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------------------ JAX, on the CPU


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_gives_and_gets(jax, dtype):
    on_cpu = jax.devices("cpu")[0]
    q, k, v = (jax.device_put(normal(np), on_cpu).astype(dtype) for _ in range(3))
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    want = cufa.attention(*map(np.asarray, (q, k, v)), causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    for a, b in zip((out, lse), want, strict=True):
        assert_same_bits(np.asarray(a), b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_are_copied_neither_in_nor_out(jax, monkeypatch, dtype):
    q = jax.device_put(normal(np), jax.devices("cpu")[0]).astype(dtype)
    seen, run = [], cpu.run

    def spy(call, arrays, seed):
        seen.append((arrays, run(call, arrays, seed)))
        return seen[0][1]

    monkeypatch.setattr(cpu, "run", spy)
    out = cufa.attention(q, q, q)
    [(arrays, computed)] = seen
    assert pointer(arrays.q) == pointer(q)
    assert pointer(out) == pointer(computed)


def test_a_jax_array_is_no_out(jax):
    q = jax.device_put(normal(np), jax.devices("cpu")[0])
    with pytest.raises(ArgumentError, match=r"out is an array of jax\w*, which cannot be written"):
        cufa.attention(q, q, q, out=q)


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_tracer_is_refused_with_the_way_out(jax, transform):
    def loss(q):
        return cufa.attention(q, q, q).sum()

    with pytest.raises(DTypeError, match=r"q is a JAX tracer.*jax\.pure_callback"):
        getattr(jax, transform)(loss)(jax.numpy.ones(SHAPE))


# ------------------------------------------------------------------------------ PyTorch, on the CPU


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_gives_and_gets(torch, dtype):
    wide = [torch.from_numpy(normal(np, dtype="float64")) for _ in range(3)]
    q, k, v = (a.to(getattr(torch, dtype)) for a in wide)
    arrays = [a.double().numpy().astype(numpy_dtype(dtype)) for a in (q, k, v)]
    out = torch.full_like(q, torch.nan)
    assert cufa.attention(q, k, v, out=out) is out
    assert torch.equal(cufa.attention(q, k, v), out)
    assert_same_bits(out.double().numpy().astype(numpy_dtype(dtype)), cufa.attention(*arrays))


def test_a_tensor_that_requires_grad_is_refused(torch):
    q = torch.ones(SHAPE, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"q requires grad.*q\.detach\(\)"):
        cufa.attention(q, q, q)


# ------------------------------------------------------------------------------ others


def test_values_of_onnx_runtime_give_such_values(monkeypatch):
    OrtValue = pytest.importorskip("onnxruntime", "1.27").OrtValue
    q = normal(np)
    value = OrtValue.ortvalue_from_numpy(q)
    seen, run = [], cpu.run

    def spy(call, arrays, seed):
        seen.append((arrays, run(call, arrays, seed)))
        return seen[0][1]

    monkeypatch.setattr(cpu, "run", spy)
    out = cufa.attention(value, value, value)
    [(arrays, computed)] = seen
    assert isinstance(out, OrtValue)
    assert pointer(arrays.q) == pointer(q)
    assert out.data_ptr() == pointer(computed)


def test_a_strided_view_of_cuda_core_is_an_array():
    view = pytest.importorskip("cuda.core.utils").StridedMemoryView
    q = normal(np)
    out = cufa.attention(*[view.from_dlpack(q, stream_ptr=-1)] * 3)
    assert_same_bits(out, cufa.attention(q, q, q))
