"""From a call to launches on a machine: outputs, conversions, one launch for each step of the plan.

A machine is what kernels run on: cards through CuPy (`cufa.gpu.cards`), or what stands in for one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from cufa.arrays import Arrays, address_of, check_overlap
from cufa.gpu import config
from cufa.gpu.device import Device
from cufa.gpu.params import Buffers
from cufa.gpu.plan import KernelKey, Step, make_plan
from cufa.options import numpy_dtype
from cufa.problem import ArrayFacts, Problem, Signature, make_problem


class Machine(Protocol):
    """Where kernels run; devices are told apart by their numbers."""

    def __hash__(self) -> int: ...

    def device(self, ordinal: int) -> Device:
        """What plans must know of a device."""

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        """The kernel, ready to be launched on a device."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array for a kernel to fill."""

    def workspace(self, size: int, dtype: Any) -> Any:
        """What the launches of one call share: an array for them to fill, of one axis. Where they
        are being captured, the graph's own."""

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        """A copy of `a`, contiguous, of a dtype (None: its own) and starting at a multiple of 16
        bytes."""

    def tickets(self) -> Any:
        """An array of one uint32 that no other kernel uses meanwhile: 0 before a launch, and the
        kernel leaves it so."""

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        """Start a kernel. `seed` is that of dropout."""


class _Ready(NamedTuple):
    """A call that lacks only its arrays."""

    problem: Problem
    launches: tuple[tuple[Any, Step], ...]
    #: Elements of the accumulator's type.
    workspace: int
    tickets: bool
    #: What `conversions_of` says; where there are any, nothing else is known yet.
    conversions: dict[str, str | None]


def run(machine: Machine, call: Signature, arrays: Arrays, seed: Any = None) -> Any:
    """`cufa.attention` on a machine's arrays, all on the device that `call` names.

    `seed` is that of dropout.
    """
    if arrays.out is not None:
        make_problem(call)  # its errors come before anything else
        check_overlap(arrays)
    ready = _prepare(machine, call, config.tuned)
    if ready.conversions:
        later = after_conversions(call, arrays, ready.conversions)
        converted = _prepare(machine, later, config.tuned)  # its errors come before any copy
        copies = {
            name: machine.contiguous(getattr(arrays, name), dtype)
            for name, dtype in ready.conversions.items()
        }
        return _launch(machine, converted, arrays._replace(**copies), seed)
    return _launch(machine, ready, arrays, seed)


@lru_cache(maxsize=4096)
def _prepare(machine: Machine, call: Signature, tuned: config.Tuned) -> _Ready:
    # `tuned` is here as a part of the key: what rows another file had must not be found again.
    problem = make_problem(call)
    conversions = conversions_of(problem)
    if conversions:
        return _Ready(problem, (), 0, False, conversions)
    plan = make_plan(problem, machine.device(call.q.device))
    launches = tuple((machine.kernel(step.key, call.q.device), step) for step in plan.steps)
    tickets = any(step.tickets for step in plan.steps)
    return _Ready(problem, launches, plan.workspace, tickets, conversions)


def conversions_of(problem: Problem) -> dict[str, str | None]:
    """Arguments to be copied first, with the dtype that each is to have (None: its own): rows must
    be contiguous; slopes and sinks come in the accumulator's type."""
    wanted: dict[str, str | None] = {
        name: None
        for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        if 0 not in operand.shape and operand.shape[3] > 1 and operand.strides[3] != 1
    }
    for name, per_head in (("alibi_slopes", problem.alibi_slopes), ("sink", problem.sink)):
        if per_head is not None and per_head.dtype != problem.accumulator:
            wanted[name] = problem.accumulator
    return wanted


def after_conversions(
    call: Signature, arrays: Arrays, conversions: dict[str, str | None]
) -> Signature:
    """The call as it is once they are made: a copy is contiguous, and aligned."""
    changed: dict[str, Any] = {}
    for name, dtype in conversions.items():
        facts: ArrayFacts = getattr(call, name)
        new = facts.dtype if dtype is None else numpy_dtype(dtype)
        strides = [new.itemsize * math.prod(facts.shape[n + 1 :]) for n in range(len(facts.shape))]
        changed[name] = ArrayFacts(facts.shape, tuple(strides), new, facts.device)
    held = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "out": arrays.out}
    stay = [a for name, a in held.items() if a is not None and name not in conversions]
    return call._replace(aligned=all(address_of(a) % 16 == 0 for a in stay), **changed)


def _launch(machine: Machine, ready: _Ready, arrays: Arrays, seed: Any) -> Any:
    problem = ready.problem
    q, k, v, mask, bias, alibi_slopes, sink, out = arrays
    if out is None:
        out = machine.empty(problem.out_shape, q.dtype)
    lse = machine.empty(problem.lse_shape, problem.accumulator) if problem.return_lse else None
    workspace = machine.workspace(ready.workspace, problem.accumulator) if ready.workspace else None
    tickets = machine.tickets() if ready.tickets else None
    buffers = Buffers(q, k, v, out, lse, mask, bias, alibi_slopes, sink, workspace, tickets)
    for kernel, step in ready.launches:
        machine.launch(kernel, step, buffers, seed)
    return out if lse is None else (out, lse)
