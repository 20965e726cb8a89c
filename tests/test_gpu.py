"""What only a GPU can show: streams, graphs, threads, processes, devices, sizes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from streams import check_graph_owns_what_it_needs

import cufa
from cufa.bounds import exact
from cufa.testing import assert_within_rounding

pytestmark = pytest.mark.gpu


def normal(cupy, *shape, dtype="float16", seed=0):
    return cupy.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


@pytest.fixture
def qkv(cupy):
    return normal(cupy, 3, 2, 4, 200, 64)


@pytest.mark.parametrize("algorithm", ["auto", "fa2", "standard"])
def test_a_call_runs_in_the_current_stream(cupy, qkv, algorithm):
    q, k, v = qkv
    want = cufa.attention(q, k, v, algorithm=algorithm)
    stream = cupy.cuda.Stream(non_blocking=True)
    big = cupy.ones((4096, 4096), "float32")
    late = cupy.empty_like(q)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(20):
            big = big @ big * 1e-4  # so long that another stream would be too early
        late[...] = q
        out = cufa.attention(late, k, v, algorithm=algorithm)
        result = out.get()
    np.testing.assert_array_equal(result, want.get())


@pytest.mark.parametrize("algorithm", ["auto", "fa2", "standard"])
def test_a_call_does_not_wait_for_the_gpu(cupy, qkv, algorithm):
    q, k, v = qkv
    cufa.attention(q, k, v, return_lse=True, algorithm=algorithm)
    cupy.cuda.Device().synchronize()
    big = cupy.ones((8192, 8192), "float32")
    big @ big
    cupy.cuda.Device().synchronize()
    done = cupy.cuda.Event()
    for _ in range(10):
        big @ big
    done.record()
    cufa.attention(q, k, v, return_lse=True, algorithm=algorithm)
    assert not done.done, "the call came back only after earlier work had finished"


@pytest.mark.parametrize("mode", ["Relaxed", "Global"])
def test_a_call_can_be_captured_into_a_graph(cupy, qkv, mode):
    """In global mode no memory can be had meanwhile."""
    q, k, v = (a.copy() for a in qkv)
    out = cupy.full_like(q, cupy.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cufa.attention(q, k, v, causal=True, out=out)
        out.fill(cupy.nan)
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        cufa.attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
        assert cupy.isnan(out).all()
        q *= 2
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(out.get(), cufa.attention(q, k, v, causal=True).get())


@pytest.mark.parametrize("mode", ["Global", "Relaxed"])
@pytest.mark.parametrize("algorithm", ["auto", "fa1"])
def test_a_graph_owns_what_memory_calls_need_beside_their_arrays(cupy, qkv, algorithm, mode):
    """For looked-at masks on Hopper, and for what FlashAttention-1 keeps from block to block."""
    q, k, v = qkv
    masks = [cupy.random.random((200, 200)) < p for p in (0.3, 0.7)]
    outs = [cupy.empty_like(q) for _ in masks]
    calls = [
        partial(cufa.attention, q, k, v, mask=mask, algorithm=algorithm, out=out)
        for mask, out in zip(masks, outs, strict=True)
    ]
    check_graph_owns_what_it_needs(cupy, mode, lambda: [call() for call in calls])


@pytest.mark.parametrize("mode", ["Global", "Relaxed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_graph_owns_the_copies_of_its_arguments(cupy, dtype, mode):
    """CuPy's pool has given their memory to others when it runs."""
    q, k, v = normal(cupy, 3, 2, 4, 200, 128, dtype=dtype)
    sink, slopes = (normal(cupy, 4, dtype="float64", seed=seed) for seed in (1, 2))
    halves = [(a[..., ::2], a[..., 1::2]) for a in (q, k, v)]  # the last axis is not contiguous
    outs = [cupy.empty((2, 4, 200, 64), dtype) for _ in range(2)]
    calls = [
        partial(cufa.attention, *arrays, sink=sink, alibi_slopes=abs(slopes), out=out)
        for arrays, out in zip(zip(*halves, strict=True), outs, strict=True)
    ]
    check_graph_owns_what_it_needs(cupy, mode, lambda: [call() for call in calls])


