"""A machine for the launcher of cufa whose cards are emulated, and attention on it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

import cufa
from cufa.arrays import Arrays, address_of, are_aligned, sign
from cufa.gpu import launch
from cufa.gpu.backward_plan import make_backward_plan, row_numbers
from cufa.gpu.config import BWD_QUERIES, BWD_QUERIES_MMA, BWD_ROWS, BWD_SINK
from cufa.gpu.device import Device
from cufa.gpu.params import BACKWARD_PARAMS, PARAMS, Buffers, GradientBuffers
from cufa.gpu.plan import KernelKey, Step, make_key
from cufa.gradients import (
    BackwardSignature,
    Gradients,
    Saved,
    make_backward_problem,
    plain_wrt,
    sign_backward,
)
from cufa.problem import Signature, make_problem
from cufa.testing import numpy_dtype
from emulator import build, run
from emulator.run import Access, Counts, KernelError, Kind, Schedule
from emulator.tensor_map import emulated

#: Of what is not an input, by kernel; others keep in the workspace what a thread will want again.
_OUTPUTS = {"o": Access.WRITE_ONCE, "lse": Access.WRITE_ONCE, "tickets": Access.ADD}
_ACCESS = {
    "mask_tiles": {"workspace": Access.THREAD_OWN, "o": None, "lse": None, "tickets": None},
    "fa3_fwd_sm90": _OUTPUTS,
}
_ACCESS_OF_OTHERS = {**_OUTPUTS, "workspace": Access.THREAD_OWN}
#: Of the backward pass.
_RESULTS = ("dq", "dk", "dv", "dbias", "dsink")
_QUERIES = (BWD_QUERIES, BWD_QUERIES_MMA)


def _stored(key: KernelKey) -> list[str]:
    """What a kernel of the backward pass stores."""
    if key.kernel == BWD_ROWS:
        return []
    if key.kernel in _QUERIES or key.kernel.startswith("fa2_bwd_dq"):
        return ["dq"]
    if key.result:
        return ["dsink" if key.kernel == BWD_SINK else "dbias"]
    return [name for name in ("dk", "dv") if getattr(key, name)]


def _access_of_workspace(key: KernelKey) -> tuple[Access | None, Access | None]:
    """What it does to the numbers of rows there, and to the sums of dQ."""
    if key.kernel == BWD_ROWS:
        return Access.WRITE_ONCE, Access.WRITE_ONCE if key.dq else None
    if key.kernel in _QUERIES:
        return None, Access.READ
    adds = key.dq and _stored(key) != ["dq"]
    return Access.READ, Access.ADD if adds else None


class Emulator:
    """Emulated cards of one architecture, whose kernels may be edited and are compiled in a mode.

    They have few multiprocessors, so that blocks that stay have several tiles. `schedule` holds for
    the launches to come.
    """

    def __init__(
        self,
        arch: int,
        edit: build.Edit | None = None,
        mode: str = "checked",
        sm_count: int = 1,
    ) -> None:
        self.arch = arch
        self.edit = edit
        self.mode = mode
        self.sm_count = sm_count
        self.schedule = Schedule()
        #: Of the latest launch.
        self.counts: Counts | None = None

    def device(self, ordinal: int) -> Device:
        return replace(Device.of_arch(self.arch), sm_count=self.sm_count)

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        return build.library(build.Unit.of(key.kernel, key.defines(), self.mode), self.edit)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        # What lies just past the end of another array is then in none: out of bounds at every place
        # that memory is found at.
        margin = 1 << 14  # elements: more than a tile of rows
        whole = np.full(math.prod(shape) + 2 * margin, np.nan, dtype)
        return whole[margin:-margin].reshape(shape)

    def workspace(self, size: int, dtype: Any) -> Any:
        return self.empty((size,), dtype)

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        return np.ascontiguousarray(a, numpy_dtype(dtype) if dtype else None)

    def tickets(self) -> Any:
        return np.zeros(1, np.uint32)

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        params = step.params.view(PARAMS).copy()
        params["dropout_seed"] = 0 if seed is None else seed
        for name, tensor_map in zip("qkv", step.maps, strict=False):
            address = getattr(buffers, name).ctypes.data
            params[f"{name}_map"] = emulated(tensor_map, address)
        accesses = _ACCESS.get(step.key.kernel, _ACCESS_OF_OTHERS)
        arrays = {}
        for name, a in buffers._asdict().items():
            if a is not None:
                params[name] = a.ctypes.data
                access = accesses.get(name, Access.READ)
                if access is not None:
                    arrays[name] = (a, access)
        self.counts = self._run(kernel, params, step, arrays)
        self._check_tickets(buffers)

    def launch_backward(
        self,
        kernel: Any,
        step: Step,
        buffers: Buffers,
        gradients: GradientBuffers,
        seed: Any = None,
    ) -> None:
        params = step.params.view(BACKWARD_PARAMS).copy()
        params["forward"]["dropout_seed"] = 0 if seed is None else seed
        given = {name: a for name, a in buffers._asdict().items() if a is not None}
        results = {name: a for name, a in gradients._asdict().items() if a is not None}
        for name, a in given.items():
            params["forward"][name] = a.ctypes.data
        for name, a in results.items():
            params[name] = a.ctypes.data
        inputs = {n: a for n, a in (given | results).items() if n not in _RESULTS}
        arrays = {n: (a, Access.READ) for n, a in inputs.items() if n != "workspace"}
        arrays |= {n: (results[n], Access.WRITE_ONCE) for n in _stored(step.key)}
        p = params[0]
        heads = p["batch"] * p["forward"]["heads"]["value"]
        rows = int(row_numbers(step.key.dtype) * heads * p["padded_rows"])
        whole = np.empty(0) if buffers.workspace is None else buffers.workspace
        parts = whole[:rows], whole[rows:]
        for name, part, access in zip(
            ("numbers of rows", "sums of dQ"), parts, _access_of_workspace(step.key), strict=True
        ):
            if access is not None:
                arrays[name] = (part, access)
        self.counts = self._run(kernel, params, step, arrays)

    def _run(self, kernel: Any, params: Any, step: Step, arrays: Any) -> Counts:
        return run.run(
            kernel,
            params,
            (step.grid,),
            step.threads,
            step.smem_bytes,
            arrays,
            self.schedule,
            checked=self.mode in build.CHECKED_MODES,
            blocks_per_sm=step.key.config.blocks_per_sm,
        )

    def _check_tickets(self, buffers: Buffers) -> None:
        if buffers.tickets is not None and buffers.tickets.any():
            text = f"tickets end at {int(buffers.tickets[0])}; the next launch begins at 0"
            raise KernelError(Kind.OUTPUT, text)


@contextmanager
def watched(machine: Emulator) -> Iterator[list[tuple[KernelKey, Counts]]]:
    """The units that a machine runs meanwhile, in order, and what each has done."""
    found = []

    def run(kernel: Any, params: Any, step: Step, arrays: Any) -> Counts:
        counts = Emulator._run(machine, kernel, params, step, arrays)
        found.append((step.key, counts))
        return counts

    with mock.patch.object(machine, "_run", run):
        yield found


@cache
def emulator(arch: int) -> Emulator:
    """The emulated cards of an architecture, one and the same at every call."""
    return Emulator(arch)


def attention(machine: Emulator, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`cufa.attention` with those options on NumPy arrays, computed by an emulated card."""
    return launch.run(machine, *_signed(q, k, v, **options), options.get("dropout_seed"))


