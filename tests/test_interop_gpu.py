"""Two libraries on one GPU never read too early and never write too soon, whatever their streams.

Each test makes the stream that must be waited for busy, so that a wait that is missing shows.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref

import numpy as np
import pytest
from foreign import InterfaceOnly, Lender, assert_same_bits, make_library, pointer

import cufa
from cufa import ArgumentError, interop
from cufa.testing import FLOATS, numpy_dtype

pytestmark = pytest.mark.gpu

SHAPE = (2, 4, 200, 64)
SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""
BUSY_CYCLES = 200_000_000  # a tenth of a second on any card


@pytest.fixture
def busy(cupy):
    """Puts work of a tenth of a second into CuPy's current stream."""
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    return lambda: spin((1,), (1,), (np.int64(BUSY_CYCLES),))


@pytest.fixture
def streams(cupy):
    """CuPy's, which cufa works in, and another library's; neither waits for the default stream."""
    ours, theirs = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with ours:
        yield ours, theirs
    cupy.cuda.Device().synchronize()


@pytest.fixture
def qkv(cupy):
    return normal(cupy, 3, *SHAPE)


@pytest.fixture
def want(cupy, qkv):
    """The right answer; the kernel is compiled, so that compiling hides no race."""
    out = cufa.attention(*qkv)
    cupy.cuda.Device().synchronize()
    return out.get()


def normal(cupy, *shape, dtype="float16"):
    a = cupy.asarray(np.random.default_rng().standard_normal(shape), numpy_dtype(dtype))
    cupy.cuda.Device().synchronize()
    return a


# ---------------------------------------------------------------- the CUDA array interface


@pytest.mark.parametrize("default", [False, True])
def test_an_input_is_read_after_its_stream_has_written_it(cupy, busy, streams, qkv, want, default):
    theirs = cupy.cuda.Stream.null if default else streams[1]
    q, k, v = qkv
    late = cupy.full_like(q, cupy.nan)
    cupy.cuda.Device().synchronize()
    with theirs:
        busy()
        late[...] = q
    out = cufa.attention(InterfaceOnly(late, None if default else theirs.ptr), k, v)
    assert type(out) is cupy.ndarray
    assert_same_bits(out.get(), want)


def test_an_input_may_be_overwritten_after_the_call(cupy, busy, streams, qkv, want):
    theirs = streams[1]
    busy()
    out = cufa.attention(*(InterfaceOnly(a, theirs.ptr) for a in qkv))
    with theirs:
        qkv.fill(cupy.nan)
    assert_same_bits(out.get(), want)


def test_out_is_read_after_it_is_written(cupy, busy, streams, qkv, want):
    theirs = streams[1]
    out, copied = (cupy.full(SHAPE, cupy.nan, "float16") for _ in range(2))
    cupy.cuda.Device().synchronize()
    busy()
    lent = InterfaceOnly(out, theirs.ptr)
    assert cufa.attention(*qkv, out=lent) is lent
    with theirs:
        copied[...] = out
        assert_same_bits(copied.get(), want)


def test_the_call_does_not_wait_for_either_stream(cupy, busy, streams, qkv, want):
    theirs = streams[1]
    with theirs:
        busy()
        done = theirs.record()
    cufa.attention(*(InterfaceOnly(a, theirs.ptr) for a in qkv))
    assert not done.done, "the call came back only after the lender's work had finished"


def test_nothing_is_copied_through_the_interface(cupy, qkv):
    def same_memory(q):
        assert (pointer(q), q.dtype, q.strides) == (pointer(a), a.dtype, a.strides)
        return q

    a = qkv[0][:, ::2, ::-1]
    interop.lend(same_memory, {"q": InterfaceOnly(a)})


def test_an_interface_that_is_read_only_is_no_out(qkv):
    out = InterfaceOnly(qkv[0].copy(), read_only=True)
    with pytest.raises(ArgumentError, match="out is read-only"):
        cufa.attention(*qkv, out=out)


