"""The GPU kernels on the CPU: every tile of the config table against the formula, under every order
of threads, with each access checked. Problem → Plan → Params → kernel, as on a card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import build, coverage
from emulator.build import Unit
from emulator.machine import Emulator, attention, emulator, kernel_key
from emulator.run import Order, Schedule
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiles import ALIGNED, BY_MASK_TILES, BY_TMA, feature_sets, name_of, places

import cufa
from cufa import reference
from cufa.bounds import exact
from cufa.gpu import config, plan
from cufa.gpu.config import MASK_TILES, Scores, element_bytes
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey, _mask_tiles_key
from cufa.gpu.registry import KERNELS
from cufa.options import FLOAT_DTYPES, ITEMSIZE
from cufa.problem import MAX_SEQLEN
from cufa.testing import (
    SCORES,
    Case,
    Memory,
    assert_within_rounding,
    cases,
    memories,
)

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

#: Between them these reach every tile: 75 has the least shared memory, 86 the least of those with
#: all kernels but Hopper's, 80 is between, 100 has rows of its own.
ARCHS = (75, 80, 86, 90, 100)
#: Fields by which hardly a line of a kernel is compiled or not.
SIZES = ("arch", "head_dim", "head_dim_v", "config")
ALGORITHM = {spec.name: spec.algorithm for spec in KERNELS}
#: Few kernels serve these.
few_cases = partial(cases, features=["causal"], head_dims=st.integers(1, 64))


def sampled_units() -> Iterator[KernelKey]:
    """For each tile a few dtypes, head dims and sets of features; all features for each kernel."""
    members: dict[Any, list[Any]] = defaultdict(list)
    for arch in ARCHS:
        for (kernel, scores, tile), found in places(arch).items():
            for dtype, *sizes in found:
                if first_choice(kernel, arch, dtype, max(sizes[:2])) != kernel:
                    continue
                size = element_bytes(kernel, dtype)
                members[kernel, scores, size, tile].append((arch, dtype, *sizes))
    next_features = {
        (kernel, scores): cycle(
            f for f in feature_sets(scores) if f["aligned"] or kernel not in ALIGNED
        )
        for kernel, scores, *_ in members
    }
    for i, ((kernel, scores, size, tile), fitting) in enumerate(members.items()):
        fitting.sort(key=lambda member: member[2] + member[3])  # small ones run fastest
        dtypes = sorted({member[1] for member in fitting})
        more = (kind for kind in Scores if kind > scores)
        shared = scores < Scores.MASKED and any(
            (kernel, kind, size, tile) in members for kind in more
        )
        for j in range(how_many(kernel, scores, shared)):
            of_dtype = [m for m in fitting if m[1] == dtypes[(i + j) % len(dtypes)]]
            arch, dtype, d, dv, causal = of_dtype[j % len(of_dtype)]
            features = {**next(next_features[kernel, scores]), "right": causal}
            yield KernelKey(kernel, arch, dtype, d, dv, config=tile, **features)


def how_many(kernel: str, scores: Scores, shared: bool) -> int:
    """Units of a tile and kind of scores; `shared`: plain ones, of a tile that has others too."""
    if scores == Scores.MIXED:
        return 5 if kernel == "fa1_fwd" else 3  # it has few tiles to have all features among
    return 1 if shared else 2


def first_choice(kernel: str, arch: int, dtype: str, head_dim: int) -> str:
    """The kernel of the same algorithm that takes aligned arrays there."""
    device = Device.of_arch(arch)
    return next(
        spec.name
        for spec in KERNELS
        if spec.algorithm == ALGORITHM[kernel] and spec.limit(dtype, head_dim, device) is None
    )


SAMPLE = list(sampled_units())


def lengths(tile: int, blocks: int) -> st.SearchStrategy[int]:
    """About multiples of a tile, or few."""
    near = st.builds(
        lambda n, off: max(1, n * tile + off), st.integers(0, blocks), st.integers(-1, 1)
    )
    return near | st.integers(1, 2 * tile)


@st.composite
def cases_of(draw: st.DrawFn, key: KernelKey) -> Case:
    """Problems that one unit serves."""
    run = 16 // ITEMSIZE[key.dtype] if key.aligned else 1
    seqlen_k = lengths(key.config.block_n, 3) | st.just(1 if key.kernel in BY_TMA else 0)
    head_dims = [
        st.sampled_from(range(d - 32 + run, d + 1, run)) for d in (key.head_dim, key.head_dim_v)
    ]
    causal: Any = draw(st.sampled_from([False, True, "top_left"])) if key.right else False
    bound = st.integers(0, 100)
    window = (
        draw(bound) if key.left else None,
        draw(bound) if key.right and (not causal or draw(st.booleans())) else None,
    )
    modified = key.bias or key.alibi or key.softcap
    scales = [None, 0.05, 1.0] if key.fold_scale else [0.0, -0.3] + [None, 1.0] * bool(modified)
    varies = st.tuples(*[st.booleans()] * 4)
    # Those that look at masks first take none that is repeated along the keys.
    repeats = not (key.mask and key.kernel in BY_MASK_TILES)
    if not repeats:
        seqlen_k = seqlen_k.map(lambda n: max(n, 2))
    return draw(
        cases(
            dtype=key.dtype,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            seqlen_q=lengths(key.config.block_m, 2),
            seqlen_k=seqlen_k,
            max_elements=1 << 22,
            causal=causal,
            window=None if window == (None, None) else window,
            mask=varies.map(lambda axes: (*axes[:3], axes[3] or not repeats)) if key.mask else None,
            bias=varies if key.bias else None,
            extra_dtype=key.bias or "float32",
            alibi=st.sampled_from([1, 2]) if key.alibi else None,
            softcap=st.sampled_from([0.5, 50.0]) if key.softcap else None,
            sink=key.sink,
            dropout_p=st.sampled_from([0.1, 0.5, 0.9]) if key.dropout else 0.0,
            scale=st.sampled_from(scales),
            scores=st.sampled_from(tuple(SCORES)),
            q_memory=placements(key, offset=not key.aligned),
            k_memory=placements(key),
            v_memory=placements(key),
            extra_memory=memories(axes=4, repeat=repeats),
        )
    )


@st.composite
def placements(draw: st.DrawFn, key: KernelKey, offset: bool = False) -> Memory:
    """Layouts with rows of adjacent elements; all at multiples of 16 bytes if the unit needs it."""
    memory = draw(memories())
    margin = draw(st.sampled_from([0, 8])) if key.aligned else memory.margin[3]
    least = 1 if key.kernel in BY_TMA else -1
    return Memory(
        memory.order,
        (*(max(step, least) for step in memory.step[:3]), 1),
        (*memory.margin[:3], margin),
        1 if offset else 0 if key.aligned else memory.offset,
    )


schedules = st.builds(Schedule, st.sampled_from(Order), st.integers(0, 2**31 - 1))


def run_cases(key: KernelKey, mode: str, examples: int) -> None:
    """Run problems that a unit serves, and compare with the formula."""
    machine = Emulator(key.arch, mode=mode)

    @settings(max_examples=examples)
    @given(case=cases_of(key), schedule=schedules, special=st.sampled_from([0, 0, np.inf, np.nan]))
    def check(case: Case, schedule: Schedule, special: float) -> None:
        arrays, options = case.arrays(np), case.options(np)
        how: dict[str, Any] = {"return_lse": key.lse, "algorithm": ALGORITHM[key.kernel]}
        assume(case.batch and kernel_key(machine, *arrays, **options, **how) == key)
        if special:  # in a query, where no mask hides it
            arrays[0][(-1,) * arrays[0].ndim] = special
        machine.schedule = schedule
        result = attention(machine, *arrays, **options, **how)
        assert_within_rounding(result, exact(*arrays, **options))
        assert machine.counts.bank_conflicts == 0

    # The tile of long sequences is tested on short ones.
    with mock.patch.object(plan, "find_config", return_value=key.config):
        check()


@pytest.mark.parametrize("key", SAMPLE, ids=name_of)
def test_a_kernel_is_the_formula_and_keeps_to_its_arrays(key: KernelKey) -> None:
    # Hopper's kernel is compiled twice as fast without optimising, and a few runs cost less.
    mode = "debug" if key.kernel in BY_TMA else "checked"
    run_cases(key, mode, max(1, settings.default.max_examples // 12))


def test_every_row_of_the_table_every_dtype_and_every_feature_is_sampled() -> None:
    rows = {(row.kernel, row.element_bytes, row.config) for row in config._TABLE}
    sampled = {(k.kernel, element_bytes(k.kernel, k.dtype), k.config) for k in SAMPLE}
    assert sampled == rows
    for spec in KERNELS:
        keys = [k for k in SAMPLE if k.kernel == spec.name and k.dtype in spec.dtypes]
        assert {key.dtype for key in keys} == {*spec.dtypes}
        for name in ("left", "right", "mask", "alibi", "softcap", "sink", "dropout", "lse"):
            assert {getattr(key, name) for key in keys} == {False, True}, name
        assert {key.bias for key in keys} == {None, *FLOAT_DTYPES}


def unlike(keys: list[KernelKey]) -> Iterator[KernelKey]:
    """A few that between them have every value of every field but `SIZES`; the next has most that
    are left."""
    facts = {key: {*enumerate(key._replace(**dict.fromkeys(SIZES)))} for key in keys}
    left = set().union(*facts.values())
    while left:
        key = max(keys, key=lambda key: len(left & facts[key]))
        yield key
        left -= facts[key]


@pytest.mark.parametrize("kernel", [*sorted({spec.name for spec in KERNELS}), MASK_TILES])
def test_every_line_of_a_kernel_is_executed(kernel: str) -> None:
    if kernel == MASK_TILES:
        masked = (key for key in SAMPLE if key.kernel in BY_MASK_TILES and key.mask)
        before = {_mask_tiles_key(key): key for key in masked}
        covered = list(unlike([*before]))
        keys = [before[key] for key in covered]
    else:
        covered = keys = list(unlike([key for key in SAMPLE if key.kernel == kernel]))
    libraries = [build.library(Unit.of(kernel, key.defines(), "coverage")) for key in covered]
    coverage.forget(libraries)
    for key in keys:
        run_cases(key, "coverage", 4)
    fraction, table = coverage.report(coverage.executed(libraries))
    assert fraction >= 0.95, f"{fraction:.1%} of the lines executed\n{table}"


@pytest.mark.parametrize(
    ("keys", "values"), [(0, -38), (0, -36), (0, -33), (-38, 0), (38, 0), (-30, -37)]
)
@given(case=few_cases(dtypes=["float32"], max_elements=1 << 20))
@settings(max_examples=settings.default.max_examples // 20)
def test_float32_is_float32_down_to_its_smallest_number(keys: int, values: int, case: Case) -> None:
    case = case.few_kernels()
    q, k, v = (a.astype(np.float64) for a in case.arrays(np))
    scaled = q * 10.0**-keys, k * 10.0**keys, v * 10.0**values
    q, k, v = (np.clip(a, -1e38, 1e38).astype(np.float32) for a in scaled)
    q, k, v = (np.where(abs(a) < np.finfo("float32").tiny, 0, a) for a in (q, k, v))
    options = case.options(np)
    result = attention(emulator(90), q, k, v, **options, return_lse=True)
    assert_within_rounding(result, exact(q, k, v, **options))


def test_what_dropout_leaves_may_be_too_little_for_the_oracle() -> None:
    """A weight of e**-1000, which float64 does not have, times 1e300."""
    case = Case(
        seqlen_q=64,
        seqlen_k=64,
        head_dim=34,
        head_dim_v=34,
        dtype="float64",
        scores="large",
        v_size=1e300,
        scale=1.0,
        dropout_p=0.9,
    )
    expected, options = case.exact(), {**case.options(np), "return_lse": True}
    out, lse = attention(emulator(75), *case.arrays(np), **options)
    assert (out[expected.out == 0] != 0).any()
    assert_within_rounding((out, lse), expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@given(case=few_cases(dtypes=["float16", "float32"], max_elements=1 << 22))
@settings(max_examples=settings.default.max_examples // 5)
def test_the_order_of_threads_does_not_show_in_a_single_bit(case: Case, algorithm: str) -> None:
    case, machine = case.few_kernels(), emulator(90)
    options = {**case.options(np), "algorithm": algorithm}
    results = []
    for order in Order:
        machine.schedule = Schedule(order, seed=1)
        results.append(attention(machine, *case.arrays(np), **options).tobytes())
    assert len({*results}) == 1


# Scores of some units; of hundreds, their own rounding shows.
@given(case=few_cases(dtypes=["float32"], scores="normal", scale=None, max_elements=1 << 20))
@settings(max_examples=settings.default.max_examples // 10)
def test_the_two_algorithms_agree_to_millionths_in_float32(case: Case) -> None:
    case, machine = case.few_kernels(), emulator(90)
    q, k, v = case.arrays(np)
    first, second = (
        attention(machine, q, k, v, **case.options(np), algorithm=algorithm)
        for algorithm in ("fa1", "fa2")
    )
    room = 2e-6 * abs(v).max(initial=0)  # a millionth for each
    assert (abs(first - second) <= room).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": "top_left"}, {"window": (40, 30)}, {"window": (-1, 0)}],
    ids=str,
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (300, 100), (64, 321), (1, 130)])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_blocks_of_keys_that_no_row_sees_are_not_computed(
    algorithm: str, seqlen_q: int, seqlen_k: int, options: dict[str, Any]
) -> None:
    machine = Emulator(90)
    q, k, v = (np.ones((n, 64), np.float16) for n in (seqlen_q, seqlen_k, seqlen_k))
    attention(machine, q, k, v, algorithm=algorithm, **options)
    tile = kernel_key(machine, q, k, v, algorithm=algorithm, **options).config
    scores, keys = np.ones((seqlen_q, seqlen_k)), np.eye(seqlen_k)
    weights, _ = reference.attention(scores, keys, keys, **options)
    starts = range(0, seqlen_k, tile.block_n)
    seen = np.stack([weights[:, j : j + tile.block_n].any(axis=1) for j in starts], axis=1)
    if algorithm == "fa3":
        # Each 64 rows of a tile: from the last block that one of them sees down to the first that
        # one of the tile sees. Where there is none, one that is all masked.
        blocks = 0
        for row in range(0, config.round_up(seqlen_q, tile.block_m), 64):
            of_tile = seen[row // tile.block_m * tile.block_m :][: tile.block_m].any(axis=0)
            own = seen[min(row, seqlen_q - 1) :][:64].any(axis=0)
            last = np.flatnonzero(own).max(initial=-1)
            blocks += max(1, last - np.argmax(of_tile) + 1)
        done = machine.counts.executed["wgmma.mma_async"]
        products = (64 + tile.block_n) // 16  # S = Q K^T and O += P V
    else:
        blocks = sum(
            seen[row : row + tile.block_m].any(axis=0).sum()
            for row in range(0, seqlen_q, tile.block_m)
        )
        done = machine.counts.executed["mma.m16n8k16"]
        products = 2 * tile.block_m * tile.block_n * 64 // (16 * 8 * 16)
    assert done == blocks * products


@pytest.mark.parametrize("rows", [1, 1300], ids=["repeated", "of each query"])
def test_a_mask_is_not_read_past_its_keys_by_windows_that_begin_there(rows: int) -> None:
    random = np.random.default_rng()
    q, k, v = (random.random((n, 64), np.float32).astype("f2") for n in (1300, 40, 40))
    options = {"mask": random.random((rows, 40)) < 0.5, "causal": "top_left", "window": (10, None)}
    result = attention(Emulator(90), q, k, v, return_lse=True, algorithm="fa3", **options)
    assert_within_rounding(result, exact(q, k, v, **options))


def test_a_mask_of_one_key_counts_as_one_that_varies_by_key() -> None:
    random = np.random.default_rng()
    q, k, v = (random.random((n, 64), np.float32).astype("f2") for n in (90, 1, 1))
    options = {"mask": random.random((90, 1)) < 0.5}
    result = attention(Emulator(90), q, k, v, return_lse=True, algorithm="fa3", **options)
    assert_within_rounding(result, exact(q, k, v, **options))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@given(
    seqlen_q=st.integers(1, 100),
    seqlen_k=st.sampled_from([1 << 24, 1 << 27, MAX_SEQLEN]),
    power=st.integers(-30, 0),
)
@settings(max_examples=settings.default.max_examples // 5)
def test_alibi_holds_where_float32_no_longer_tells_keys_apart(
    dtype: str, seqlen_q: int, seqlen_k: int, power: int
) -> None:
    """Queries that see the first keys alone, which are as far away as they can be."""
    q, row = np.ones((seqlen_q, 32), dtype), np.ones((1, 32), dtype)
    k = np.broadcast_to(row, (seqlen_k, 32))  # one key and value in memory
    options: dict[str, Any] = {"causal": "top_left", "return_lse": True}
    slopes = np.array([2.0**power], np.float32)
    result = attention(emulator(80), q, k, k, alibi_slopes=slopes, **options)
    i, j = np.ogrid[:seqlen_q, :seqlen_q]
    bias = -slopes.astype(np.float64) * (i + seqlen_k - seqlen_q - j)
    first = k[:seqlen_q]
    assert_within_rounding(result, exact(q, first, first, bias=bias, causal="top_left"))


def test_arguments_that_must_be_copied_are_and_errors_come_first() -> None:
    machine = emulator(90)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 70, 40)).astype(np.float16)
    slopes = np.array([0.5, 0.25], np.float64)
    turned = np.asfortranarray(q)  # the last axis is not contiguous
    options: dict[str, Any] = {"alibi_slopes": slopes, "return_lse": True}
    result = attention(machine, turned, k, v, **options)
    assert_within_rounding(result, exact(q, k, v, alibi_slopes=slopes))
    with pytest.raises(cufa.ArgumentError, match="out shares memory with q"):
        attention(machine, q, k, v, out=q)
