"""The kernels of the backward pass on the CPU, as test_emulated_kernels.py has those of the forward
pass: every tile against the formula, each access checked, results full of NaN before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, cycle, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import build, coverage
from emulator.build import Unit
from emulator.machine import Emulator, attention_backward, backward_keys, emulator, watched
from emulator.run import Order, Schedule
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_emulated_kernels import ARCHS, cases_of, schedules, unlike
from tiles import backward_key, backward_places, feature_sets, name_of, part_of

import cufa
from cufa import Gradients
from cufa.gpu import backward_plan, config, plan
from cufa.gpu.backward_plan import PLAIN_TILES, plain_key
from cufa.gpu.config import BWD_QUERIES, BWD_QUERIES_MMA, BWD_ROWS, BWD_SINK, Scores, element_bytes
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey
from cufa.gpu.registry import BACKWARD_KERNELS
from cufa.gradients import NAMES
from cufa.options import FLOAT_DTYPES
from cufa.testing import CONTIGUOUS, Case, assert_gradients_within_rounding, cases

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

SPECS = [spec for specs in BACKWARD_KERNELS.values() for spec in specs]
ALIGNED = {spec.name for spec in SPECS if spec.aligned}
#: Units of each tile.
UNITS = {"fa2_bwd": 3, "fa2_bwd_tf32": 3, "fa2_bwd_dq": 3}
SMALL = 1 << 17


def first_choice(kernel: str, arch: int, dtype: str, head_dim: int) -> bool:
    """Whether no other kernel is asked before it, for aligned arrays."""
    device = Device.of_arch(arch)
    specs = BACKWARD_KERNELS[part_of(kernel)]
    able = (s.name for s in specs if s.limit(dtype, head_dim, device) is None)
    return next(able) == kernel


def sampled_units() -> Iterator[KernelKey]:
    """For each tile a few dtypes, head dims, sets of features and of wanted gradients."""
    members: dict[Any, dict[Any, None]] = defaultdict(dict)
    kinds: dict[Any, dict[Any, None]] = defaultdict(dict)
    for arch in ARCHS:
        for (kernel, scores, tile), found in backward_places(arch).items():
            for member in found:
                place = kernel, element_bytes(kernel, member[0]), tile
                members[place][arch, member] = None
                kinds[place][scores] = None
    features = {
        (kernel, scores): cycle(
            [f for f in feature_sets(scores) if f["bias"] or part_of(kernel) != "bias"]
        )
        for (kernel, *_), of_place in kinds.items()
        for scores in of_place
    }
    tiles: dict[str, Iterator[int]] = defaultdict(count)
    for place, found in members.items():
        kernel, _, tile = place
        i = next(tiles[kernel])
        fitting = sorted(found, key=lambda of: of[1][1] + of[1][2])  # small ones run fastest
        dtypes = sorted({member[0] for _, member in fitting})
        scores = kinds_of(kernel, list(kinds[place]))
        for j in range(UNITS.get(kernel, 2)):
            of_dtype = [m for m in fitting if m[1][0] == dtypes[(i + j) % len(dtypes)]]
            arch, member = of_dtype[j % len(of_dtype)]
            chosen = next(features[kernel, scores[(i + j) % len(scores)]])
            if not first_choice(kernel, arch, member[0], max(member[1:3])):
                chosen = {**chosen, "aligned": False}
            elif kernel in ALIGNED:
                chosen = {**chosen, "aligned": True}
            yield backward_key(member, chosen, i + j, kernel=kernel, arch=arch, config=tile)


def kinds_of(kernel: str, found: list[Scores]) -> list[Scores]:
    """In turn; those with most features come as often as all the others."""
    others = [kind for kind in found if kind < Scores.MIXED]
    if part_of(kernel) == "bias" or not others:
        return [Scores.MIXED]
    if Scores.MIXED not in found:
        return others
    return [kind for other in others for kind in (other, Scores.MIXED)]


SAMPLE = list(sampled_units())


def wanted_by(key: KernelKey) -> dict[str, Any]:
    """For which options a call launches this unit, and no other that sees scores."""
    part = part_of(key.kernel)
    if part == "keys":
        return {"wrt": [name for name in "qkv" if getattr(key, f"d{name}")]}
    return {"wrt": {"queries": ["q"], "bias": ["bias"]}[part]}


def saved(case: Case) -> tuple[Any, ...]:
    """All arrays of a backward pass, and dlse; the forward pass is NumPy's."""
    arrays, (dout, dlse) = case.arrays(np), case.back(np)
    out, lse = cufa.attention(*arrays, return_lse=True, **case.options(np))
    return (dout, *arrays, out, lse), dlse


