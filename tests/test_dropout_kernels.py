"""Dropout in GPU kernels: each drops the weights that `cufa.dropout_mask` says, and only those.

On emulated cards, which between them have every kernel, and on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from emulator import build
from emulator.machine import Emulator, attention, kernel_key
from emulator.run import Order, Schedule
from foreign import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa import dropout, reference
from cufa.bounds import exact
from cufa.gpu import config, launch, plan
from cufa.gpu.config import Config
from cufa.gpu.device import Device
from cufa.gpu.registry import KERNEL_NAMES, KERNELS
from cufa.options import MAX_SEQLEN
from cufa.testing import assert_within_rounding, numpy_dtype, to_numpy

SEEDS = st.integers(0, 2**64 - 1)
RATES = st.sampled_from([0.25, 0.5, 0.75]) | st.floats(2**-20, 1 - 2**-10)
SCHEDULES = st.builds(Schedule, st.sampled_from(Order), st.integers(0, 2**31 - 1))
#: Keys whose values the output tells apart.
SHOWN = 64


def a_part(of: int) -> settings:
    """One in so many of the examples."""
    return settings(max_examples=max(1, settings().max_examples // of))


class Place(NamedTuple):
    """Where attention runs by an algorithm: an emulated card, or (None) the card that there is."""

    arch: int | None
    algorithm: str
    dtype: str

    @property
    def machine(self) -> Emulator:
        """Of a place that is emulated."""
        assert self.arch is not None
        return Emulator(self.arch, sm_count=2)

    def attend(self, schedule: Schedule, *arrays: Any, **options: Any) -> tuple[Any, Any]:
        """Output and lse for NumPy arrays."""
        how = {"algorithm": self.algorithm, "return_lse": True}
        if self.arch is None:
            import cupy

            out, lse = cufa.attention(*map(cupy.asarray, arrays), **options, **how)
            return to_numpy(out), to_numpy(lse)
        machine = self.machine
        machine.schedule = schedule
        return attention(machine, *arrays, **options, **how)


def places() -> Iterator[Place]:
    """Every algorithm and dtype, by tensor cores and without them."""
    for arch in (75, 90, None):
        for spec in KERNELS:
            for dtype in spec.dtypes:
                if arch is None or not spec.limit(dtype, SHOWN, Device.of_arch(arch)):
                    yield Place(arch, spec.algorithm, dtype)


PLACES = list(dict.fromkeys(places()))


def name_of(place: Place) -> str:
    return f"{place.arch or 'card'}-{place.algorithm}-{place.dtype}"


@pytest.fixture(
    scope="module",
    params=[pytest.param(p, marks=[pytest.mark.gpu] * (p.arch is None)) for p in PLACES],
    ids=name_of,
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    if found.arch is None:
        request.getfixturevalue("hopper_cupy" if found.algorithm == "fa3" else "cupy")
    elif obstacle := build.obstacle():
        pytest.skip(obstacle)
    return found


def telling(dtype: str, heads: tuple[int, int, int], seqlen_q: int, seqlen_k: int, first: int):
    """q, k and v of equal scores, where column j of the output is the weight of key first + j."""
    batch, kv_heads, group = heads
    v = np.eye(seqlen_k, SHOWN, -first, numpy_dtype(dtype))
    q = np.zeros((batch, kv_heads * group, seqlen_q, SHOWN), dtype)
    return q, np.zeros((batch, kv_heads, seqlen_k, SHOWN), dtype), np.tile(v, (*heads[:2], 1, 1))


@a_part(5)
@given(
    seed=SEEDS, p=RATES, heads=st.tuples(*[st.integers(1, 2)] * 3), seqlen_q=st.integers(1, 200),
    seqlen_k=st.integers(1, 300), first=st.integers(0, 299), schedule=SCHEDULES,
)  # fmt: skip
def test_every_kernel_drops_what_the_mask_says(
    place, seed, p, heads, seqlen_q, seqlen_k, first, schedule
):
    first = min(first, seqlen_k - 1)
    arrays = telling(place.dtype, heads, seqlen_q, seqlen_k, first)
    options = {"dropout_p": p, "dropout_seed": seed, "causal": True}
    out, lse = place.attend(schedule, *arrays, **options)
    mask = cufa.dropout_mask(seed, (*arrays[0].shape[:3], seqlen_k), p)
    mask &= np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, bool)
    shown = mask[..., first : first + SHOWN]
    np.testing.assert_array_equal(out[..., : shown.shape[-1]] != 0, shown)
    assert not out[..., shown.shape[-1] :].any()
    assert_within_rounding((out, lse), exact(*arrays, **options))


def test_the_places_have_every_kernel():
    def kernel(place: Place) -> str:
        return kernel_key(
            place.machine, *telling(place.dtype, (1, 1, 1), 1, 1, 0), algorithm=place.algorithm
        ).kernel

    assert {kernel(place) for place in PLACES if place.arch is not None} == {*KERNEL_NAMES}


#: Tiles of fa2_fwd and fa3_fwd_sm90 in 16 bits; a tuning file may name any of them.
TILES = sorted(
    {
        (kernel.split("_")[0], row.config)
        for kernel in ("fa2_fwd", "fa3_fwd_sm90")
        for row in config._TABLE
        if (row.kernel, row.element_bytes) == (kernel, 2)
    }
)


@pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
@pytest.mark.parametrize(
    ("algorithm", "tile"), TILES, ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}-{x[2]}"
)
def test_every_tile_drops_the_same(algorithm: str, tile: Config):
    seed = int(np.random.default_rng().integers(2**64, dtype=np.uint64))
    arrays = telling("bfloat16", (1, 1, 2), 210, 200, 150)
    with mock.patch.object(plan, "find_config", return_value=tile):
        out, _ = Place(90, algorithm, "bfloat16").attend(
            Schedule(), *arrays, dropout_p=0.5, dropout_seed=seed
        )
    mask = cufa.dropout_mask(seed, (1, 2, 210, 200), 0.5)
    np.testing.assert_array_equal(out[..., :50] != 0, mask[..., 150:])


# On a card its tiles are others with dropout. float16 and bfloat16 have the same float32 sums.
@pytest.mark.parametrize(
    "place", [p for p in PLACES if p.arch and p.dtype != "bfloat16"], indirect=True, ids=name_of
)
@a_part(10)
@given(
    seqlen_q=st.integers(1, 150), seqlen_k=st.integers(1, 300), schedule=SCHEDULES,
    data=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_lse_has_the_same_bits_as_without(place, seqlen_q, seqlen_k, schedule, data):
    random = np.random.default_rng(data)
    shapes = [(1, n, SHOWN) for n in (seqlen_q, seqlen_k, seqlen_k)]
    arrays = [random.standard_normal(shape).astype(numpy_dtype(place.dtype)) for shape in shapes]
    options = {"dropout_p": 0.5, "dropout_seed": data, "causal": True}
    key = kernel_key(place.machine, *arrays, **options, algorithm=place.algorithm)
    with mock.patch.object(plan, "find_config", return_value=key.config):
        _, lse = place.attend(schedule, *arrays, **options)
        _, want = place.attend(schedule, *arrays, causal=True)
    assert_same_bits(lse, want)


@pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("seqlen_k", [1 << 16, 1 << 24, MAX_SEQLEN])
def test_far_keys_have_masks_of_their_own(arch: int, seqlen_k: int):
    """As many as a window of 64 keeps of each row, all of one value."""
    seed, rows = 1 << 40, 70
    q, one = np.zeros((rows, 32), "float16"), np.ones((1, 32), "float16")
    k = np.broadcast_to(one, (seqlen_k, 32))  # one key and value in memory
    options = {"causal": True, "window": (63, 0), "dropout_p": 0.5, "dropout_seed": seed}
    out, _ = Place(arch, "fa2", "float16").attend(Schedule(), q, k, k, **options)
    i = np.arange(rows)[:, None]
    keys = seqlen_k - rows + i - np.arange(64)
    kept = reference.dropout_words(seed, 0, 0, i, keys) >= dropout.threshold(0.5)
    np.testing.assert_array_equal(out, np.broadcast_to(kept.sum(1)[:, None] / 32, out.shape))


@pytest.mark.parametrize("arch", [70, 80, 90, 100])
@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2"])
def test_dropout_changes_the_tile_and_not_the_kernel(arch: int, algorithm: str):
    q = np.ones((1, 1, 4096, 128), np.float16)
    found, plain = (
        cufa.explain(q, q, q, **options, algorithm=algorithm, arch=arch)
        for options in ({"dropout_p": 0.1, "dropout_seed": 0}, {})
    )
    assert (found.kernel, found.refusals) == (plain.kernel, plain.refusals)
    best = cufa.get_best_config(4096, head_dim=128, plain=False, kernel=found.kernel, arch=arch)
    assert found.config == best


def test_a_new_seed_needs_no_new_kernel_and_no_new_plan():
    machine = Place(90, "auto", "float16").machine
    q = np.ones((1, 1, 16, 64), np.float16)
    made = launch._prepare.cache_info().misses
    for seed in range(4):
        attention(machine, q, q, q, dropout_p=0.5, dropout_seed=seed)
    assert launch._prepare.cache_info().misses == made + 1