def test_a_graph_of_several_calls_may_be_launched_again_and_again(cupy, qkv):
    q, k, v = qkv
    outs = [cupy.empty_like(q) for _ in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        want = cufa.attention(q, k, v)
        stream.begin_capture()
        for out in outs:
            cufa.attention(q, k, v, out=out)
        graph = stream.end_capture()
        for _ in range(20):
            for out in outs:
                out.fill(cupy.nan)
            graph.launch(stream)
            assert all(bool((out == want).all()) for out in outs)


def test_calls_in_several_streams_at_once_do_not_disturb_each_other(cupy):
    """Kernels that hand out their work by a counter need one for each."""
    problems = [normal(cupy, 3, 1, 4, 1000 + 300 * i, 64, seed=i) for i in range(4)]
    want = [cufa.attention(*qkv).get() for qkv in problems]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    cupy.cuda.Device().synchronize()
    outs = []
    for _ in range(50):
        for stream, qkv in zip(streams, problems, strict=True):
            with stream:
                outs.append(cufa.attention(*qkv))
    cupy.cuda.Device().synchronize()
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out.get(), want[i % len(want)])


def test_calls_on_many_arrays_of_one_shape_each_read_their_own(cupy):
    arrays = [normal(cupy, 3, 1, 1, 70, 64, seed=i) for i in range(40)]
    for i, qkv in enumerate(arrays):
        q, k, v = qkv[0], qkv[1], arrays[i - 1][2]
        out = cufa.attention(q, k, v)
        assert_within_rounding(out, exact(q.get(), k.get(), v.get()))


def test_threads_may_compile_and_call_at_once(cupy, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    from cufa.gpu import build, launch

    monkeypatch.setattr(build, "_kernels", {})
    launch._prepare.cache_clear()
    arrays = [normal(cupy, 3, 2, 2, 70 + 10 * i, 32 * (i % 3 + 1), seed=i) for i in range(12)]
    want = [exact(*a.get()) for a in arrays]
    barrier = threading.Barrier(len(arrays))

    def call(a):
        barrier.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            outs = [cufa.attention(*a) for _ in range(5)]
            stream.synchronize()
        return [out.get() for out in outs]

    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(len(arrays)) as pool:
        for outs, expected in zip(pool.map(call, arrays), want, strict=True):
            for out in outs:
                assert_within_rounding(out, expected)
    launch._prepare.cache_clear()


@pytest.mark.parametrize("algorithm", ["auto", "fa2"])
def test_a_thread_may_begin_with_a_call(cupy, qkv, algorithm):
    """It has no context yet, and with `out` nothing makes one before the launch."""
    want, out = cufa.attention(*qkv, algorithm=algorithm), cupy.zeros_like(qkv[0])
    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cufa.attention, *qkv, algorithm=algorithm, out=out).result()
    np.testing.assert_array_equal(out.get(), want.get())


def test_processes_may_fill_the_cache_and_call_at_once(cupy, tmp_path, monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    code = """
import cupy, cufa
from cufa.bounds import exact
from cufa.testing import assert_within_rounding
q, k, v = cupy.random.default_rng(0).standard_normal((3, 1, 2, 150, 64), dtype="float32")
out = cufa.attention(q, k, v, causal=True)
assert_within_rounding(out, exact(q.get(), k.get(), v.get(), causal=True))
"""
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(4)
    ]
    errors = [job.communicate()[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), errors


def test_arrays_on_another_device_run_there(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        q, k, v = normal(cupy, 3, 2, 4, 100, 64)
    out = cufa.attention(q, k, v)
    assert out.device.id == 1
    assert cupy.cuda.Device().id == 0
    assert_within_rounding(out, exact(q.get(), k.get(), v.get()))
    with pytest.raises(cufa.DeviceError, match=r"GPU 1.*GPU 0"):
        cufa.attention(q, cupy.asarray(k.get()), v)


def test_more_elements_than_32_bits_count(cupy):
    # The second head begins past element 2**30; k and v end past 2**31.
    heads, seqlen, d = 2, 2**24 + 8, 64
    if cupy.cuda.runtime.memGetInfo()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    q = normal(cupy, heads, 3, d)
    k, v = (cupy.zeros((heads, seqlen, d), "float16") for _ in range(2))
    v[:, -5:] = normal(cupy, heads, 5, d, seed=1)
    k[:, -5:] = normal(cupy, heads, 5, d, seed=2)
    window = (2, 0)
    out = cufa.attention(q, k, v, window=window)
    last = (a.get() for a in (q, k[:, -5:], v[:, -5:]))
    assert_within_rounding(out, exact(*last, window=window))


@pytest.mark.parametrize("algorithm", ["auto", "fa2", "standard"])
@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (65537, 2), (1, 100_000), (100_000, 1)])
def test_batch_and_heads_have_no_limit_of_16_bits(cupy, batch, heads, algorithm):
    q, k, v = normal(cupy, 3, batch, heads, 3, 8)
    out = cufa.attention(q, k, v, causal=True, algorithm=algorithm)
    last = (a[-2:].get() for a in (q, k, v))
    assert_within_rounding(out[-2:], exact(*last, causal=True))


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2", "standard"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_are_the_same_bits_every_time(cupy, dtype, algorithm):
    q, k, v = normal(cupy, 3, 4, 8, 300, 72, dtype=dtype)
    first = cufa.attention(q, k, v, return_lse=True, algorithm=algorithm)
    for _ in range(50):
        result = cufa.attention(q, k, v, return_lse=True, algorithm=algorithm)
        for again, once in zip(result, first, strict=True):
            assert (again == once).all()


