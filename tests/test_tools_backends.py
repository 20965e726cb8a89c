"""The kernels that `Backend` says a call launches are those that it launches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from paper_machine import PaperMachine
from test_tools_verify import CARD, asked_otherwise

from cufa.arrays import Arrays, address_of, are_aligned, sign
from cufa.gpu import launch
from cufa.gradients import Saved, sign_backward
from cufa.testing import Case, Memory, cases
from cufa.tools.backends import NO_KERNEL

#: Rows of head_dim 36 that start at multiples of 16 bytes; rows that do not.
PADDED, ODD = Memory(margin=(0, 0, 0, 4)), Memory(offset=1)


def launched(case):
    """What launching a call, and then its gradients, launches, on paper."""
    arrays, options = case.arrays(np), case.options(np)
    machine = PaperMachine(CARD.device)
    held = Arrays(*arrays, **{n: a for n, a in options.items() if n in Arrays._fields})
    plain = {n: a for n, a in options.items() if n not in Arrays._fields}
    call = sign(held, **{"algorithm": "auto", **plain}, return_lse=True)
    call = call._replace(aligned=are_aligned(held))
    out, lse = launch.run(machine, call, held)
    forward = [step.key.kernel for step, _ in machine.launched]
    machine.launched.clear()
    dout, dlse = case.back(np)
    saved = Saved(dout, out, lse, dlse)
    back = sign_backward(call, saved, case.wrt, case.deterministic)
    back = back._replace(aligned=(address_of(dout) | address_of(out)) % 16 == 0)
    launch.run_backward(machine, back, held, saved)
    return forward, [step.key.kernel for step, _ in machine.launched]


@given(case=cases(max_elements=1 << 20, **asked_otherwise()))
def test_the_kernels_named_are_those_launched(case):
    arrays, options = case.arrays(np), case.options(np)
    forward, backward = launched(case)
    assert CARD.kernels(*arrays, **options) == ((*forward,) or (NO_KERNEL,))
    named = CARD.backward_kernels(*case.back(np), *arrays, **options, **case.backward_options())
    assert named == ((*backward,) or (NO_KERNEL,))


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "fa2_bwd"),
        ({"dout_memory": Memory(offset=1)}, "fa2_bwd_simt"),
        ({"dout_memory": Memory(margin=(0, 0, 0, 3))}, "fa2_bwd_simt"),
        ({"head_dim": 36, "q_memory": PADDED, "k_memory": PADDED}, "fa2_bwd_simt"),
        ({"deterministic": True, "constants": ("k", "v")}, "fa2_bwd_dq"),
        ({"deterministic": True, "constants": ("k", "v"), "v_memory": ODD}, "fa2_bwd_dq_simt"),
    ],
)
def test_which_kernel_gradients_take_is_said_by_all_their_arrays(changes, kernel):
    """The results too: of head_dim 36 their rows are not aligned, though those of q and k are."""
    case = Case(seqlen_q=20, dtype="float16", **changes)
    arrays, options = case.arrays(np), {**case.options(np), **case.backward_options()}
    named = CARD.backward_kernels(*case.back(np), *arrays, **options)
    assert named[1] == kernel
