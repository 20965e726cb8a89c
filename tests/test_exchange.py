"""Who waits for whom when an array changes hands on a GPU; on paper, so without one.

That the waits are enough, `test_interop_gpu.py` shows on a GPU.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from foreign import Lender
from paper_gpu import DEFAULT, PaperGpu

from cufa import arrays, gpu
from cufa.interop import lend

OURS, THEIRS, OTHERS = 10, 20, 30


@pytest.fixture
def card(monkeypatch):
    """A card on paper, on which CuPy's current stream is `OURS`."""
    card = PaperGpu()
    cupy = card.cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.delitem(sys.modules, "cufa.gpu.exchange", raising=False)
    monkeypatch.setitem(arrays._libraries, card.Array, "cupy")
    exchange = importlib.import_module("cufa.gpu.exchange")
    monkeypatch.setitem(sys.modules, "cufa.gpu.exchange", exchange)
    monkeypatch.setattr(gpu, "exchange", exchange)
    with card.stream(OURS):
        yield card
    card.idle.set()


class InterfaceOnly:
    """An array with the CUDA array interface alone."""

    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "stream": stream}


@pytest.fixture
def library(card, monkeypatch):
    """A library that imports DLPack, and works in the stream `THEIRS`."""
    library = ModuleType("lending_library")
    library.Array = card.lender(THEIRS)
    library.Array.__module__ = library.__name__
    library.from_dlpack = lambda a: library.Array(card.imported(a, THEIRS))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return library


@pytest.fixture
def torch(card, monkeypatch):
    """What stands for PyTorch: its current stream can be asked."""
    torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (card.lender(THEIRS),), {"__module__": "torch", "device": 0})
    torch.from_dlpack = lambda a: torch.Tensor(card.imported(a, THEIRS))
    torch.cuda = SimpleNamespace(current_stream=lambda d: SimpleNamespace(cuda_stream=THEIRS))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def launch(card):
    """A function that lend can call, which notes where among the waits it was called."""

    def double(q, k=None, out=None):
        card.waits.append("launch")
        if out is None:
            return q * 2
        out[...] = q * 2
        return out

    return double


def ones(card):
    return card.array(np.ones((3, 4), "float32"))


def assert_comes_to_an_end(reference):
    """What another thread holds is let go of."""
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reference() is None


@pytest.mark.parametrize(("named", "stream"), [(THEIRS, THEIRS), (None, DEFAULT), (OURS, OURS)])
def test_by_the_interface_we_wait_before_and_they_after(card, named, stream):
    lend(launch(card), {"q": InterfaceOnly(ones(card), named)})
    before, after = [(stream, OURS)], [(OURS, stream)]
    assert card.waits == (["launch"] if stream == OURS else [*before, "launch", *after])


def test_out_is_waited_for_like_an_input(card):
    out = InterfaceOnly(ones(card), THEIRS)
    assert lend(launch(card), {"q": ones(card), "out": out}) is out
    assert card.waits == [(THEIRS, OURS), "launch", (OURS, THEIRS)]
    assert (out.array == 2).all()


def test_torch_waits_for_what_reads_its_tensors(card, torch):
    lend(launch(card), {"q": ones(card), "k": torch.Tensor(ones(card))})
    assert card.waits == [(THEIRS, OURS), "launch", (OURS, THEIRS)]


def test_an_importer_waits_for_the_result(card, library):
    out = lend(launch(card), {"q": library.Array(ones(card))})
    assert (out.array == 2).all()
    assert card.waits == [(THEIRS, OURS), "launch", (OURS, THEIRS)]


def test_an_importer_waits_for_out(card, library):
    out = library.Array(ones(card))
    assert lend(launch(card), {"q": ones(card), "out": out}) is out
    assert card.waits == [(THEIRS, OURS), "launch", (OURS, THEIRS)]


def test_we_wait_for_the_reader_of_a_result_when_it_comes_back(card, torch):
    out = lend(launch(card), {"q": torch.Tensor(ones(card))})
    card.waits.clear()
    gc.collect()
    assert card.waits == []
    with card.stream(OTHERS):  # whatever is current where the reader drops it
        del out
        gc.collect()
    assert card.waits == [(THEIRS, OURS)]


def test_a_result_is_held_if_its_reader_may_use_any_stream(card, library):
    results = []

    def double(q):
        results.append(weakref.ref(result := q * 2))
        return result

    out = lend(double, {"q": library.Array(ones(card))})
    del out
    gc.collect()
    assert results[0]() is not None
    card.idle.set()
    assert_comes_to_an_end(results[0])


def test_in_one_stream_nobody_waits(card, library, torch):
    with card.stream(THEIRS):
        out = lend(launch(card), {"q": library.Array(ones(card)), "k": torch.Tensor(ones(card))})
        del out
        gc.collect()
    assert card.waits == ["launch"]


def test_the_default_stream_is_the_same_under_either_of_its_numbers(card):
    with card.stream(DEFAULT):  # CuPy says 0
        lend(launch(card), {"q": InterfaceOnly(ones(card), None)})
    assert card.waits == ["launch"]


def test_in_a_capture_nobody_waits(card, torch):
    card.capturing = True
    q, k = InterfaceOnly(ones(card), THEIRS), InterfaceOnly(ones(card), None)
    lend(launch(card), {"q": q, "k": k})
    assert card.waits == ["launch"]


def test_what_may_not_wait_is_held_until_the_kernel_has_ended(card):
    a = ones(card)
    gone = weakref.ref(a)
    lend(launch(card), {"q": Lender(a)})
    del a
    gc.collect()
    assert gone() is not None
    card.idle.set()
    assert_comes_to_an_end(gone)