@pytest.mark.parametrize("causal", [False, True])
def test_the_two_algorithms_agree_to_a_millionth_in_float32(cupy, causal):
    q, k, v = normal(cupy, 3, 2, 4, 2000, 64, dtype="float32")
    first, second = (
        cufa.attention(q, k, v, causal=causal, algorithm=algorithm) for algorithm in ("fa1", "fa2")
    )
    assert float(abs(first - second).max()) <= 1e-6 * float(abs(v).max())


@pytest.mark.parametrize("heads", [1, 40])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_fa1_cuts_heads_into_ranges_and_agrees_with_the_oracle(cupy, heads, causal):
    q, k, v = normal(cupy, 3, 1, heads, 1100, 128, dtype="float16")
    out = cufa.attention(q, k, v, causal=causal, return_lse=True, algorithm="fa1")
    assert_within_rounding(out, exact(q.get(), k.get(), v.get(), causal=causal))


def test_the_workspace_of_fa1_is_freed_and_grows_with_the_length_alone(cupy):
    class Taken(cupy.cuda.MemoryHook):
        name, size = "taken", 0

        def malloc_postprocess(self, *, size, **_):
            self.size += size

    pool, taken = cupy.get_default_memory_pool(), []
    for seqlen in (4096, 8192, 16384):
        q, k, v = normal(cupy, 3, 1, 2, seqlen, 64, dtype="float16")
        out = cupy.empty_like(q)
        before = pool.used_bytes()
        with Taken() as hook:
            cufa.attention(q, k, v, out=out, algorithm="fa1")
        assert pool.used_bytes() == before
        taken.append(hook.size)
    assert 0 < taken[2] <= 2.1 * taken[1] <= 4.5 * taken[0]


def test_rows_that_are_not_contiguous_are_copied_first(cupy):
    q, k, v = normal(cupy, 3, 2, 2, 90, 128)
    views = q[..., ::2], k[..., ::-2], v[..., 1::2]
    out = cufa.attention(*views)
    assert_within_rounding(out, exact(*(a.get() for a in views)))


def test_no_kernel_is_named_with_every_reason(cupy):
    q = cupy.zeros((1, 1, 4, 320), "float64")
    with pytest.raises(cufa.UnsupportedError) as error:
        cufa.attention(q, q, q)
    said = str(error.value)
    assert "head_dim 320" in said
    assert "fa2_fwd takes float16 or bfloat16" in said
    assert "fa2_fwd_simt takes head_dim up to 256" in said
    assert "NumPy inputs" in said


def test_a_card_newer_than_the_compiler_gets_portable_code(cupy):
    from cufa.gpu import build
    from cufa.gpu.device import Device
    from cufa.gpu.plan import make_key
    from cufa.gpu.warmup import _call, _Features
    from cufa.problem import make_problem

    problem = make_problem(_call(32, "float16", False, False, 128, None, _Features()))
    key = make_key(problem, Device.of_arch(999))
    code, _ = build.compile_key(key)
    assert code.lstrip().startswith(b"//")
    assert b".target sm_" in code


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_long_sequences_agree_with_the_oracle(cupy, dtype, algorithm):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = normal(cupy, 3, 1, 2, 3000, 128, dtype=dtype)
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True, algorithm=algorithm)
    assert_within_rounding((out, lse), exact(q.get(), k.get(), v.get(), causal=True))