def test_a_call_can_be_captured_into_a_graph(cupy, streams, qkv, want):
    ours = streams[0]
    out = cupy.full(SHAPE, cupy.nan, "float16")
    lent = [InterfaceOnly(a, ours.ptr) for a in (*qkv, out)]
    cufa.attention(*lent[:3], out=lent[3])
    out.fill(cupy.nan)
    ours.begin_capture()
    cufa.attention(*lent[:3], out=lent[3])
    graph = ours.end_capture()
    assert cupy.isnan(out).all()
    graph.launch(ours)
    assert_same_bits(out.get(), want)


# ---------------------------------------------------------------- DLPack, of whatever library


@pytest.mark.parametrize("dtype", FLOATS)
def test_device_arrays_pass_through_dlpack_in_every_dtype(cupy, dtype):
    q, k, v = normal(cupy, 3, *SHAPE, dtype=dtype)
    out = cufa.attention(Lender(q), Lender(k), Lender(v))
    assert type(out) is cupy.ndarray
    assert_same_bits(out, cufa.attention(q, k, v))


def test_an_input_is_held_until_the_kernel_has_ended(cupy, busy, streams, qkv, want):
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    memory = cupy.cuda.UnownedMemory(qkv.data.ptr, qkv[0].nbytes, owner)
    q = Lender(cupy.ndarray(SHAPE, qkv.dtype, cupy.cuda.MemoryPointer(memory, 0)))
    busy()
    out = cufa.attention(q, qkv[1], qkv[2])
    ended = streams[0].record()
    del q, memory, owner
    held, early = gone() is not None, not ended.done
    assert early, "the kernel ended before the test could look"
    assert held
    assert_same_bits(out.get(), want)
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None


def test_a_result_is_not_used_again_while_it_is_read(cupy, busy, streams, qkv, want, monkeypatch):
    theirs = streams[1]
    library = make_library(cupy)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    importing = library.from_dlpack

    def in_their_stream(a):
        with theirs:
            return importing(a)

    monkeypatch.setattr(library, "from_dlpack", in_their_stream)
    copied = cupy.full(SHAPE, cupy.nan, "float16")
    out = cufa.attention(*map(library.Array, qkv))
    assert type(out) is library.Array
    elsewhere = cupy.cuda.Stream(non_blocking=True)  # not the stream that the importer named
    elsewhere.wait_event(theirs.record())
    with elsewhere:
        busy()
        copied[...] = out.array
    del out
    overwriting = [cupy.full(SHAPE, cupy.nan, "float16") for _ in range(4)]
    elsewhere.synchronize()
    del overwriting
    assert_same_bits(copied.get(), want)


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
    torch.cuda._sleep(BUSY_CYCLES)


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


# ---------------------------------------------------------------- Numba, cuda.core


@pytest.mark.parametrize("own_stream", [False, True])
def test_numba_is_waited_for(cupy, busy, streams, qkv, want, own_stream):
    cuda = pytest.importorskip("numba.cuda")
    theirs = cuda.external_stream(streams[1].ptr) if own_stream else 0
    late = cuda.device_array(SHAPE, np.float16, stream=theirs)
    cupy.cuda.Device().synchronize()
    with streams[1] if own_stream else cupy.cuda.Stream.null:
        busy()
    late.copy_to_device(cuda.as_cuda_array(qkv[0], sync=False), stream=theirs)
    assert_same_bits(cufa.attention(late, qkv[1], qkv[2]).get(), want)


def test_a_buffer_of_cuda_core_with_a_shape_is_an_array(cupy, qkv, want):
    core = pytest.importorskip("cuda.core")
    from cuda.core.utils import StridedMemoryView

    device = core.Device(qkv.device.id)
    device.set_current()
    views = []
    for a in qkv:
        buffer = device.allocate(a.nbytes, stream=device.default_stream)
        device.sync()
        cupy.from_dlpack(buffer).view(a.dtype).reshape(SHAPE)[...] = a
        views.append(StridedMemoryView.from_buffer(buffer, shape=SHAPE, dtype=a.dtype))
    out = cufa.attention(*views)
    assert type(out) is cupy.ndarray
    assert_same_bits(out, want)
