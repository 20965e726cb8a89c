"""Two libraries on one GPU never read too early and never write too soon, whatever their streams.

Each test makes the stream that must be waited for busy, so that a wait that is missing shows.
Here: what has a protocol and no more, Numba, cuda.core; test_interop_gpu_frameworks.py has the
others.
"""

from __future__ import annotations

import sys
import time
import weakref

import numpy as np
import pytest
from foreign import InterfaceOnly, Lender, assert_same_bits, make_library, pointer
from streams import SHAPE, normal

import cufa
from cufa import ArgumentError, interop
from cufa.testing import FLOATS

pytestmark = pytest.mark.gpu


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
        busy(2)  # longer than a call takes on a card that is busy otherwise too
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
