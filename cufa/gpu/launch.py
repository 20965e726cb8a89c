"""From a call to launches on a machine: outputs, conversions, one launch for each step of the plan.

A machine is what kernels run on: cards through CuPy (`cufa.gpu.cards`), or what stands in for one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from cufa.arrays import Arrays, address_of, check_overlap
from cufa.gpu import config
from cufa.gpu.backward_plan import make_backward_plan
from cufa.gpu.device import Device
from cufa.gpu.params import Buffers, GradientBuffers
from cufa.gpu.plan import KernelKey, Step, make_plan
from cufa.gradients import (
    BackwardProblem,
    BackwardSignature,
    Gradients,
    Saved,
    make_backward_problem,
)
from cufa.options import numpy_dtype
from cufa.problem import (
    ArrayFacts,
    Operand,
    Problem,
    Signature,
    contiguous_operand,
    make_problem,
)


class Catalog(Protocol):
    """Devices, told apart by their numbers, and kernels for them."""

    def __hash__(self) -> int: ...

    def device(self, ordinal: int) -> Device:
        """What plans must know of a device."""

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        """The kernel, ready to be launched on a device."""


class Machine(Catalog, Protocol):
    """Where the kernels run."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A result for a kernel to fill: the caller's, also where the call is being captured into a
        graph."""

    def workspace(self, size: int, dtype: Any) -> Any:
        """What the launches of one call share: an array for them to fill, of one axis. The graph's
        own in a capture."""

    def contiguous(self, a: Any, dtype: str | None) -> Any:
        """A copy of `a`, contiguous, of a dtype (None: its own) and starting at a multiple of 16
        bytes. The graph's own in a capture."""

    def tickets(self) -> Any:
        """An array of one uint32 that no other kernel uses meanwhile: 0 before a launch, and the
        kernel leaves it so."""

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        """Start a kernel. `seed` is that of dropout."""

    def launch_backward(
        self,
        kernel: Any,
        step: Step,
        buffers: Buffers,
        gradients: GradientBuffers,
        seed: Any = None,
    ) -> None:
        """Start a kernel of the backward pass."""


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
        check_overlap(arrays, call)
    ready = _prepare(machine, call, config.tuned)
    if ready.conversions:
        conversions = ready.conversions
        ready = _prepare_converted(machine, call, arrays, conversions)  # errors precede any copy
        copies = {
            name: machine.contiguous(getattr(arrays, name), dtype)
            for name, dtype in conversions.items()
        }
        arrays = arrays._replace(**copies)
    return _launch(machine, ready, arrays, seed)


def launches_of(catalog: Catalog, call: Signature, arrays: Arrays) -> tuple[tuple[Any, Step], ...]:
    """What `run` would launch: kernels, as the catalog gives them, and their steps."""
    ready = _prepare(catalog, call, config.tuned)
    if ready.conversions:
        ready = _prepare_converted(catalog, call, arrays, ready.conversions)
    return ready.launches


def _prepare_converted(
    catalog: Catalog, call: Signature, arrays: Arrays, conversions: dict[str, str | None]
) -> _Ready:
    return _prepare(catalog, after_conversions(call, arrays, conversions), config.tuned)


@lru_cache(maxsize=4096)
def _prepare(catalog: Catalog, call: Signature, tuned: config.Tuned) -> _Ready:
    # `tuned` is here as a part of the key: what rows another file had must not be found again.
    problem = make_problem(call)
    conversions = conversions_of(problem)
    if conversions:
        return _Ready(problem, (), 0, False, conversions)
    plan = make_plan(problem, catalog.device(call.q.device))
    launches = tuple((catalog.kernel(step.key, call.q.device), step) for step in plan.steps)
    tickets = any(step.tickets for step in plan.steps)
    return _Ready(problem, launches, plan.workspace, tickets, conversions)


def conversions_of(problem: Problem) -> dict[str, str | None]:
    """Arguments to be copied first, with the dtype that each is to have (None: its own): rows must
    be contiguous; slopes and sinks come in the accumulator's type."""
    wanted: dict[str, str | None] = {
        name: None
        for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        if not _has_whole_rows(operand)
    }
    for name, per_head in (("alibi_slopes", problem.alibi_slopes), ("sink", problem.sink)):
        if per_head is not None and per_head.dtype != problem.accumulator:
            wanted[name] = problem.accumulator
    return wanted


def _has_whole_rows(a: Operand) -> bool:
    return 0 in a.shape or a.shape[3] == 1 or a.strides[3] == 1


def after_conversions(
    call: Signature, arrays: Arrays, conversions: dict[str, str | None]
) -> Signature:
    """The call as it is once they are made: a copy is contiguous, and aligned."""
    changed: dict[str, Any] = {
        name: _converted(getattr(call, name), to) for name, to in conversions.items()
    }
    held = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "out": arrays.out}
    stay = [a for name, a in held.items() if a is not None and name not in conversions]
    return call._replace(aligned=all(address_of(a) % 16 == 0 for a in stay), **changed)