def kernel_key(machine: Emulator, q: Any, k: Any, v: Any, **options: Any) -> KernelKey:
    """The unit that such a call runs."""
    call, _ = _signed(q, k, v, **options)
    return make_key(make_problem(call), machine.device(call.q.device))


def attention_backward(machine: Emulator, *arrays: Any, **options: Any) -> Gradients:
    """`cufa.attention_backward` on NumPy arrays, computed by an emulated card."""
    seed = options.get("dropout_seed")
    return launch.run_backward(machine, *_signed_backward(*arrays, **options), seed)


def attention_vjp(
    machine: Emulator,
    q: Any,
    k: Any,
    v: Any,
    *,
    wrt: Any = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Any, Callable[..., Gradients]]:
    """`cufa.attention_vjp` likewise."""
    asked = options.pop("return_lse", False)
    out, lse = attention(machine, q, k, v, return_lse=True, **options)
    how = {**options, "wrt": wrt, "deterministic": deterministic}

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        return attention_backward(machine, dout, q, k, v, out, lse, dlse=dlse, **how)

    return ((out, lse) if asked else out), vjp


def backward_keys(machine: Emulator, *arrays: Any, **options: Any) -> list[KernelKey]:
    """The units that such a call runs, in order."""
    call, *_ = _signed_backward(*arrays, **options)
    plan = make_backward_plan(make_backward_problem(call), machine.device(0))
    return [step.key for step in plan.steps]


def _signed_backward(*arrays: Any, **options: Any) -> tuple[BackwardSignature, Arrays, Saved]:
    given = inspect.signature(cufa.attention_backward).bind(*arrays, **options)
    given.apply_defaults()
    of_call = given.arguments
    held = Arrays(**{name: of_call.pop(name) for name in Arrays._fields if name != "out"})
    saved = Saved(**{name: of_call.pop(name) for name in Saved._fields})
    names, deterministic = plain_wrt(of_call.pop("wrt"), held), of_call.pop("deterministic")
    forward = sign(held, **of_call, return_lse=True)._replace(aligned=are_aligned(held))
    call = sign_backward(forward, saved, names, deterministic)
    aligned = (address_of(saved.dout) | address_of(saved.out)) % 16 == 0
    return call._replace(aligned=aligned), held, saved


def _signed(q: Any, k: Any, v: Any, **options: Any) -> tuple[Signature, Arrays]:
    given = inspect.signature(cufa.attention).bind(q, k, v, **options)
    given.apply_defaults()
    arrays = Arrays(**{name: given.arguments.pop(name) for name in Arrays._fields})
    call = sign(arrays, **given.arguments)
    return call._replace(aligned=are_aligned(arrays)), arrays
