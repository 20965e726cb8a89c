"""Masks on Hopper: what mask_tiles.cu finds of each key block, and what fa3 makes of it. Hidden
blocks are neither loaded nor multiplied, whole ones are not masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator import build
from emulator.machine import Emulator, attention, emulator, kernel_key
from emulator.run import Order, Schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cufa
from cufa import reference
from cufa.bounds import exact
from cufa.gpu import warmup
from cufa.gpu.config import MASK_TILES, Config, round_up
from cufa.gpu.device import Device
from cufa.gpu.params import PARAMS, Buffers
from cufa.gpu.plan import KernelKey, Step, make_keys, make_plan
from cufa.gpu.warmup import _call, _Features
from cufa.problem import ArrayFacts, Signature, make_problem
from cufa.testing import CONTIGUOUS, Case, assert_within_rounding, cases, memories, rectangles

in_emulator = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

#: Takes a case and the order of threads.
Attend = Callable[[Case, Order], tuple[Any, Any]]
Bools = NDArray[np.bool_]
HOPPER = Device.of_arch(90)
HOW: dict[str, Any] = {"return_lse": True, "algorithm": "fa3"}
a_quarter = settings(max_examples=max(1, settings().max_examples // 4))


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest) -> Attend:
    """Attention by fa3, lse too."""
    if request.param == "emulated":
        if obstacle := build.obstacle():
            pytest.skip(obstacle)
        machine = Emulator(90)

        def on_emulator(case: Case, order: Order) -> tuple[Any, Any]:
            machine.schedule = Schedule(order, seed=1)
            return attention(machine, *case.arrays(np), **case.options(np), **HOW)

        return on_emulator
    cupy = request.getfixturevalue("hopper_cupy")
    return lambda case, order: cufa.attention(*case.arrays(cupy), **case.options(cupy), **HOW)


def masked(head_dim: int, dtype: str, **fixed: Any) -> st.SearchStrategy[Case]:
    """Masks made of rectangles, about multiples of a tile, of what one unit serves; any strides but
    one of 0 along the keys."""
    near = st.builds(
        lambda tile, n, off: tile * n + off,
        st.sampled_from([32, 64, 128]),
        st.integers(1, 3),
        st.sampled_from([0, 0, -1, 1, 4]),
    )
    lengths = near | st.integers(2, 300)
    common: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "seqlen_q": lengths,
        "seqlen_k": lengths,
        "batch": st.sampled_from([1, 1, 2]),
        "rank": 4,
        "layout": "bhsd",
        "features": (),
        "max_elements": 1 << 23,
        "scale": None,
        "mask": st.tuples(*[st.booleans()] * 3, st.just(True)),
        "extra_memory": memories(axes=4).map(
            lambda m: replace(m, step=(*m.step[:3], m.step[3] or 1))
        ),
    }
    common |= {f"{name}_memory": CONTIGUOUS for name in "qkv"}
    return cases(**(common | fixed))


BOUND = st.integers(0, 300)
CAUSAL = st.sampled_from([True, "top_left"])
VARIES = st.tuples(*[st.booleans()] * 4)
KINDS = {
    "plain": masked(64, "bfloat16"),
    "causal": masked(128, "float16", causal=CAUSAL),
    "window": masked(64, "float16", window=st.tuples(BOUND, BOUND), sink=True),
    "bounded on the left": masked(192, "bfloat16", window=st.tuples(BOUND, st.none())),
    "wide": masked(256, "bfloat16"),
    "and a bias": masked(64, "bfloat16", bias=VARIES, extra_dtype="bfloat16", causal=CAUSAL),
    "and a bias, wide": masked(256, "float16", bias=VARIES, extra_dtype="float64"),
    "a bias alone": masked(128, "float16", mask=None, bias=VARIES, extra_dtype="float16"),
    "a bias of float32": masked(
        192, "bfloat16", mask=None, bias=VARIES, extra_dtype="float32", causal=CAUSAL
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_rectangles_are_the_formula(attend: Attend, kind: str) -> None:
    @a_quarter
    @given(case=KINDS[kind], order=st.sampled_from(Order))
    def check(case: Case, order: Order) -> None:
        assert_within_rounding(attend(case, order), case.exact())

    check()


@given(
    case=masked(
        8,
        "float32",
        mask=(True,) * 4,
        dead_rows=False,
        rectangles=(),
        extra_memory=CONTIGUOUS,
    ),
    data=st.data(),
)
def test_a_rectangle_hides_what_it_says_and_leaves_the_rest(
    case: Case, data: st.DataObject
) -> None:
    painted = data.draw(rectangles(case.seqlen_q, case.seqlen_k))
    plain, mask = mask_of(case), mask_of(replace(case, rectangles=painted))
    over = np.zeros(mask.shape[2:], bool)
    for top, bottom, left, right, hidden in reversed(painted):  # later ones lie over earlier ones
        part = np.zeros_like(over)
        part[top:bottom, left:right] = True
        if hidden in (0, 1):
            assert (mask[..., part & ~over] == (hidden == 0)).all()
        over |= part
    np.testing.assert_array_equal(mask[..., ~over], plain[..., ~over])


class Looking(Emulator):
    """Looks at masks, and goes no further."""

    step: Step
    words: NDArray[np.uint64]

    def kernel(self, key: KernelKey, ordinal: int) -> Any:
        return super().kernel(key, ordinal) if key.kernel == MASK_TILES else None

    def launch(self, kernel: Any, step: Step, buffers: Buffers, seed: Any = None) -> None:
        if step.key.kernel == MASK_TILES:
            super().launch(kernel, step, buffers)
            self.step, self.words = step, buffers.workspace.view(np.uint64)

    def found(self, batch: int, head: int, tile: int, seqlen_k: int) -> tuple[Any, Bools]:
        """Of a query tile what is found of each key block, shape (blocks,), and of each of its rows
        which keys are visible, shape (blocks, block_m, block_n)."""
        params, config = self.step.params.view(PARAMS)[0], self.step.key.config
        first = int(np.dot(list(params["mask_tiles_stride"]), (batch, head, tile)))
        blocks = -(-seqlen_k // config.block_n)
        words = self.words[first:]
        told = words.view(np.uint8)[:blocks]
        bits = words[-(-blocks // 8) :].view(np.uint32)[: blocks * config.block_m * 4]
        # Bit 2 e + o of lane t of a quad is column 8 e + 2 t + o.
        spread = bits.reshape(blocks, config.block_m, 1, 4, 1) >> np.arange(
            config.block_n // 4, dtype=np.uint32
        ).reshape(-1, 1, 2)
        visible = (spread & 1).astype(bool).reshape(blocks, config.block_m, config.block_n)
        return told, visible


def of_blocks(visible: Bools, config: Config) -> Bools:
    """Rows of a tile and keys, cut into blocks: shape (blocks, rows, block_n), False past the
    end."""
    rows, keys = visible.shape
    wide = np.pad(visible, ((0, 0), (0, -keys % config.block_n)))
    return wide.reshape(rows, -1, config.block_n).swapaxes(0, 1)


def band(case: Case) -> Bools:
    """Which keys causal and window let each query see, shape (seqlen_q, seqlen_k)."""
    nothing = np.zeros((case.seqlen_q, 1)), np.zeros((case.seqlen_k, 1))
    scores = reference.scores(*nothing, causal=case.causal, window=case.window)
    return scores[0, 0] == 0


def mask_of(case: Case) -> Bools:
    """Of all batches, heads, queries and keys."""
    shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    return np.broadcast_to(case.options(np)["mask"], shape)


looking = pytest.mark.parametrize(
    "kind", ["plain", "causal", "window", "bounded on the left", "wide", "and a bias, wide"]
)


@in_emulator
@looking
def test_each_block_is_told_and_each_key_has_its_bit(kind: str) -> None:
    machine = Looking(90)

    @a_quarter
    @given(case=KINDS[kind], data=st.data())
    def check(case: Case, data: st.DataObject) -> None:
        attention(machine, *case.arrays(np), **case.options(np), **HOW)
        config, mask, bounds = machine.step.key.config, mask_of(case), band(case)
        tile = data.draw(st.integers(0, (case.seqlen_q - 1) // config.block_m))
        batch, head = (data.draw(st.integers(0, n - 1)) for n in (case.batch, case.heads))
        rows = slice(tile * config.block_m, (tile + 1) * config.block_m)
        seen = of_blocks(mask[batch, head, rows], config)
        exists = of_blocks(np.ones_like(mask[batch, head, rows]), config)
        inside = of_blocks(bounds[rows], config).any(axis=(1, 2))
        if not machine.step.params.view(PARAMS)["mask_tiles_stride"]["row"][0]:
            inside[:] = True  # other rows see other keys
        told, visible = machine.found(batch, head, tile, case.seqlen_k)
        whole, some = (seen == exists).all(axis=(1, 2)), seen.any(axis=(1, 2))
        np.testing.assert_array_equal(told, np.where(inside & some, 1 + whole, 0))
        existing = visible[:, : seen.shape[1]] & exists
        np.testing.assert_array_equal(existing[inside], seen[inside])

    check()


@in_emulator
@pytest.mark.parametrize("kind", ["plain", "causal", "window"])
def test_hidden_blocks_are_neither_loaded_nor_multiplied(kind: str) -> None:
    machine = emulator(90)

    @a_quarter
    @given(case=KINDS[kind].map(lambda case: replace(case, hidden=1.0, scores="normal", jumps=())))
    def check(case: Case) -> None:
        arrays, options = case.arrays(np), case.options(np)
        attention(machine, *arrays, **options, **HOW)
        config = kernel_key(machine, *arrays, **options, **HOW).config
        seen, bounds, tiles, blocks = mask_of(case), band(case), 0, 0
        for row in range(0, case.seqlen_q, config.block_m):
            rows = slice(row, row + config.block_m)
            inside = of_blocks(bounds[rows], config).any(axis=(1, 2))
            for head in seen[:, :, rows].reshape(-1, *seen[0, 0, rows].shape):
                needed = inside & of_blocks(head, config).any(axis=(1, 2))
                tiles, blocks = tiles + 1, blocks + max(1, needed.sum())  # one even if none is
        assert machine.counts is not None
        done = machine.counts.executed
        slabs = -(-case.head_dim // 64)
        assert done["cp.async.bulk.tensor load"] == slabs * (tiles + 2 * blocks)
        products = (case.head_dim + config.block_n) // 16  # S = Q K^T and O += P V
        assert done["wgmma.mma_async"] == config.block_m // 64 * blocks * products

    check()


@in_emulator
@a_quarter
@given(
    case=masked(64, "bfloat16", seqlen_k=st.integers(130, 400), scores="normal"),
    block=st.integers(0, 3),
    poison=st.sampled_from([np.nan, np.inf]),
)
def test_a_key_block_that_no_query_sees_is_not_read(case: Case, block: int, poison: float) -> None:
    machine, (q, k, v) = emulator(90), case.arrays(np)
    block_n = kernel_key(machine, q, k, v, **case.options(np), **HOW).config.block_n
    block = min(block, (case.seqlen_k - 1) // block_n)
    hidden, mask = slice(block_n * block, block_n * (block + 1)), np.array(mask_of(case))
    mask[..., hidden] = False
    mask[..., 0 if block else block_n] = True  # every tile has a block of its own
    expected = exact(q, k, v, mask=mask)
    k[..., hidden, :], v[..., hidden, :] = poison, poison
    assert_within_rounding(attention(machine, q, k, v, mask=mask, **HOW), expected)


@in_emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_rows_that_see_no_key_of_the_last_blocks_are_computed_once(name: str, dtype: str) -> None:
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=32, head_dim_v=32, dtype=dtype)
    arrays, visible = case.arrays(np), np.tri(300, dtype=bool)
    hides = {"mask": visible, "bias": np.where(visible, np.float16(0), -np.inf).astype("float16")}
    result = attention(emulator(90), *arrays, **{name: hides[name]}, **HOW)
    assert_within_rounding(result, exact(*arrays, causal=True))
    key = kernel_key(emulator(90), *arrays, **{name: hides[name]}, **HOW)
    rows, keys = key.config.block_m, key.config.block_n
    needed = of_tiles(visible, rows, keys) if name == "mask" else 3 * -(-300 // keys)
    counts = emulator(90).counts
    assert counts is not None
    products = (32 + keys) // 16 * rows // 64
    assert counts.executed["wgmma.mma_async"] == needed * products


def of_tiles(visible: Bools, rows: int, keys: int) -> int:
    """How many blocks some query of a tile sees."""
    tall = np.pad(visible, ((0, -len(visible) % rows), (0, -visible.shape[1] % keys)))
    blocks = tall.reshape(len(tall) // rows, rows, tall.shape[1] // keys, keys)
    return int(blocks.any(axis=(1, 3)).sum())


def call(mask: Bools, head_dim: int = 64, bias: str | None = None) -> Signature:
    """A call with a mask of four axes, whose own shape and strides it has; on no card."""
    heads, seqlen_q, seqlen_k = mask.shape[1:]
    made = _call(head_dim, "bfloat16", False, False, 1, None, _Features(bias=bias))

    def rows(seqlen: int) -> ArrayFacts:
        shape = (len(mask), heads, seqlen, head_dim)
        strides = tuple(2 * int(np.prod(shape[axis + 1 :])) for axis in range(4))
        return ArrayFacts(shape, strides, made.q.dtype, 0)

    facts = ArrayFacts(mask.shape, mask.strides, mask.dtype, 0)
    return made._replace(q=rows(seqlen_q), k=rows(seqlen_k), v=rows(seqlen_k), mask=facts)


def on_paper(shape: tuple[int, ...], varies: tuple[bool, ...]) -> Bools:
    """A mask of that shape, repeated along the axes along which it does not vary; without the
    memory that it would need."""
    strides, step = [0] * 4, 1
    for axis in reversed(range(4)):
        if varies[axis]:
            strides[axis], step = step, step * shape[axis]
    return np.lib.stride_tricks.as_strided(np.zeros(1, bool), shape, strides)


@given(
    shape=st.tuples(*[st.integers(1, 20)] * 2, st.integers(1, 99_999), st.integers(2, 99_999)),
    varies=st.tuples(*[st.booleans()] * 3, st.just(True)),
    head_dim=st.sampled_from([64, 128, 192, 256]),
    bias=st.sampled_from([None, "float32"]),
)
def test_the_workspace_is_16_bytes_a_row_of_a_block_and_a_byte_a_block(
    shape: tuple[int, ...], varies: tuple[bool, ...], head_dim: int, bias: str | None
) -> None:
    """Of what is distinct in the mask, up to whole tiles. Where blocks have 128 keys that is an
    eighth of the mask."""
    problem = make_problem(call(on_paper(shape, varies), head_dim, bias))
    *before, key = make_keys(problem, HOPPER)
    assert [k.kernel for k in before] == [MASK_TILES]
    tiles = [*shape[:2], -(-shape[2] // key.config.block_m)]
    distinct = math.prod(n for n, of in zip(tiles, varies[:3], strict=True) if of)
    blocks = -(-shape[3] // key.config.block_n)
    most = distinct * (blocks * key.config.block_m * 16 + round_up(blocks, 8))
    assert 4 * make_plan(problem, HOPPER).workspace <= most


@given(
    seqlen_k=st.integers(2, 1000),
    varies=st.tuples(*[st.booleans()] * 3, st.just(False)),
)
def test_a_mask_that_is_repeated_along_the_keys_is_for_fa2(
    seqlen_k: int, varies: tuple[bool, ...]
) -> None:
    q, k = np.zeros((2, 3, 50, 64), np.float16), np.zeros((2, 3, seqlen_k, 64), np.float16)
    mask = on_paper((2, 3, 50, seqlen_k), varies)
    found = cufa.explain(q, k, k, mask=mask, arch=90)
    assert found.kernel == "fa2_fwd"
    assert "takes no mask that is repeated along the keys" in dict(found.refusals)["fa3_fwd_sm90"]
    assert cufa.explain(q, k, k, mask=np.array(mask), arch=90).kernel == "fa3_fwd_sm90"


@pytest.mark.parametrize("causal", [False, True])
def test_warmup_compiles_what_looks_at_masks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[KernelKey] = []
    monkeypatch.setattr(warmup.build, "ensure_cached", compiled.append)
    cufa.warmup(head_dim=64, dtype="bfloat16", causal=causal, mask=True, arch=90)
    masked_call = call(np.ones((1, 1, 500, 500), bool))._replace(causal=causal)
    keys = make_keys(make_problem(masked_call), HOPPER)
    assert keys[0].kernel == MASK_TILES
    assert {*keys} <= {*compiled}
