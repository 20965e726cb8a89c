"""PyTorch and JAX on one GPU with cufa: as test_interop_gpu.py has it, also when they take memory
back."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from foreign import assert_same_bits, pointer
from streams import BUSY_CYCLES, SHAPE

import cufa
from cufa import interop
from cufa.testing import FLOATS

pytestmark = pytest.mark.gpu


# ---------------------------------------------------------------- PyTorch


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.fixture
def tensors(torch, cupy, qkv):
    """q, k and v in PyTorch's memory."""
    tensors = [torch.from_dlpack(a).clone() for a in qkv]
    torch.cuda.synchronize()
    return tensors


def torch_busy(torch):
    torch.cuda._sleep(BUSY_CYCLES // 10)


def test_torch_is_waited_for_and_waits(torch, streams, tensors, want):
    q, k, v = tensors
    late = torch.full_like(q, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch_busy(torch)
        late.copy_(q)
        out = cufa.attention(late, k, v)
        assert isinstance(out, torch.Tensor)
        assert_same_bits(out.cpu().numpy(), want)


def test_torch_may_reuse_and_overwrite_its_inputs_at_once(torch, busy, streams, tensors, want):
    with torch.cuda.stream(torch.cuda.Stream()):
        q, k, v = (a.clone() for a in tensors)
        busy()
        out = cufa.attention(q, k, v)
        q.fill_(torch.nan)
        places = {k.data_ptr(), v.data_ptr()}
        del k, v
        overwriting = [torch.full_like(q, torch.nan) for _ in range(4)]
        assert places & {a.data_ptr() for a in overwriting}, "the memory was not used again"
        assert_same_bits(out.cpu().numpy(), want)


def test_torch_waits_though_q_is_not_its_own(torch, busy, streams, qkv, tensors, want):
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        out = cufa.attention(qkv[0], tensors[1], tensors[2])
        for a in tensors:
            a.fill_(torch.nan)
    assert_same_bits(out.get(), want)


def test_torch_reads_out_after_it_is_written(torch, busy, streams, qkv, tensors, want):
    with torch.cuda.stream(torch.cuda.Stream()):
        out = torch.full_like(tensors[0], torch.nan)
        torch.cuda.synchronize()
        busy()
        assert cufa.attention(*qkv, out=out) is out
        assert_same_bits(out.cpu().numpy(), want)


def test_torch_may_drop_a_result_that_it_still_reads(torch, cupy, streams, tensors, want):
    with torch.cuda.stream(torch.cuda.Stream()):
        copied = torch.full_like(tensors[0], torch.nan)
        out = cufa.attention(*tensors)
        torch_busy(torch)
        copied.copy_(out)
        place = pointer(out)
        del out
        overwriting = [cupy.full(SHAPE, cupy.nan, "float16") for _ in range(4)]
        assert place in map(pointer, overwriting), "the memory was not used again"
        assert_same_bits(copied.cpu().numpy(), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_tensors_pass_in_every_dtype_without_copies(torch, cupy, dtype):
    q, k, v = (torch.randn(SHAPE, device="cuda").to(getattr(torch, dtype)) for _ in range(3))
    mask = torch.rand(SHAPE[2], SHAPE[2], device="cuda") > 0.5
    seen = []

    def spy(q, k, v, mask):
        seen.append(cufa.attention(q, k, v, mask=mask))
        assert [pointer(a) for a in (q, k, v, mask)] == places
        return seen[0]

    places = [a.data_ptr() for a in (q, k, v, mask)]
    out = interop.lend(spy, {"q": q, "k": k, "v": v, "mask": mask})
    assert (out.dtype, out.data_ptr()) == (q.dtype, pointer(seen[0]))


def test_a_call_on_tensors_can_be_captured_by_torch(torch, cupy, tensors, want):
    out = torch.full_like(tensors[0], torch.nan)
    stream = torch.cuda.Stream()
    with (
        torch.cuda.stream(stream),
        cupy.cuda.Stream.from_external(stream),
    ):
        cufa.attention(*tensors, out=out)
        out.fill_(torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            cufa.attention(*tensors, out=out)
        assert out.isnan().all()
        graph.replay()
        assert_same_bits(out.cpu().numpy(), want)


# ---------------------------------------------------------------- JAX


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return jax


@pytest.fixture
def jax_qkv(jax, qkv):
    """q, k and v in JAX's memory."""
    arrays = [jax.device_put(a.get(), jax.devices("cuda")[0]) for a in qkv]
    return jax.block_until_ready(arrays)


@pytest.fixture
def slowly(jax):
    """A jitted copy that takes some tenths of a second; compiled."""

    @jax.jit
    def copy(a):
        big = jax.numpy.ones((8192, 8192), "float32") * (1 + 0 * a[0, 0, 0, 0])
        big = jax.lax.fori_loop(0, 20, lambda _, x: x @ x * (1 / 8192), big)
        return a + 0 * big[0, 0].astype(a.dtype)

    jax.block_until_ready(copy(jax.numpy.zeros(SHAPE, "float16")))
    return copy


def test_jax_is_waited_for_and_waits(jax, streams, jax_qkv, slowly, want):
    late = slowly(jax_qkv[0])
    out = cufa.attention(late, jax_qkv[1], jax_qkv[2])
    assert isinstance(out, jax.Array)
    assert_same_bits(np.asarray(out + 0), want)


def test_jax_reads_the_result_after_it_is_written(jax, busy, streams, jax_qkv, want):
    double = jax.jit(lambda a: a * 2)
    jax.block_until_ready(double(jax_qkv[0]))
    busy()
    assert_same_bits(np.asarray(double(cufa.attention(*jax_qkv))), want * 2)


def test_jax_may_drop_its_inputs_at_once(jax, busy, streams, jax_qkv, want):
    fill = jax.jit(lambda n: jax.numpy.full(SHAPE, jax.numpy.nan, "float16") + n)
    jax.block_until_ready(fill(0))
    busy()
    out = cufa.attention(*jax_qkv)
    jax_qkv.clear()
    overwriting = [fill(n) for n in range(16)]
    jax.block_until_ready(overwriting)
    assert_same_bits(np.asarray(out), want)


def test_jax_may_drop_a_result_that_it_still_reads(jax, cupy, streams, jax_qkv, slowly, want):
    out = cufa.attention(*jax_qkv)
    copied = slowly(out)
    del out
    overwriting = [cupy.full(SHAPE, cupy.nan, "float16") for _ in range(8)]
    streams[0].synchronize()
    del overwriting
    assert_same_bits(np.asarray(copied), want)


def test_an_input_that_jax_donates_at_once_is_not_overwritten(jax, busy, streams, jax_qkv, want):
    spoil = jax.jit(lambda a: a * jax.numpy.nan, donate_argnums=0)
    jax.block_until_ready(spoil(jax_qkv[0] + 0))
    busy()
    out = cufa.attention(*jax_qkv)
    with contextlib.suppress(RuntimeError, ValueError):  # JAX may refuse while the input is held
        jax.block_until_ready(spoil(jax_qkv[0]))
    assert_same_bits(np.asarray(out), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_pass_in_every_dtype_without_copies(jax, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, SHAPE, dtype) for key in keys)
    seen = []

    def spy(q, k, v):
        seen.append(cufa.attention(q, k, v))
        assert [pointer(a) for a in (q, k, v)] == places
        return seen[0]

    places = [pointer(a) for a in (q, k, v)]
    out = interop.lend(spy, {"q": q, "k": k, "v": v})
    assert (out.dtype, pointer(out)) == (q.dtype, pointer(seen[0]))
