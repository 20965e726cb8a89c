"""Tensor maps describe the arrays of a call, or the kernel that needs them says why they cannot."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cufa.arrays import Arrays, are_aligned, sign
from cufa.errors import BuildError
from cufa.gpu.device import Device
from cufa.gpu.launch import conversions_of
from cufa.gpu.registry import KERNELS
from cufa.gpu.tensor_map import MAP_BYTES, TensorMap
from cufa.problem import Problem, make_problem
from cufa.testing import Case, cases, memories

SPEC = next(spec for spec in KERNELS if spec.tma)
H200 = Device.of_arch(90)
SIZES = {"batch": 2, "kv_heads": 3, "seqlen_q": 40, "seqlen_k": 40, "rank": 4, "layout": "bhsd"}


def problem_of(q: Any, k: Any, v: Any, **options: Any) -> Problem:
    """What a call on these arrays means."""
    arrays = Arrays(q, k, v)
    defaults: dict[str, Any] = dict.fromkeys(("window", "softcap", "scale"))
    defaults |= {"causal": False, "layout": "bhsd", "return_lse": False, "algorithm": "auto"}
    call = sign(arrays, **defaults | options)
    return make_problem(call._replace(aligned=are_aligned(arrays)))


def addresses(base: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.int64]:
    """Of every element."""
    grids = np.ogrid[tuple(slice(n) for n in shape)]
    return base + sum(g * stride for g, stride in zip(grids, strides, strict=True))


#: In rows of whole 16 bytes, as a map needs them.
HALVES_IN_16_BYTES = cases(
    dtypes=["float16", "bfloat16"],
    head_dims=st.integers(1, 32).map(lambda n: 8 * n),
    features=(),
    max_elements=1 << 20,
)


@given(
    case=HALVES_IN_16_BYTES,
    rows=st.sampled_from([32, 64, 176, 256]),
)
def test_a_map_reaches_exactly_the_elements_of_the_array(case: Case, rows: int):
    problem = problem_of(*case.arrays(np), layout=case.layout)
    assume(SPEC.refusal(problem, H200) is None)
    assume(not conversions_of(problem))  # else there are maps of the copies alone
    for operand, placed in zip((problem.q, problem.k, problem.v), case.placed(np), strict=True):
        a = placed.array
        m = TensorMap.of_rows(operand, rows)
        assert m.dims[::-1] == a.shape
        found = addresses(a.ctypes.data, m.dims[::-1], (*m.strides[::-1], a.itemsize))
        np.testing.assert_array_equal(found, addresses(a.ctypes.data, a.shape, a.strides))
        assert m.box == (64, rows, 1, 1)
        assert m.dtype == case.dtype


@given(case=cases(dtypes=["float16"], features=(), q_memory=memories(), k_memory=memories()))
def test_every_call_has_maps_or_a_reason(case: Case):
    """Any other error would be the driver's, or a fault of the memory unit."""
    problem = problem_of(*case.arrays(np), layout=case.layout)
    assume(problem.seqlen_q and problem.batch)
    if SPEC.refusal(problem, H200) is None:
        for operand in (problem.q, problem.k, problem.v):
            TensorMap.of_rows(operand, 64)


@pytest.mark.gpu
@given(case=HALVES_IN_16_BYTES)
def test_the_driver_takes_every_map(cupy: Any, case: Case):
    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("the driver makes tensor maps from sm_90 on only")
    arrays = case.arrays(cupy)
    problem = problem_of(*arrays, layout=case.layout)
    assume(SPEC.refusal(problem, H200) is None)
    for operand, a in zip((problem.q, problem.k, problem.v), arrays, strict=True):
        assert len(TensorMap.of_rows(operand, 64).encoded(a.data.ptr)) == MAP_BYTES


ONE = Case(**SIZES, dtype="float16")