def _converted(facts: ArrayFacts, dtype: str | None) -> ArrayFacts:
    """A contiguous copy, of a dtype (None: its own)."""
    new = facts.dtype if dtype is None else numpy_dtype(dtype)
    strides = [new.itemsize * math.prod(facts.shape[n + 1 :]) for n in range(len(facts.shape))]
    return ArrayFacts(facts.shape, tuple(strides), new, facts.device)


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


class _ReadyBackward(NamedTuple):
    """A call of `cufa.attention_backward` that lacks only its arrays."""

    launches: tuple[tuple[Any, Step], ...]
    accumulator: str
    workspace: int
    conversions: dict[str, str | None]


def run_backward(
    machine: Machine, call: BackwardSignature, arrays: Arrays, saved: Saved, seed: Any = None
) -> Gradients:
    """`cufa.attention_backward` on a machine's arrays, all on the device that `call` names.

    `seed` is that of dropout.
    """
    ready = _prepare_backward(machine, call, config.tuned)
    wanted = {f"d{name}": getattr(arrays, name) for name in call.wrt}
    if ready.conversions:
        conversions = ready.conversions
        ready = _prepare_backward_converted(machine, call, arrays, saved, conversions)
        given = arrays._asdict() | saved._asdict()
        given |= {n: machine.contiguous(given[n], dtype) for n, dtype in conversions.items()}
        saved = Saved(**{name: given[name] for name in Saved._fields})
        arrays = Arrays(**{name: given[name] for name in Arrays._fields if name != "out"})
    results = Gradients(**{n: machine.empty(a.shape, a.dtype) for n, a in wanted.items()})
    if not ready.launches:
        for result in results:
            if result is not None:
                result[...] = 0
    else:
        size = ready.workspace
        workspace = machine.workspace(size, ready.accumulator) if size else None
        buffers = Buffers(
            *arrays[:3], saved.out, saved.lse, *arrays[3:7], workspace=workspace, tickets=None
        )
        gradients = GradientBuffers(saved.dout, saved.dlse, *results)
        for kernel, step in ready.launches:
            machine.launch_backward(kernel, step, buffers, gradients, seed)
    return results


def backward_launches_of(
    catalog: Catalog, call: BackwardSignature, arrays: Arrays, saved: Saved
) -> tuple[tuple[Any, Step], ...]:
    """What `run_backward` would launch: kernels, as the catalog gives them, and their steps."""
    ready = _prepare_backward(catalog, call, config.tuned)
    if ready.conversions:
        ready = _prepare_backward_converted(catalog, call, arrays, saved, ready.conversions)
    return ready.launches


def _prepare_backward_converted(
    catalog: Catalog,
    call: BackwardSignature,
    arrays: Arrays,
    saved: Saved,
    conversions: dict[str, str | None],
) -> _ReadyBackward:
    later = _after_backward_conversions(call, arrays, saved, conversions)
    return _prepare_backward(catalog, later, config.tuned)


@lru_cache(maxsize=4096)
def _prepare_backward(
    catalog: Catalog, call: BackwardSignature, tuned: config.Tuned
) -> _ReadyBackward:
    problem, ordinal = make_backward_problem(call), call.forward.q.device
    accumulator = problem.forward.accumulator
    conversions = _backward_conversions_of(problem)
    if conversions:
        return _ReadyBackward((), accumulator, 0, conversions)
    plan = make_backward_plan(problem, catalog.device(ordinal))
    launches = tuple((catalog.kernel(step.key, ordinal), step) for step in plan.steps)
    return _ReadyBackward(launches, accumulator, plan.workspace, conversions)


def _backward_conversions_of(problem: BackwardProblem) -> dict[str, str | None]:
    """`conversions_of`, and what must be contiguous beside: rows of dout and out, all of lse and
    dlse."""
    wanted = conversions_of(problem.forward)
    rows = {"dout": problem.dout, "out": problem.forward.out}
    wanted |= {name: None for name, a in rows.items() if not _has_whole_rows(a)}
    whole = {"lse": problem.lse, "dlse": problem.dlse}
    return wanted | {name: None for name, a in whole.items() if a and not _is_contiguous(a)}


def _is_contiguous(a: Operand) -> bool:
    return 0 in a.shape or a.strides == contiguous_operand(a.shape, "bhsd", a.dtype).strides


def _after_backward_conversions(
    call: BackwardSignature,
    arrays: Arrays,
    saved: Saved,
    conversions: dict[str, str | None],
) -> BackwardSignature:
    of_call = {n: to for n, to in conversions.items() if n not in Saved._fields}
    of_saved = {n: to for n, to in conversions.items() if n in Saved._fields}
    changed: dict[str, Any] = {
        name: _converted(getattr(call, name), to) for name, to in of_saved.items()
    }
    stay = [getattr(saved, name) for name in ("dout", "out") if name not in conversions]
    return call._replace(
        forward=after_conversions(call.forward, arrays, of_call),
        aligned=all(address_of(a) % 16 == 0 for a in stay),
        **changed,
    )
