"""From a call to launches on a machine: outputs, conversions, one launch for each step of the plan.

A machine is what kernels run on: cards through CuPy (`cufa.gpu.cards`), or what stands in for one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from cufa.arrays import Arrays, are_aligned, check_overlap, describe
from cufa.gpu import config
from cufa.gpu.device import Device
from cufa.gpu.params import Buffers
from cufa.gpu.plan import KernelKey, Step, make_plan
from cufa.problem import Problem, Signature, make_problem


class Machine(Protocol):
    """Where kernels run; devices are told apart by their numbers."""

    def __hash__(self) -> int: ...

    def device(self, ordinal: int) -> Device:
        """What plans must know of a device."""

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        """The kernel, ready to be launched on a device."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array for a kernel to fill."""

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        """`a`, or a copy of it, contiguous and of a dtype (None: its own)."""

    def tickets(self) -> Any:
        """An array of one uint32 that no other kernel uses meanwhile: 0 before a launch, and the
        kernel leaves it so."""

    def launch(self, kernel: Any, step: Step, buffers: Buffers) -> None:
        """Start a kernel."""


class _Ready(NamedTuple):
    """A call that lacks only its arrays."""

    problem: Problem
    launches: tuple[tuple[Any, Step], ...]
    #: Elements of the accumulator's type.
    workspace: int
    tickets: bool
    #: Arguments to be copied first, contiguous, with the dtype they are to have (None: their own).
    conversions: dict[str, str | None]


def run(machine: Machine, call: Signature, arrays: Arrays) -> Any:
    """`cufa.attention` on a machine's arrays, all on the device that `call` names."""
    if arrays.out is not None:
        make_problem(call)  # its errors come before anything else
        check_overlap(arrays)
    ready = _prepare(machine, call, config.tuned)
    if ready.conversions:
        return run(machine, *_convert(machine, call, arrays, ready.conversions))
    return _launch(machine, ready, arrays)


@lru_cache(maxsize=4096)
def _prepare(machine: Machine, call: Signature, tuned: config.Tuned) -> _Ready:
    # `tuned` is here as a part of the key: what rows another file had must not be found again.
    problem = make_problem(call)
    plan = make_plan(problem, machine.device(call.q.device))
    conversions = conversions_of(problem)
    if conversions:
        return _Ready(problem, (), 0, False, conversions)
    launches = tuple((machine.kernel(step.key, call.q.device), step) for step in plan.steps)
    tickets = any(step.tickets for step in plan.steps)
    return _Ready(problem, launches, plan.workspace, tickets, conversions)


def conversions_of(problem: Problem) -> dict[str, str | None]:
    """Rows must be contiguous; slopes and sinks come in the accumulator's type."""
    wanted: dict[str, str | None] = {
        name: None
        for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        if 0 not in operand.shape and operand.shape[3] > 1 and operand.strides[3] != 1
    }
    for name, per_head in (("alibi_slopes", problem.alibi_slopes), ("sink", problem.sink)):
        if per_head is not None and per_head.dtype != problem.accumulator:
            wanted[name] = problem.accumulator
    return wanted


def _convert(
    machine: Machine, call: Signature, arrays: Arrays, conversions: dict[str, str | None]
) -> tuple[Signature, Arrays]:
    copies: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, dtype in conversions.items():
        copies[name] = machine.contiguous(getattr(arrays, name), dtype)
        facts[name] = describe(name, copies[name])
    arrays = arrays._replace(**copies)
    return call._replace(aligned=are_aligned(arrays), **facts), arrays


def _launch(machine: Machine, ready: _Ready, arrays: Arrays) -> Any:
    problem = ready.problem
    q, k, v, mask, bias, alibi_slopes, sink, out = arrays
    if out is None:
        out = machine.empty(problem.out_shape, q.dtype)
    lse = machine.empty(problem.lse_shape, problem.accumulator) if problem.return_lse else None
    workspace = machine.empty((ready.workspace,), problem.accumulator) if ready.workspace else None
    tickets = machine.tickets() if ready.tickets else None
    buffers = Buffers(q, k, v, out, lse, mask, bias, alibi_slopes, sink, workspace, tickets)
    for kernel, step in ready.launches:
        machine.launch(kernel, step, buffers)
    return out if lse is None else (out, lse)