def assert_right(case: Case, got: Gradients, through_lse: bool = True) -> None:
    """What is given is the formula's."""
    expected = case.exact_gradients(through_lse)
    wanted = [a is not None for a in got]
    kept = [
        Gradients(*(a if use else None for use, a in zip(wanted, part, strict=True)))
        for part in expected[:2]
    ]
    assert_gradients_within_rounding(got, expected._replace(gradients=kept[0], bounds=kept[1]))


def run_cases(key: KernelKey, mode: str, examples: int) -> None:
    """Run problems that a unit serves, and compare with the formula."""
    machine = Emulator(key.arch, mode=mode)
    how = wanted_by(key)

    @settings(max_examples=examples)
    @given(
        case=st.booleans().flatmap(lambda sink: cases_of(key._replace(sink=sink))),
        schedule=schedules,
        through_lse=st.booleans(),
    )
    def check(case: Case, schedule: Schedule, through_lse: bool) -> None:
        arrays, dlse = saved(case)
        options = {**case.options(np), **how, "dlse": dlse if through_lse else None}
        assume(key in backward_keys(machine, *arrays, **options))
        machine.schedule = schedule
        assert_right(case, attention_backward(machine, *arrays, **options), through_lse)
        assert machine.counts.bank_conflicts == 0

    with mock.patch.object(plan, "find_config", return_value=key.config):
        check()


