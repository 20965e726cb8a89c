"""Conformance of bulk copies and sums, of bytes side by side and of boxes of a tensor, and of the
mbarriers and groups by which they are waited for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from emulator.card import Launch, Runner, on_every_machine
from emulator.run import Access
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cufa.gpu.tensor_map import TensorMap

seeds = st.integers(0, 2**32 - 1)
a_tenth = settings(max_examples=max(1, settings().max_examples // 10))

BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}


@pytest.mark.parametrize("exact", [True, False], ids=["integers", "one sum"])
@on_every_machine
@a_tenth
@given(seeds, st.integers(1, 3), st.integers(0, 6), st.integers(1, 40))
def test_bulk_loads_and_sums(
    machine: Runner, exact: bool, seed: int, blocks: int, rounds: int, eights: int
) -> None:
    """cp_async_bulk_load, cp_reduce_async_bulk_add_f32, their groups, mbarrier_init, _arrive,
    _arrive_expect_tx, _try_wait_parity: round after round, so that every phase has both parities.

    Sums of integers are the same in any order; of other numbers one sum is, rounded to nearest.
    """
    rng = np.random.default_rng(seed)
    n = 8 * eights
    if not exact:
        blocks, rounds = 1, min(rounds, 1)
    shape = (blocks, rounds, n)

    def values(*shape: int) -> NDArray[np.float32]:
        x = rng.integers(-1000, 1000, shape) if exact else rng.standard_normal(shape)
        return x.astype(np.float32)

    source, sums = values(*shape), values(n)
    expected = {"landed": source, "sums": sums + 2 * source.sum((0, 1))}
    arrays = {
        "source": (source, Access.READ),
        "landed": (np.full_like(source, np.nan), Access.WRITE_ONCE),
        "sums": (sums, Access.ADD),
    }
    numbers = {"rounds": rounds, "n": n}
    launch = Launch(
        "ptx_bulk", arrays, numbers, grid=(blocks,), threads=128, shared_bytes=12 * n + 16
    )
    machine.check(launch, expected, seed)


@dataclass(frozen=True)
class Boxes:
    """A tensor, and boxes of it; sizes and coordinates start with the contiguous dimension."""

    dtype: str
    swizzle_bytes: int
    dims: tuple[int, ...]
    box: tuple[int, ...]
    #: Elements between the end of a row and the next row.
    gap: int
    seed: int

    @property
    def item(self) -> int:
        return BITS[self.dtype]().itemsize

    def covering(self) -> NDArray[np.int32]:
        """Coordinates of boxes in which every element is once, shape (boxes, rank)."""
        axes = zip(self.dims, self.box, strict=True)
        return np.array(list(product(*(range(0, n, b) for n, b in axes))), np.int32)

    def tensor_map(self, pitch: int) -> TensorMap:
        """For rows `pitch` elements apart."""
        strides = np.cumprod((pitch, *self.dims[1:-1])) * self.item
        return TensorMap(
            self.dtype, self.dims, tuple(map(int, strides)), self.box, self.swizzle_bytes
        )

    def shared(self, rows: NDArray[Any]) -> NDArray[np.uint32]:
        """How rows (..., box) of 16-bit or 32-bit patterns lie in shared memory, as words.

        The 16-byte chunks of a row of 128 bytes are permuted by the row's number modulo 8, of one
        of 64 bytes by half of it modulo 4 (PTX ISA: swizzling modes).
        """
        boxes, row_bytes = len(rows), self.box[0] * self.item
        chunks = rows.reshape(boxes, -1, self.box[0]).view(np.uint8)
        chunks = chunks.reshape(boxes, -1, row_bytes // 16, 16)
        row = np.arange(chunks.shape[1])[:, None]
        shift = {0: 0 * row, 64: row // 2 % 4, 128: row % 8}[self.swizzle_bytes]
        at = np.arange(row_bytes // 16) ^ shift
        placed = np.empty_like(chunks)
        placed[:, row, at] = chunks
        return placed.reshape(boxes, -1).view(np.uint32)


@st.composite
def boxes(draw: Any, rank: int, swizzle_bytes: int) -> Boxes:
    dtype = draw(st.sampled_from(sorted(BITS)))
    per_chunk = 16 // BITS[dtype]().itemsize
    chunks = swizzle_bytes // 16 or draw(st.integers(1, 4))
    small = st.integers(1, 3)
    box = (per_chunk * chunks, draw(st.integers(1, 20)), *(draw(small) for _ in range(rank - 2)))
    dims = (
        per_chunk * draw(st.integers(1, 2 * chunks + 1)),
        draw(st.integers(1, 24)),
        *(draw(small) for _ in range(rank - 2)),
    )
    gap = per_chunk * draw(st.integers(0, 2))
    return Boxes(dtype, swizzle_bytes, dims, box, gap, draw(seeds))


@pytest.mark.parametrize("swizzle_bytes", [0, 64, 128])
@pytest.mark.parametrize("rank", [4, 5])
@on_every_machine
@a_tenth
@given(st.data())
def test_boxes_of_a_tensor(machine: Runner, rank: int, swizzle_bytes: int, data: Any) -> None:
    """cp_async_bulk_tensor_4d_load, _4d_store, _5d_load, _5d_store, fence_proxy_async_shared: what
    a load finds outside the tensor is 0, on every side, and a store writes nothing there, where it
    may be: it must not begin at a negative coordinate, and no box within 16 bytes."""
    case = data.draw(boxes(rank, swizzle_bytes))
    rng = np.random.default_rng(case.seed)
    bits, shape = BITS[case.dtype], case.dims[::-1]

    def random(*shape: int) -> NDArray[Any]:
        return rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)

    store_at = case.covering()
    blocks = len(store_at)
    load_at = np.stack(
        [rng.integers(-b, n + 1, blocks) for b, n in zip(case.box, case.dims, strict=True)], -1
    )
    load_at[:, 0] -= load_at[:, 0] % (16 // case.item)

    def cut(a: NDArray[Any], corner: NDArray[Any]) -> NDArray[Any]:
        """A box of an array; 0 outside."""
        margins = [(b, b) for b in case.box[::-1]]
        at = (corner + case.box)[::-1]
        return np.pad(a, margins)[
            tuple(slice(i, i + b) for i, b in zip(at, case.box[::-1], strict=True))
        ]

    source = random(*shape[:-1], shape[-1] + case.gap)
    target = random(*shape)
    landed = np.stack([cut(source[..., : shape[-1]], corner) for corner in load_at])
    stored = np.stack([cut(target, corner) for corner in store_at])
    inside = np.stack([cut(np.ones_like(target), corner) for corner in store_at])
    given_bits = np.where(inside, stored, random(*stored.shape))
    expected = {"store_map": target, "landed": case.shared(landed)}

    def coordinates(at: NDArray[Any]) -> NDArray[np.int32]:
        return np.pad(at, [(0, 0), (0, 5 - rank)]).astype(np.int32)

    arrays = {
        "load_map": (source, Access.READ),
        "store_map": (~target, Access.WRITE_ONCE),
        "load_at": (coordinates(load_at), Access.READ),
        "store_at": (coordinates(store_at), Access.READ),
        "given": (case.shared(given_bits), Access.READ),
        "landed": (~expected["landed"], Access.WRITE_ONCE),
    }
    maps = {
        "load_map": case.tensor_map(shape[-1] + case.gap),
        "store_map": case.tensor_map(shape[-1]),
    }
    box_words = expected["landed"].shape[1]
    shared_bytes = 2 * -(-4 * box_words // 1024) * 1024 + 8
    numbers = {"rank": rank, "words": box_words}
    launch = Launch("ptx_tensor", arrays, numbers, maps, (blocks,), 128, shared_bytes)
    machine.check(launch, expected, case.seed)
