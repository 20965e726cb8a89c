"""What `cufa.explain` says is what `cufa.attention` does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from paper_machine import PaperMachine

import cufa
from cufa.arrays import Arrays, are_aligned, sign
from cufa.gpu import launch
from cufa.gpu.device import Device
from cufa.gpu.registry import KERNEL_NAMES, KERNELS
from cufa.options import ALGORITHMS
from cufa.testing import Case, Memory, cases

Q = np.zeros((2, 4, 100, 64), np.float16)


def launched(case: Case, arch: int) -> PaperMachine:
    """A machine of an architecture after the call, which it noted in the place of running it."""
    machine = PaperMachine(Device.of_arch(arch))
    options = case.options(np)
    given: dict[str, Any] = {"return_lse": False, "algorithm": "auto", **options}
    names = [name for name in Arrays._fields if name in given]
    arrays = Arrays(*case.arrays(np), **{name: given.pop(name) for name in names})
    call = sign(arrays, **given)
    launch.run(machine, call._replace(aligned=are_aligned(arrays)), arrays)
    return machine


#: Every other element of v.
STEPPED = Case(
    seqlen_q=1,
    seqlen_k=2,
    head_dim=48,
    head_dim_v=48,
    dtype="float16",
    algorithm="fa3",
    v_memory=Memory(step=(1, 1, 1, 2)),
)
MASKED = Case(dtype="float16", mask=(False, False, True, True))


@given(
    case=cases(
        max_elements=1 << 18, algorithm=st.sampled_from(["auto", "auto", "fa1", "fa2", "fa3"])
    ),
    arch=st.sampled_from([70, 80, 86, 90, 100, 120]),
)
@example(case=STEPPED, arch=90).via("served by fa3 once v is copied, and by nothing before")
@example(case=MASKED, arch=90).via("served by fa3 after a look at the mask")
def test_the_kernel_that_is_named_is_the_one_that_would_be_launched(case: Case, arch: int):
    found = cufa.explain(*case.arrays(np), arch=arch, **case.options(np))
    try:
        machine = launched(case, arch)
    except cufa.UnsupportedError:
        assert found.kernel is None
        assert {kernel for kernel, _ in found.refusals} == {*KERNEL_NAMES}
        return
    keys = [step.key for step, _ in machine.launched][-1:]  # others only make ready for it
    assert len(found.copied) == len(machine.copies)
    assert [(found.kernel, found.config)] == (
        [(k.kernel, k.config) for k in keys] or [(None, None)]
    )
    if keys:
        assert found.algorithm in ("fa1", "fa2", "fa3")
        before = KERNEL_NAMES[: KERNEL_NAMES.index(str(found.kernel))]
        assert {*before} <= {kernel for kernel, _ in found.refusals}
        assert found.kernel not in dict(found.refusals)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_numpy_arrays_are_for_the_cpu_or_say_why_not(algorithm: str):
    found = cufa.explain(Q, Q, Q, algorithm=algorithm)
    assert found.backend == "cpu"
    try:
        cufa.attention(Q, Q, Q, algorithm=algorithm)
    except cufa.UnsupportedError:
        assert found.kernel is None
        assert f"  cpu has no algorithm '{algorithm}'" in str(found)
    else:
        assert found.kernel == ("standard" if algorithm == "standard" else "cpu")
        assert str(found).startswith(f"{found.kernel} serves this call on the CPU")


def test_standard_attention_has_no_tile():
    found = cufa.explain(Q, Q, Q, algorithm="standard", arch=90)
    assert (found.backend, found.kernel, found.config) == ("gpu", "standard", None)


def test_words_say_what_serves_what_is_copied_and_why_others_do_not():
    odd = np.zeros((2, 4, 100, 65), np.float16)[..., 1:]
    found = cufa.explain(odd, Q[..., ::-1], Q, sink=np.zeros(4, np.float16), arch=80)
    shown = str(found).splitlines()
    assert shown[0] == "fa2_fwd_simt serves this call on sm_80: fa2"
    assert shown[1].startswith("  tile: block_m ")
    assert shown[2] == "  copied first: k, sink"
    assert "  fa2_fwd needs rows of q, k, v and out that start at multiples of 16 bytes" in shown


def test_what_nothing_serves_is_not_copied_first():
    machine = PaperMachine(Device.of_arch(80))
    q, k, v = STEPPED.arrays(np)
    call = sign(Arrays(q, k, v), False, None, None, None, "bhsd", False, "fa3")
    with pytest.raises(cufa.UnsupportedError, match="fa3_fwd_sm90 needs sm_90"):
        launch.run(machine, call._replace(aligned=True), Arrays(q, k, v))
    assert not machine.copies


def test_what_no_tensor_map_describes_is_for_another_kernel():
    repeated = np.broadcast_to(Q[:1], Q.shape)
    assert cufa.explain(Q, Q, Q, arch=90).algorithm == "fa3"
    for algorithm, kernel in (("auto", "fa2_fwd"), ("fa3", None)):
        found = cufa.explain(Q, repeated, Q, algorithm=algorithm, arch=90)
        assert found.kernel == kernel
        assert "no stride of 0, as k has" in dict(found.refusals)["fa3_fwd_sm90"]


def test_a_kernel_with_several_rows_gives_the_reason_of_those_for_the_dtype():
    reasons = dict(cufa.explain(Q[..., 1:], Q[..., 1:], Q, arch=90).refusals)
    rows = [spec for spec in KERNELS if spec.name == "fa2_fwd"]
    assert len(rows) > 1
    assert reasons["fa2_fwd"].startswith("needs rows")
    assert "takes" not in reasons["fa2_fwd"]


def test_a_result_without_elements_needs_no_kernel():
    found = cufa.explain(Q[:0], Q[:0], Q[:0], arch=90)
    assert (found.kernel, found.refusals) == (None, ())
    assert str(found) == "nothing runs on sm_90: the result is empty"


def test_a_call_with_too_many_tiles_is_explained():
    q = np.broadcast_to(np.zeros((), np.float16), (1 << 16, 1 << 15, 200, 8))
    found = cufa.explain(q, q, q, arch=80)
    assert found.kernel is None
    assert "a launch takes at most" in str(found)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": Q[:, :3]}, cufa.ShapeError, "k has 3 heads and v has 4"),
        ({"v": Q.astype("float32")}, cufa.DTypeError, "q is float16 and v is float32"),
        ({"window": 4}, cufa.ArgumentError, "window is 4"),
        ({"out": Q}, cufa.ArgumentError, "out shares memory with q"),
        ({"arch": 60}, cufa.ArgumentError, "arch is 60; it must be at least 70"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_a_call_that_attention_refuses_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        cufa.explain(**{"q": Q, "k": Q, "v": Q, **changed})


def test_arrays_of_other_libraries_are_explained_as_ours_are():
    class Foreign:
        def __dlpack__(self, **options: Any) -> Any:
            return Q.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return Q.__dlpack_device__()

    q = Foreign()
    for options in ({}, {"arch": 90, "causal": True, "algorithm": "fa1"}):
        assert cufa.explain(q, q, q, **options) == cufa.explain(Q, Q, Q, **options)


def test_asking_about_a_card_loads_no_gpu_library():
    code = (
        "import sys, numpy as np, cufa; q = np.zeros((3, 64), 'float16')\n"
        "print(cufa.explain(q, q, q, arch=90))\n"
        "print(*{'cupy', 'cuda.core', 'cuda.bindings'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, check=True, capture_output=True, text=True
    )
    first, *_, last = done.stdout.splitlines()
    assert "on sm_90" in first
    assert last == ""


@pytest.mark.gpu
def test_arrays_on_a_card_are_explained_for_it(cupy):
    q = cupy.zeros((2, 4, 100, 64), "float16")
    found = cufa.explain(q, q, q)
    arch = int(cupy.cuda.Device().compute_capability)
    assert f"sm_{arch}" in found.device
    assert found.kernel == cufa.explain(Q, Q, Q, arch=arch).kernel