@pytest.mark.parametrize("key", SAMPLE, ids=name_of)
def test_a_kernel_is_the_formula_and_keeps_to_its_arrays(key: KernelKey) -> None:
    run_cases(key, "checked", max(1, settings.default.max_examples // 16))


def test_every_row_of_the_table_every_dtype_and_every_feature_is_sampled() -> None:
    rows = {(row.kernel, row.element_bytes, row.config) for row in config._BACKWARD_TABLE}
    sampled = {(k.kernel, element_bytes(k.kernel, k.dtype), k.config) for k in SAMPLE}
    assert sampled == rows
    for spec in SPECS:
        keys = [k for k in SAMPLE if k.kernel == spec.name and k.dtype in spec.dtypes]
        assert {key.dtype for key in keys} == {*spec.dtypes}
        for name in ("left", "right", "mask", "alibi", "softcap"):
            assert {getattr(key, name) for key in keys} == {False, True}, name
        assert {key.bias for key in keys} >= {*FLOAT_DTYPES}
    by_keys = [key for key in SAMPLE if part_of(key.kernel) == "keys"]
    for name in ("dq", "dk", "dv"):
        assert {getattr(key, name) for key in by_keys} == {False, True}, name


def units_around(kernel: str) -> list[KernelKey]:
    """Those of a kernel that sees no scores, which the cases below run."""
    found = []
    for dtype, aligned in product(FLOAT_DTYPES, (False, True)):
        on_tensor_cores = aligned and dtype in FLOAT_DTYPES[:2]
        if kernel == BWD_QUERIES_MMA and not on_tensor_cores:
            continue
        arch = 75 if kernel == BWD_QUERIES and on_tensor_cores else 90
        for dq in (False, True) if kernel == BWD_ROWS else (False,):
            result = dtype if kernel == BWD_SINK else None
            found.append(plain_key(kernel, arch, dtype, 64, 64, aligned, dq, result))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("kernel", [*(spec.name for spec in SPECS), *PLAIN_TILES])
def test_every_line_of_a_kernel_is_executed(kernel: str) -> None:
    if kernel in PLAIN_TILES:
        covered = list(unlike(units_around(kernel)))
        run: Any = run_around
    else:
        covered = list(unlike([key for key in SAMPLE if key.kernel == kernel]))
        run = run_cases
    libraries = [build.library(Unit.of(kernel, key.defines(), "coverage")) for key in covered]
    coverage.forget(libraries)
    for key in covered:
        run(key, "coverage", 4)
    fraction, table = coverage.report(coverage.executed(libraries))
    assert fraction >= 0.95, f"{fraction:.1%} of the lines executed\n{table}"


def run_around(key: KernelKey, mode: str, examples: int) -> None:
    """Run problems that launch a unit which sees no scores."""
    machine = Emulator(key.arch, mode=mode)
    wrt = ["sink"] if key.kernel == BWD_SINK else ["q", "k"]
    wrt = wrt if key.dq or key.kernel != BWD_ROWS else ["q"]
    dims = st.sampled_from([40, 64] if key.aligned else [33, 47, 63])

    @settings(max_examples=examples)
    @given(
        case=cases(
            dtype=key.dtype,
            head_dims=dims,
            features=["causal"],
            sink=key.kernel == BWD_SINK,
            extra_dtype=key.result or "float32",
            batch=st.integers(1, 2),
            seqlen_q=st.integers(1, 70),
            seqlen_k=st.integers(1, 70),
            q_memory=Case.q_memory,
            k_memory=Case.k_memory,
            v_memory=Case.v_memory,
            max_elements=SMALL,
        ),
        through_lse=st.booleans(),
    )
    def check(case: Case, through_lse: bool) -> None:
        arrays, dlse = saved(case)
        options = {**case.options(np), "wrt": wrt, "dlse": dlse if through_lse else None}
        assume(key in backward_keys(machine, *arrays, **options))
        assert_right(case, attention_backward(machine, *arrays, **options), through_lse)

    check()


few_cases = cases(max_elements=SMALL).map(Case.few_kernels)


@settings(max_examples=settings.default.max_examples // 3)
@given(case=few_cases, through_lse=st.booleans(), deterministic=st.booleans(), names=st.data())
def test_gradients_are_those_of_the_formula(
    case: Case, through_lse: bool, deterministic: bool, names: st.DataObject
) -> None:
    """Of whole calls; empty ones too, and any strides of all arrays."""
    arrays, dlse = saved(case)
    options = {**case.options(np), "dlse": dlse if through_lse else None}
    given = [name for name in NAMES if name in "qkv" or name in options]
    wrt = names.draw(st.none() | st.lists(st.sampled_from(given), min_size=1, unique=True))
    how: dict[str, Any] = {"deterministic": deterministic, "wrt": wrt}
    got = attention_backward(emulator(90), *arrays, **options, **how)
    assert {n for n, a in zip(NAMES, got, strict=True) if a is not None} == {*(wrt or given)}
    assert_right(case, got, through_lse)


dead = {"dead_rows": True, "mask": st.just((True,) * 4), "sink": False}


@settings(max_examples=settings.default.max_examples // 8)
@given(case=cases(max_elements=SMALL, features=["mask"], **dead).map(Case.few_kernels))
def test_what_comes_back_to_a_row_without_keys_goes_nowhere(case: Case) -> None:
    (dout, q, k, v, out, lse), dlse = saved(case)
    rows = lse == -np.inf
    dout, dlse = dout.copy(), dlse.copy()
    dlse[rows] = np.nan
    dout[rows.swapaxes(-1, -2) if case.layout == "bshd" and case.rank > 2 else rows] = np.nan
    options = {**case.options(np), "dlse": dlse}
    assert_right(case, attention_backward(emulator(90), dout, q, k, v, out, lse, **options))


@settings(max_examples=settings.default.max_examples // 8)
@given(case=cases(max_elements=SMALL, dtypes=["float16", "float32"]).map(Case.few_kernels))
def test_deterministic_gradients_have_the_same_bits_in_any_order_of_threads(case: Case) -> None:
    machine, (arrays, dlse) = Emulator(90), saved(case)
    options = {**case.options(np), "dlse": dlse, "deterministic": True}
    bits = set()
    for order in Order:
        machine.schedule = Schedule(order, seed=1)
        got = attention_backward(machine, *arrays, **options)
        bits.add(b"".join(a.tobytes() for a in got if a is not None))
    assert len(bits) == 1


def test_nothing_is_added_up_atomically_where_results_are_deterministic() -> None:
    machine, (arrays, _) = Emulator(90), saved(Case(seqlen_q=40, seqlen_k=90))
    with watched(machine) as launches:
        attention_backward(machine, *arrays, deterministic=True)
    keys = [key for key, _ in launches]
    assert [key.kernel for key in keys] == ["bwd_rows", "fa2_bwd_tf32", "fa2_bwd_dq_simt"]
    assert not any(key.dq for key in keys[:2])


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": "top_left"}, {"window": (40, 30)}, {"window": (-1, 0)}],
    ids=str,
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (300, 100), (64, 321), (1, 130)])
def test_tiles_that_see_none_of_the_keys_are_not_computed(
    seqlen_q: int, seqlen_k: int, options: dict[str, Any]
) -> None:
    """dQ gets something from each tile that is computed, and from no other."""
    machine = Emulator(90)
    q, k, v = (np.ones((n, 64), np.float32) for n in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    with watched(machine) as launches:
        attention_backward(machine, out, q, k, v, out, lse, wrt=["q", "k"], **options)
    scores, keys = np.ones((seqlen_q, seqlen_k)), np.eye(seqlen_k)
    weights, _ = cufa.reference.attention(scores, keys, keys, **options)
    ((tile, additions),) = (
        (key.config, counts.executed["red.add"])
        for key, counts in launches
        if key.kernel == "fa2_bwd_tf32"
    )
    tiles = sum(
        weights[i : i + tile.block_m, j : j + tile.block_n].any()
        for i in range(0, seqlen_q, tile.block_m)
        for j in range(0, seqlen_k, tile.block_n)
    )
    assert additions == tiles * tile.block_m * 64 // 4


def test_the_workspace_is_what_the_documentation_says() -> None:
    """Numbers of the accumulator's type: of each row lse, D, in float32 whether it splits, and
    head_dim more for dQ."""
    case = Case(2, 2, 3, 130, 9, head_dim=40, head_dim_v=8)
    machine, (arrays, _) = Emulator(90), saved(case)
    sizes = []
    with mock.patch.object(machine, "workspace", side_effect=machine.workspace) as workspace:
        for wrt in (["q", "k"], ["q"]):
            attention_backward(machine, *arrays, wrt=wrt)
        sizes = [call.args for call in workspace.call_args_list]
    rows = 2 * 6 * 256
    assert sizes == [(rows * (3 + 64), "float32"), (rows * 3, "float32")]


def test_arguments_that_must_be_copied_are_and_errors_come_first() -> None:
    machine, case = emulator(90), Case(1, 2, 1, 30, 40, head_dim=40, head_dim_v=40)
    (dout, q, k, v, out, lse), dlse = saved(replace(case, sink=True, extra_dtype="float64"))
    options = replace(case, sink=True, extra_dtype="float64").options(np)
    turned = [np.asfortranarray(a) for a in (dout, q, k, v, out, lse, dlse)]
    got = attention_backward(machine, *turned[:6], dlse=turned[6], **options)
    assert_right(replace(case, sink=True, extra_dtype="float64"), got)
    with pytest.raises(cufa.UnsupportedError, match="'fa1', which has no gradients"):
        attention_backward(machine, dout, q, k, v, out, lse, algorithm="fa1")
    wide = [np.ones((4, 300), np.float32)] * 5
    with pytest.raises(cufa.UnsupportedError, match=r"(?s)no backward kernel .*head_dim up to 256"):
        attention_backward(machine, *wide, np.ones(4, np.float32))


def test_a_launch_of_too_many_blocks_is_refused() -> None:
    with pytest.raises(cufa.UnsupportedError, match="at most 2147483647"):
        backward_plan._checked(1 << 31, "bwd_rows")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_get_best_config_is_what_a_call_takes(arch: int, dtype: str) -> None:
    arrays, _ = saved(Case(seqlen_q=40, seqlen_k=40, head_dim=96, head_dim_v=96, dtype=dtype))
    best = partial(cufa.get_best_config, 40, head_dim=96, dtype=dtype, arch=arch)
    keys = backward_keys(Emulator(arch), *arrays, deterministic=True)
    assert best(direction="backward") == keys[1].config
    for key in keys[1:]:
        assert best(direction="backward", kernel=key.kernel) == key.config
    with pytest.raises(cufa.ArgumentError, match="kernel is 'fa2_fwd'"):
        best(direction="backward", kernel="fa2_fwd")


@settings(max_examples=settings.default.max_examples // 8)
@given(
    case=cases(
        max_elements=SMALL,
        scores="normal",
        v_size=1.0,
        q_memory=CONTIGUOUS,
        k_memory=CONTIGUOUS,
    ).map(Case.few_kernels),
    size=st.floats(1, 4),
)
def test_huge_scores_give_no_nan(case: Case, size: float) -> None:
    """Up to 1e30 in float32, where lse is no longer near to any score but the largest."""
    most = 10.0 ** (size * (0.7 if case.dtype == "float16" else 3.5))
    (dout, q, k, v, *_), dlse = saved(case)
    q, k = ((a.astype(np.float64) * most).astype(a.dtype) for a in (q, k))
    options = case.options(np)
    out, lse = cufa.attention(q, k, v, return_lse=True, algorithm="standard", **options)
    got = attention_backward(emulator(90), dout, q, k, v, out, lse, dlse=dlse, **options)
    assert not any(np.isnan(a).any() for a in got if a is not None)


def test_without_query_heads_nothing_comes_back() -> None:
    machine, zeros = emulator(90), np.zeros((1, 0, 8, 16), np.float32)
    k, v = np.ones((1, 2, 5, 16), np.float32), np.ones((1, 2, 5, 16), np.float32)
    bias, lse = np.ones((8, 5), np.float32), np.zeros((1, 0, 8), np.float32)
    got = attention_backward(machine, zeros, zeros, k, v, zeros, lse, bias=bias)
    for gradient, a in zip(got[:4], (zeros, k, v, bias), strict=True):
        assert gradient.shape == a.shape
        assert not gradient.any()


#: P times the cap's derivative is below float16's normal numbers, and handed over so.
STEEP_CAP = Case(
    batch=3,
    seqlen_q=1,
    seqlen_k=56,
    head_dim=8,
    head_dim_v=8,
    dtype="float16",
    scores="jumping",
    jumps=((0, 1.0),),
    scale=-0.3,
    softcap=0.5,
)
#: dV is made of denormal numbers, which dropout multiplies in the end.
DENORMAL = Case(
    seqlen_q=2,
    seqlen_k=48,
    head_dim=2,
    head_dim_v=194,
    dtype="float64",
    scores="growing",
    v_size=1e300,
    window=(11, None),
    dropout_p=0.9,
    seed=1,
)


@pytest.mark.parametrize("case", [STEEP_CAP, DENORMAL], ids=["steep cap", "denormal"])
def test_numbers_that_have_few_digits_left_are_as_near_as_they_can_be(case: Case) -> None:
    arrays, dlse = saved(case)
    got = attention_backward(emulator(90), *arrays, dlse=dlse, **case.options(np))
    assert_right(case, got)
