"""A machine for the launcher of cufa whose cards are emulated, and attention on it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import cufa
from cufa.arrays import Arrays, are_aligned, sign
from cufa.gpu import launch
from cufa.gpu.device import Device
from cufa.gpu.params import PARAMS, Buffers
from cufa.gpu.plan import KernelKey, Step, make_key
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
        return np.full(shape, np.nan, dtype)

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
        self.counts = run.run(
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
        if buffers.tickets is not None and buffers.tickets.any():
            text = f"tickets end at {int(buffers.tickets[0])}; the next launch begins at 0"
            raise KernelError(Kind.OUTPUT, text)


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


def _signed(q: Any, k: Any, v: Any, **options: Any) -> tuple[Signature, Arrays]:
    given = inspect.signature(cufa.attention).bind(q, k, v, **options)
    given.apply_defaults()
    arrays = Arrays(**{name: given.arguments.pop(name) for name in Arrays._fields})
    call = sign(arrays, **given.arguments)
    return call._replace(aligned=are_aligned(arrays)), arrays
