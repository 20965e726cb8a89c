"""What each rank of a test does: its part of a problem that rank 0 has drawn."""

from __future__ import annotations

import base64
import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from layer_problems import LayerCase

from cufa import LayerGradients, distributed
from cufa.distributed.calls import axis_of
from cufa.distributed.hosts import Hosts
from cufa.testing import Case, to_numpy
from cufa.tools.workloads import to_device


@dataclass(frozen=True)
class Places:
    """Which rows of a sequence each rank has: ends of their rows, or None for zigzag."""

    queries: tuple[int, ...] | None
    keys: tuple[int, ...] | None

    @property
    def split(self) -> str:
        return "zigzag" if self.queries is None else "contiguous"

    def own(self, comm: Any, a: Any, which: str, axis: int) -> Any:
        """A rank's rows of a whole array."""
        ends = getattr(self, which)
        if ends is None:
            return distributed.zigzag_split(a, comm.rank, comm.size, axis=axis)
        rows = slice((0, *ends)[comm.rank], ends[comm.rank])
        return a[..., rows, :] if axis == -2 else a[..., rows, :, :] if axis == -3 else a[..., rows]

    def joined(self, parts: list[Any], axis: int) -> Any:
        """The whole array from the rows of all ranks."""
        if self.split == "zigzag":
            return distributed.zigzag_join(parts, axis=axis)
        return np.concatenate(parts, axis=axis)


class Ranks:
    """Rank 0's hold on all ranks: calls a function on each and collects what it returns.

    Texts go by `control`, arrays by the communicator that the function is given.
    """

    def __init__(self, control: Hosts, comm: Any) -> None:
        self._control, self._comm = control, comm
        self.size = comm.size

    def fit(self, problem: Any) -> Any:
        """Bends a problem so that a run on GPUs compiles few kernels."""
        return problem if self._comm.library == "numpy" else problem.few_kernels()

    def __call__(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results by rank; what was raised, where it was."""
        return self._round((job, arguments))

    def serve(self) -> None:
        """On another rank: work until rank 0 is done."""
        while self._round(None) is not None:
            pass

    def dismiss(self) -> None:
        """Let the other ranks go."""
        self._round((None, ()))

    def _round(self, work: Any) -> Any:
        job, arguments = self._gathered(work)[0]
        if job is None:
            return None
        try:
            result = job(self._comm, *arguments)
        except Exception as error:
            result = error
        return self._gathered(result)

    def _gathered(self, value: Any) -> list[Any]:
        text = base64.b64encode(pickle.dumps(value)).decode()
        return [pickle.loads(base64.b64decode(a)) for a in self._control.gather(text)]


def forward(comm: Any, function: str, case: Case, places: Places) -> Any:
    """Out and lse of a rank's queries, by a function of `cufa.distributed`."""
    options = {**case.options(_library(comm)), "split": places.split, "return_lse": True}
    return _on_host(getattr(distributed, function)(comm, *_own(comm, case, places), **options))


def backward(comm: Any, function: str, case: Case, places: Places, out: Any, lse: Any) -> Any:
    """A rank's gradients, from the results of the whole."""
    axis, xp = axis_of(case.layout, case.rank), _library(comm)
    dout, dlse = case.back(xp)
    out, lse = (to_device(xp, a) for a in (out, lse))
    dout, out = (places.own(comm, a, "queries", axis) for a in (dout, out))
    lse, dlse = (places.own(comm, a, "queries", -1) for a in (lse, dlse))
    options = {**case.options(xp), "split": places.split}
    q, k, v = _own(comm, case, places)
    backward = getattr(distributed, f"{function}_backward")
    found = backward(comm, dout, q, k, v, out, lse, dlse=dlse, **options)
    return type(found)(*_on_host(found))


def layer(comm: Any, problem: LayerCase) -> Any:
    """The result and the gradients of a layer whose heads are divided among the ranks."""
    whole = problem.layer
    names = ("embed_dim", "heads", "kv_heads", "head_dim", "context_dim", "projection_bias")
    sizes = {n: getattr(whole, n) for n in (*names, "rotary", "rotary_base")}
    divided = distributed.TensorParallelAttention(comm, **sizes)
    xp = _library(comm)
    params, x, context = problem.arrays(xp)
    own = divided.split(params)
    y, vjp = divided.vjp(own, x, context, **problem.options(xp))
    again = divided(own, x, context, **problem.options(xp))
    np.testing.assert_array_equal(to_numpy(again), to_numpy(y))
    dparams, *rest = vjp(problem.back(xp))
    on_host = {name: to_numpy(a) for name, a in dparams.items()}
    return to_numpy(y), LayerGradients(on_host, *_on_host(rest))


def layer_with(comm: Any, options: dict[str, Any], of_last: dict[str, Any]) -> Any:
    """The result of a layer of two heads for each rank, called with some options."""
    if comm.rank == comm.size - 1:
        options = {**options, **of_last}
    xp = _library(comm)
    arrays = {n: to_device(xp, a) for n, a in options.items() if isinstance(a, np.ndarray)}
    options = {**options, **arrays}
    divided = distributed.TensorParallelAttention(comm, 8, 2 * comm.size, head_dim=4)
    params = divided.split(divided.whole.init(0, xp=xp))
    x = xp.ones((3, 8), "float32")
    return to_numpy(divided.vjp(params, x, **options)[0])


def differing(comm: Any, change: dict[str, Any], all_alike: dict[str, Any] | None = None) -> Any:
    """A call in which the last rank gives something else."""
    options = {**(all_alike or {}), **(change if comm.rank == comm.size - 1 else {})}
    sizes = {"heads": 2, "rows": 8, "head_dim": 16}
    shape = [options.pop(name, n) for name, n in sizes.items()]
    function = getattr(distributed, options.pop("function", "ring_attention"))
    a = _library(comm).ones(shape, options.pop("dtype", "float32"))
    return _on_host([function(comm, a, a, a, **options)])[0]


def differing_backward(comm: Any) -> Any:
    """Gradients, on the last rank of a loss by lse too."""
    a, lse = (_library(comm).ones(shape, "float32") for shape in ((2, 8, 16), (2, 8)))
    dlse = lse if comm.rank == comm.size - 1 else None
    return distributed.ring_attention_backward(comm, a, a, a, a, a, lse, dlse=dlse)


def _own(comm: Any, case: Case, places: Places) -> list[Any]:
    axis = axis_of(case.layout, case.rank)
    which = ("queries", "keys", "keys")
    arrays = case.arrays(_library(comm))
    return [places.own(comm, a, w, axis) for a, w in zip(arrays, which, strict=True)]


def _library(comm: Any) -> ModuleType:
    return importlib.import_module(comm.library)


def _on_host(arrays: Any) -> tuple[Any, ...]:
    return tuple(None if a is None else to_numpy(a) for a in arrays)