def strided(name: str, *strides: int) -> dict[str, Any]:
    """The fields of a problem where one operand has other strides."""
    operand = getattr(problem_of(*ONE.arrays(np)), name)
    return {name: operand._replace(strides=strides)}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        (strided("q", 16384, 2048, 64, 1), None),
        (strided("k", 1 << 38, 2048, 64, 1), None),
        (strided("q", 16384, -2048, 64, 1), r"loads by TMA, .*no negative stride, as q has"),
        (strided("k", 16384, 2048, -64, 1), r"loads by TMA, .*no negative stride, as k has"),
        (
            strided("k", 0, 2048, 64, 1),
            r"loads by TMA, .*no stride of 0, as k has where it repeats",
        ),
        (strided("v", 16384, 0, 64, 1), r"no stride of 0, as v has where it repeats"),
        (strided("v", 1 << 39, 2048, 64, 1), r"strides below 2\*\*40 bytes, and v has a longer"),
        ({"k": problem_of(*ONE.arrays(np)).k._replace(shape=(2, 3, 0, 64))}, "without elements"),
        ({"aligned": False}, "needs rows of q, k, v and out that start at multiples of 16 bytes"),
        ({"dtype": "float32"}, "takes float16 or bfloat16"),
        ({"head_dim_v": 264}, "takes head_dim up to 256"),
        ({"algorithm": "fa1"}, "is algorithm 'fa3'"),
    ],
)
def test_what_no_map_describes_is_refused_with_the_reason(changed, reason):
    refusal = SPEC.refusal(replace(problem_of(*ONE.arrays(np)), **changed), H200)
    if reason is None:
        assert refusal is None
    else:
        assert re.search(reason, refusal or "")


@pytest.mark.parametrize("arch", [75, 80, 89, 100, 120])
def test_a_kernel_of_one_architecture_serves_no_other(arch: int):
    problem = problem_of(*ONE.arrays(np))
    refusal = SPEC.refusal(problem, Device.of_arch(arch))
    assert refusal == "needs sm_90, whose own instructions it has"


def test_an_axis_of_one_element_may_have_any_stride():
    q = np.zeros((1, 1, 1, 40), np.float16)
    odd = np.lib.stride_tricks.as_strided(q, strides=(-6, 0, 1 << 45, 2))
    m = TensorMap.of_rows(problem_of(odd, odd, odd).q, 64)
    assert all(0 < s < 1 << 40 and s % 16 == 0 for s in m.strides)


LEGAL: dict[str, Any] = {
    "dtype": "float16",
    "dims": (64, 10),
    "strides": (128,),
    "box": (64, 10),
    "swizzle_bytes": 128,
}


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"dims": (64, 0)}, "dims of at least 1"),
        ({"strides": (136,)}, "multiples of 16"),
        ({"strides": (0,)}, "from 1 to below"),
        ({"strides": (-128,)}, "from 1 to below"),
        ({"strides": (1 << 40,)}, "from 1 to below"),
        ({"box": (64, 257)}, "a box of 1 to 256"),
        ({"box": (64, 0)}, "a box of 1 to 256"),
        ({"box": (64,)}, "as many axes"),
    ],
)
def test_what_the_driver_refuses_is_refused_before(changed, rule):
    TensorMap(**LEGAL)
    with pytest.raises(ValueError, match=rule):
        TensorMap(**LEGAL | changed)


class PaperDriver(ModuleType):
    """As much of `cuda.bindings.driver` as makes a map; `taken` is what it was told."""

    status = 0

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.taken: list[Any] = []
        self.cuuint64_t = self.cuuint32_t = int

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("CU"):
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda self, constant: constant})()

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        self.taken.append(arguments)
        made = np.arange(MAP_BYTES, dtype=np.uint8)
        return self.status, SimpleNamespace(getPtr=lambda: made.ctypes.data, kept=made)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = PaperDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return bindings.driver


def test_the_driver_is_told_the_map_and_the_address(driver: PaperDriver):
    m = TensorMap("bfloat16", (40, 9, 3, 2), (96, 960, 4096), (64, 176, 1, 1), 128)
    assert m.encoded(4096) == bytes(range(MAP_BYTES))
    m.encoded(8192)
    first, second = driver.taken
    assert [first[2], second[2]] == [4096, 8192]
    assert first[:2] == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 4)
    assert first[3:7] == ([40, 9, 3, 2], [96, 960, 4096], [64, 176, 1, 1], [1] * 4)
    assert first[7:] == (
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )


def test_an_error_of_the_driver_is_ours_with_the_map(driver: PaperDriver):
    driver.status = 1
    with pytest.raises(BuildError, match=r"no tensor map of TensorMap\(dtype='float16'.*0x1000: 1"):
        TensorMap(**LEGAL).encoded(4096)


def test_an_address_between_multiples_of_16_is_refused():
    with pytest.raises(ValueError, match="a multiple of 16"):
        TensorMap(**LEGAL).encoded(4104)


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BuildError, match="extra cuda12 or cuda13"):
        TensorMap(**LEGAL).encoded(4096)
