"""Do the checks of the emulator see what they should? Each fault of emulator/faults_*.py, planted
in a kernel, is seen as what it is; the kernels as they are raise nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from emulator import build, linear_attention
from emulator import faults_dropout as dropout
from emulator.build import Unit
from emulator.faults import CONFLICTS, PROBLEMS, WRONG, Fault, Problem, Symptom
from emulator.faults_attention import FA2_FWD, FA2_FWD_SIMT
from emulator.faults_backward import (
    BWD_QUERIES,
    BWD_QUERIES_MMA,
    BWD_ROWS,
    BWD_SINK,
    FA2_BWD,
    FA2_BWD_DBIAS_SIMT,
    FA2_BWD_DQ,
    FA2_BWD_DQ_SIMT,
    FA2_BWD_SIMT,
    FA2_BWD_TF32,
)
from emulator.faults_fa1 import FA1_FWD, FA1_FWD_SIMT
from emulator.faults_fa3 import FA3_FWD_SM90
from emulator.faults_hopper import LINEAR_ATTENTION_SM90
from emulator.faults_mask import MASK_TILES
from emulator.faults_wide import FA2_FWD_FLOAT32, FA2_FWD_FLOAT64
from emulator.machine import (
    Emulator,
    attention,
    attention_backward,
    backward_keys,
    emulator,
    kernel_key,
)
from emulator.run import Counts, KernelError, Kind, Order, Schedule

import cufa
from cufa.bounds import Exact
from cufa.gpu.registry import KERNELS
from cufa.gradient_bounds import ExactGradients
from cufa.gradients import NAMES
from cufa.testing import Case, assert_gradients_within_rounding, assert_within_rounding

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

ARCH = 90
#: Where a kernel is the first choice.
ARCHS = {"fa2_fwd_simt": 75, "fa2_bwd_simt": 75}
SCHEDULES = (
    Schedule(Order.FIRST),
    Schedule(Order.LAST),
    *(Schedule(Order.RANDOM, s) for s in (1, 2)),
)
FAULTS = {
    "fa2_fwd": (*FA2_FWD, *dropout.FA2_FWD),
    "fa2_fwd float32": (*FA2_FWD_FLOAT32, *dropout.FA2_FWD_FLOAT32),
    "fa2_fwd float64": FA2_FWD_FLOAT64,
    "fa2_fwd_simt": (*FA2_FWD_SIMT, *dropout.FA2_FWD_SIMT),
    "fa1_fwd": (*FA1_FWD, *dropout.FA1_FWD),
    "fa1_fwd_simt": (*FA1_FWD_SIMT, *dropout.FA1_FWD_SIMT),
    "fa3_fwd_sm90": (*FA3_FWD_SM90, *dropout.FA3_FWD_SM90),
    "fa3_fwd_sm90 mask": MASK_TILES,
    "fa2_bwd": (*FA2_BWD, *dropout.FA2_BWD),
    "fa2_bwd_tf32": FA2_BWD_TF32,
    "fa2_bwd_dq": FA2_BWD_DQ,
    "fa2_bwd_simt": (*FA2_BWD_SIMT, *dropout.FA2_BWD_SIMT),
    "fa2_bwd_dq_simt": FA2_BWD_DQ_SIMT,
    "fa2_bwd_dbias_simt": FA2_BWD_DBIAS_SIMT,
    "bwd_rows": BWD_ROWS,
    "bwd_queries": BWD_QUERIES,
    "bwd_queries_mma": BWD_QUERIES_MMA,
    "bwd_sink": BWD_SINK,
    "linear_attention_sm90": LINEAR_ATTENTION_SM90,
}
#: Which gradients of a call take a kernel of the backward pass.
WANTED = {
    "fa2_bwd": ("q", "k", "v"),
    "fa2_bwd_tf32": ("q", "k", "v"),
    "fa2_bwd_dq": ("q",),
    "fa2_bwd_simt": ("q", "k", "v"),
    "fa2_bwd_dq_simt": ("q",),
    "fa2_bwd_dbias_simt": ("bias",),
    "bwd_rows": ("q", "k", "v"),
    "bwd_queries": ("q", "k"),
    "bwd_queries_mma": ("q", "k"),
    "bwd_sink": ("sink",),
}
#: What nobody does has no place in the kernel, nor has what is found at the end.
NO_PLACE = "never written|tickets end at"
ROWS = [(kernel, fault) for kernel, faults in FAULTS.items() for fault in faults]
ALGORITHM = {spec.name: spec.algorithm for spec in KERNELS}
SHOWN = sorted({(kernel, fault.problems) for kernel, fault in ROWS})


@pytest.mark.parametrize(("kernel", "fault"), ROWS, ids=lambda x: getattr(x, "what", x))
def test_a_planted_fault_is_seen(kernel: str, fault: Fault) -> None:
    symptom, text = next(seen(kernel, fault), (None, "nothing was seen"))
    assert symptom is fault.seen, text
    if isinstance(symptom, Kind) and not re.search(NO_PLACE, text):
        assert re.search(r"\.cuh?:\d+", text), f"no line of the kernel in: {text}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.order.name}-{s.seed}")
@pytest.mark.parametrize(("kernel", "problems"), SHOWN)
def test_nothing_is_seen_in_a_kernel_as_it_is(
    kernel: str, problems: str, schedule: Schedule
) -> None:
    found = [symptom(kernel, problem, schedule) for problem in PROBLEMS[kernel][problems]]
    assert found == [None] * len(found)


@pytest.mark.parametrize(("kernel", "problems"), SHOWN)
def test_problems_of_one_name_run_one_unit_of_the_kernel(kernel: str, problems: str) -> None:
    units = {unit(kernel, problem) for problem in PROBLEMS[kernel][problems]}
    assert {unit.kernel for unit in units} == {kernel.split()[0]}
    assert len(units) == 1


def seen(kernel: str, fault: Fault) -> Iterator[tuple[Kind | Symptom, str]]:
    """What shows of a fault, and how it is told, problem by problem and order by order."""
    for problem in PROBLEMS[kernel][fault.problems]:
        for schedule in SCHEDULES:
            if found := symptom(kernel, problem, schedule, fault.edit):
                yield found


def symptom(
    kernel: str, problem: Problem, schedule: Schedule, edit: build.Edit | None = None
) -> tuple[Kind | Symptom, str] | None:
    """What shows in one run, and how it is told; None if all is well."""
    try:
        counts = run(kernel, problem, schedule, edit)
    except KernelError as error:
        return error.kind, str(error)
    except AssertionError as error:
        return WRONG, str(error)
    return (CONFLICTS, f"{counts.bank_conflicts} conflicts") if counts.bank_conflicts else None


def run(
    kernel: str, problem: Problem, schedule: Schedule, edit: build.Edit | None = None
) -> Counts:
    """One run of an edited kernel; AssertionError if the result is not the formula."""
    if isinstance(problem, Case):
        # Most of the time is the compiler's, which takes less in this mode.
        machine = Emulator(ARCHS.get(kernel, ARCH), edit, mode="debug")
        machine.schedule = schedule
        if kernel in WANTED:
            got = attention_backward(machine, **back_arguments(kernel, problem))
            assert_gradients_within_rounding(got, exact_back(kernel, problem))
            return machine.counts
        assert_within_rounding(attention(machine, **arguments(kernel, problem)), exact(problem))
        return machine.counts
    arrays, counts = linear_attention.emulated(problem, schedule, edit)
    linear_attention.assert_right(problem, arrays)
    return counts


def unit(kernel: str, problem: Any) -> Unit:
    """What a problem runs."""
    if kernel in WANTED:
        machine = emulator(ARCHS.get(kernel, ARCH))
        keys = backward_keys(machine, **back_arguments(kernel, problem))
        return next(Unit.of(key.kernel, key.defines()) for key in keys if key.kernel == kernel)
    if isinstance(problem, Case):
        key = kernel_key(emulator(ARCHS.get(kernel, ARCH)), **arguments(kernel, problem))
        return Unit.of(key.kernel, key.defines())
    return Unit(linear_attention.KERNEL)


@cache
def arguments(kernel: str, case: Case) -> dict[str, Any]:
    arrays = dict(zip("qkv", case.arrays(np), strict=True))
    how = {"return_lse": True, "algorithm": ALGORITHM[kernel.split()[0]]}
    return arrays | case.options(np) | how


@cache
def exact(case: Case) -> Exact:
    return case.exact()


@cache
def back_arguments(kernel: str, case: Case) -> dict[str, Any]:
    """Of a backward pass; NaN comes back to rows that see no key."""
    arrays, (dout, dlse) = dict(zip("qkv", case.arrays(np), strict=True)), case.back(np)
    out, lse = cufa.attention(*arrays.values(), return_lse=True, **case.options(np))
    dout, dlse = dout.copy(), dlse.copy()
    dout[lse == -np.inf] = dlse[lse == -np.inf] = np.nan
    saved = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    return arrays | saved | case.options(np) | {"wrt": WANTED[kernel]}


@cache
def exact_back(kernel: str, case: Case) -> ExactGradients:
    """Of what is wanted."""
    expected = case.exact_gradients()
    kept = [
        cufa.Gradients(
            *(a if name in WANTED[kernel] else None for name, a in zip(NAMES, part, strict=True))
        )
        for part in expected[:2]
    ]
    return expected._replace(gradients=kept[0], bounds=kept[1])
