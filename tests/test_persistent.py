"""Kernels that fill the card once: their plans, and the counter that hands out their work."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_gpu import PaperGpu
from paper_machine import PaperMachine

from cufa import gpu as package
from cufa.arrays import Arrays, sign
from cufa.gpu import launch, plan
from cufa.gpu.device import Device
from cufa.gpu.params import PARAMS, Buffers
from cufa.gpu.plan import make_plan
from cufa.gpu.tensor_map import MAP_BYTES, TensorMap
from cufa.gpu.warmup import _call, _Features
from cufa.problem import Problem, Signature, make_problem

H200 = replace(Device.of_arch(90), sm_count=132)


def problem(seqlen: int, batch: int = 1, heads: int = 1) -> Problem:
    made = make_problem(_call(64, "float16", False, False, seqlen, None, _Features()))
    return replace(made, batch=batch, heads=heads, kv_heads=heads)


@given(
    seqlen=st.integers(1, 100_000),
    batch=st.integers(1, 30),
    heads=st.integers(1, 300),
    sm_count=st.integers(1, 200),
)
def test_the_grid_fills_the_card_and_no_more(seqlen, batch, heads, sm_count):
    card = replace(H200, sm_count=sm_count)
    step = make_plan(problem(seqlen, batch, heads), card).steps[0]
    told = step.params.view(PARAMS)[0]
    tiles = -(-seqlen // step.key.config.block_m)
    assert told["tile_count"] == batch * heads * tiles
    assert step.grid == min(plan.slots(step.key, card), told["tile_count"])
    assert told["tiles"]["value"] == tiles
    assert 0 < told["section"] <= batch * heads


def test_boxes_are_as_high_as_the_tiles():
    step = make_plan(problem(1000), H200).steps[0]
    q, k, v = step.maps
    assert q.box[1] == step.key.config.block_m
    assert k.box[1] == v.box[1] == step.key.config.block_n


def call(algorithm: str) -> tuple[Signature, Arrays]:
    q = np.zeros((3, 100, 64), np.float16)
    arrays = Arrays(q, q, q)
    return sign(arrays, False, None, None, None, "bhsd", False, algorithm), arrays


def test_each_launch_asks_the_machine_for_a_counter():
    machine = PaperMachine(H200)
    for _ in range(2):
        launch.run(machine, *call("fa3"))
    assert [buffers.tickets for _, buffers in machine.launched] == machine.counters
    assert len(machine.counters) == 2
    assert all(step.tickets and len(step.maps) == 3 for step, _ in machine.launched)


def test_other_kernels_have_neither_counter_nor_maps():
    machine = PaperMachine(H200)
    launch.run(machine, *call("fa2"))
    step, buffers = machine.launched[0]
    assert not step.tickets
    assert step.maps == ()
    assert buffers.tickets is None
    assert machine.counters == []


@contextmanager
def paper_gpu() -> Iterator[Any]:
    """A GPU on paper in the place of CuPy, and `cufa.gpu.cards` on it."""
    made: Any = PaperGpu()
    cupy = made.cupy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        patch.delitem(sys.modules, "cufa.gpu.cards", raising=False)
        patch.setattr(package, "cards", None, raising=False)
        made.cards = importlib.import_module("cufa.gpu.cards")
        yield made
        del sys.modules["cufa.gpu.cards"]


@pytest.fixture
def gpu() -> Iterator[Any]:
    with paper_gpu() as made:
        yield made


def test_launches_in_one_stream_share_a_counter_and_no_others(gpu: Any):
    first = gpu.cards.CARDS.tickets()
    assert first.dtype == np.uint32
    assert first.tolist() == [0]
    with gpu.stream(7):
        other = gpu.cards.CARDS.tickets()
        assert gpu.cards.CARDS.tickets() is other
    assert other is not first
    assert gpu.cards.CARDS.tickets() is first


def test_devices_have_counters_of_their_own(gpu: Any):
    first = gpu.cards.CARDS.tickets()
    gpu.device = 1
    assert gpu.cards.CARDS.tickets() is not first


def test_threads_have_counters_of_their_own(gpu: Any):
    """The stream number 2 is another stream in each thread."""
    found: list[Any] = []
    with gpu.stream(2):
        found.append(gpu.cards.CARDS.tickets())
        thread = threading.Thread(target=lambda: found.append(gpu.cards.CARDS.tickets()))
        thread.start()
        thread.join()
    assert found[0] is not found[1]


def test_a_graph_keeps_a_counter_for_each_launch(gpu: Any):
    with gpu.stream(7):
        outside = gpu.cards.CARDS.tickets()
        gpu.capturing = True
        gpu.cards.Memory = None  # nothing is allocated during a capture
        captured = [gpu.cards.CARDS.tickets() for _ in range(gpu.cards._PAGE)]
        gpu.capturing = False
        assert gpu.cards.CARDS.tickets() is outside
    assert [a.tolist() for a in captured] == [[0]] * len(captured)
    places = {a.ctypes.data for a in (outside, *captured)}
    assert len(places) == 1 + len(captured)
    page = gpu.cards._pages[0]
    assert all(np.shares_memory(page, a) for a in captured), "it is kept only with its page"


def test_more_launches_in_graphs_than_a_page_has_get_another(gpu: Any):
    with gpu.stream(7):
        gpu.capturing = True
        captured = [gpu.cards.CARDS.tickets() for _ in range(gpu.cards._PAGE + 1)]
    assert len({a.ctypes.data for a in captured}) == len(captured)


def test_the_workspace_of_a_captured_call_is_the_graphs(gpu: Any):
    """Had and given back in the captured stream; the pool's might be another's when it runs."""
    with gpu.stream(7):
        gpu.cards.CARDS.workspace(10, "float32")
        assert gpu.in_order == []
        gpu.capturing = True
        made = gpu.cards.CARDS.workspace(10, "float32")
        assert (made.shape, made.dtype) == ((10,), np.float32)
        assert gpu.in_order == [("malloc", 40, 7)]
        del made
        gc.collect()
        assert gpu.in_order == [("malloc", 40, 7), ("free", 40, 7)]


@pytest.mark.parametrize("step", [2, -1])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_copy_made_for_a_captured_call_is_the_graphs(gpu: Any, step: int, dtype: str | None):
    """As its workspace is."""
    a = gpu.array(np.linspace(-1e300, 1e300, 9))[::step]
    with gpu.stream(7):
        made = gpu.cards.CARDS.contiguous(a, dtype)
        assert gpu.in_order == []
        gpu.capturing = True
        of_graph = gpu.cards.CARDS.contiguous(a, dtype)
        gpu.capturing = False
    np.testing.assert_array_equal(of_graph, made)
    assert np.isfinite(of_graph).all()
    told = [(what, of_graph.nbytes, 7) for what in ("malloc", "free")]
    assert gpu.in_order == told[:1]
    del of_graph
    gc.collect()
    assert gpu.in_order == told


def test_a_result_of_a_captured_call_is_the_callers(gpu: Any):
    """A graph's own would be gone for the caller before it is there."""
    with gpu.stream(7):
        gpu.capturing = True
        gpu.cards.CARDS.empty((10,), "float32")
    assert gpu.in_order == []


#: What launches know of a kernel.
KERNEL = SimpleNamespace(ptr=1)


def at(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def test_a_launch_fills_in_pointers_maps_and_the_seed(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    encodings: list[int] = []

    def encoded(self: TensorMap, address: int) -> bytes:
        encodings.append(address)
        return address.to_bytes(8, "little") * (MAP_BYTES // 8)

    monkeypatch.setattr(TensorMap, "encoded", encoded)
    step = make_plan(problem(1000), H200).steps[0]
    for first in (16, 1600, 16):
        arrays = [at(first * n) for n in range(1, 5)]
        gpu.cards.CARDS.launch(KERNEL, step, Buffers(*arrays, *[None] * 6, at(99)), 2**64 - first)
    for told, first in zip(gpu.params, (16, 1600, 16), strict=True):
        assert [told[name] for name in "qkvo"] == [first * n for n in range(1, 5)]
        assert (told["tickets"], told["dropout_seed"]) == (99, 2**64 - first)
        assert told["workspace"] == told["lse"] == 0
        for name in "qkv":
            assert bytes(told[f"{name}_map"])[:8] == int(told[name]).to_bytes(8, "little")
        assert told["seqlen_q"] == 1000
    assert len(encodings) == 6, "the maps of addresses seen before are encoded anew"
    assert not step.params.view(PARAMS)["q"]


def test_a_launch_without_a_seed_or_a_workspace_has_none_of_the_one_before(gpu: Any):
    """Both find their parameters in the same memory."""
    step = make_plan(problem(1000), replace(H200, arch=80)).steps[0]
    arrays = [at(n) for n in range(1, 12)]
    gpu.cards.CARDS.launch(KERNEL, step, Buffers(*arrays), 5)
    gpu.cards.CARDS.launch(KERNEL, step, Buffers(*arrays[:4], *[None] * 7))
    one, other = gpu.params
    assert (one["dropout_seed"], one["workspace"], one["tickets"]) == (5, 10, 11)
    assert not other["dropout_seed"]
    assert [other[name] for name in Buffers._fields] == [1, 2, 3, 4, *[0] * 7]


def test_a_launch_that_interrupts_another_leaves_its_parameters_alone(gpu: Any):
    """As a handler of signals may."""
    step = make_plan(problem(1000), replace(H200, arch=80)).steps[0]
    inner = Buffers(*[at(n) for n in range(1, 12)])

    class Interrupting:
        """An array that is asked for its address, and launches a kernel instead."""

        @property
        def data(self) -> Any:
            gpu.cards.CARDS.launch(KERNEL, step, inner, 5)
            return SimpleNamespace(ptr=99)

    outer = Buffers(*[at(20 + n) for n in range(1, 4)], Interrupting(), *[None] * 7)
    gpu.cards.CARDS.launch(KERNEL, step, outer)
    names = (*Buffers._fields, "dropout_seed")
    told = [[int(params[name]) for name in names] for params in gpu.params]
    assert told == [[*range(1, 12), 5], [21, 22, 23, 99, *[0] * 8]]


def test_every_thread_that_launches_has_a_context(gpu: Any):
    """The paper GPU refuses a launch from one that has none, as the driver does."""
    step = make_plan(problem(1000), replace(H200, arch=80)).steps[0]
    buffers = Buffers(*[at(n) for n in range(1, 12)])
    threads = [
        threading.Thread(target=gpu.cards.CARDS.launch, args=(KERNEL, step, buffers))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(gpu.params) == len(threads)
