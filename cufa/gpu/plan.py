"""From a problem and a card to launches: which kernel, which tile, grid, bytes. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cufa.errors import UnsupportedError
from cufa.gpu.config import (
    MASK_TILES,
    Config,
    find_config,
    kind_of_scores,
    room_for_ones,
    round_up,
    smem_bytes,
    state_bytes,
)
from cufa.gpu.device import Device
from cufa.gpu.params import BACKWARD_PARAMS, PARAMS, make_params
from cufa.gpu.registry import KernelSpec, select
from cufa.gpu.tensor_map import TensorMap
from cufa.options import ITEMSIZE
from cufa.problem import Problem

MAX_GRID = (1 << 31) - 1
#: What keys and values of a section may take of L2, and how many query heads it has even so, before
#: sections are evened out: of fewer, more tiles each would be in work at once, at as many places of
#: a head's keys.
_L2_BYTES, _SECTION = 32 << 20, 8
#: What to load a key block costs, in query tiles that are computed meanwhile.
_LOAD_TILES = 2
#: Threads of a block of mask_tiles.cu, and blocks a multiprocessor.
_MASK_THREADS, _MASK_BLOCKS_PER_SM = 256, 4
#: base/config.cuh, enum DType.
_DTYPE_NUMBER = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3, None: 4}


class KernelKey(NamedTuple):
    """What a unit is compiled for. It holds no length: a growing sequence needs no new kernel."""

    kernel: str
    arch: int
    dtype: str
    head_dim: int  # rounded up to a multiple of 32, as head_dim_v
    head_dim_v: int
    aligned: bool  # rows of q, k, v and out start at multiples of 16 bytes
    left: bool  # keys are bounded on the left of the diagonal
    right: bool  # on the right: causal, or a window
    mask: bool
    bias: str | None  # its dtype
    alibi: bool
    softcap: bool
    sink: bool
    dropout: bool
    lse: bool
    fold_scale: bool
    config: Config
    #: Of the backward pass: what a kernel computes of these, and what dbias or dsink is stored in.
    dq: bool = False
    dk: bool = False
    dv: bool = False
    result: str | None = None

    @property
    def ones(self) -> bool:
        """Whether `fa3_fwd_sm90` has columns of ones behind V, for the sums of weights as they are
        in the product: not of those that dropout drops. A bias, or a mask at 128 columns, would be
        slower by them."""
        slower = self.bias or (self.mask and self.head_dim_v == 128)
        if self.kernel != "fa3_fwd_sm90" or self.dropout or slower:
            return False
        return room_for_ones(self.config, self.dtype, self.head_dim, self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        dims = self.head_dim, self.head_dim_v
        return smem_bytes(self.kernel, self.config, self.dtype, *dims, self.ones)

    @property
    def state_bytes(self) -> int:
        """Workspace of one query tile."""
        return state_bytes(self.kernel, self.config, self.dtype, self.head_dim_v)

    def defines(self) -> dict[str, int]:
        """The -D facts of base/config.cuh, without their prefix."""
        facts = self._asdict()
        for name in ("kernel", "config"):  # the source, and facts of its own
            del facts[name]
        for name in ("dtype", "bias", "result"):
            facts[name] = _DTYPE_NUMBER[facts[name]]
        facts |= self.config._asdict()
        facts["ones"] = self.ones
        facts |= {"smem_bytes": self.smem_bytes, "state_bytes": self.state_bytes}
        facts["params_bytes"] = PARAMS.itemsize
        facts["backward_params_bytes"] = BACKWARD_PARAMS.itemsize
        return {name.upper(): int(value) for name, value in facts.items()}


@dataclass(frozen=True, eq=False)
class Step:
    """One launch of `grid` blocks. `params`, shape (1,), lacks the pointers and maps only."""

    key: KernelKey
    grid: int
    params: np.ndarray[Any, Any]
    #: Of q, k and v; empty if the kernel loads without TMA.
    maps: tuple[TensorMap, ...] = ()
    #: Whether blocks take their work by tickets, which they count in an array of one uint32.
    tickets: bool = False

    @cached_property
    def packed(self) -> bytes:
        """`params` as the driver takes them."""
        return self.params.tobytes()

    @cached_property
    def threads(self) -> int:
        """Of a block."""
        return self.key.config.threads

    @cached_property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.key.smem_bytes


@dataclass(frozen=True)
class Plan:
    """The launches that solve a problem, the last one attention itself; none if its result is
    empty."""

    steps: tuple[Step, ...]
    #: What the kernels share beside the arrays, in elements of the accumulator's type.
    workspace: int = 0


def make_keys(problem: Problem, device: Device) -> tuple[KernelKey, ...]:
    """The units that a plan launches, in order.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem.
    """
    return _keys_for(select(problem, device), problem, device)


def make_key(problem: Problem, device: Device) -> KernelKey:
    """The kernel that serves a problem on a card.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    return make_keys(problem, device)[-1]


def _keys_for(spec: KernelSpec, problem: Problem, device: Device) -> tuple[KernelKey, ...]:
    """`make_keys` of a kernel that can serve the problem."""
    key = key_for(spec, problem, device)
    return (_mask_tiles_key(key), key) if key.mask and spec.mask_tiles else (key,)


def key_for(spec: KernelSpec, problem: Problem, device: Device) -> KernelKey:
    """The unit of a kernel that can serve the problem."""
    config = find_config(
        spec.name,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.seqlen_q,
        kind_of_scores(
            window=problem.band.left is not None,
            mask=problem.mask is not None,
            modified=not _only_scales(problem) or problem.dropout_p > 0,
            bias=problem.bias.dtype if problem.bias else None,
        ),
        problem.band.right is not None,
        device,
    )
    return KernelKey(
        kernel=spec.name,
        arch=device.arch,
        dtype=problem.dtype,
        head_dim=round_up(problem.head_dim, 32),
        head_dim_v=round_up(problem.head_dim_v, 32),
        aligned=problem.aligned,
        left=problem.band.left is not None,
        right=problem.band.right is not None,
        mask=problem.mask is not None,
        bias=problem.bias.dtype if problem.bias else None,
        alibi=problem.alibi_slopes is not None,
        softcap=problem.softcap is not None,
        sink=problem.sink is not None,
        dropout=problem.dropout_p > 0,
        lse=problem.return_lse,
        fold_scale=_only_scales(problem) and problem.bias is None,
        config=config,
    )


def _mask_tiles_key(key: KernelKey) -> KernelKey:
    """Of the kernel that looks at masks for another's tile; one for all dtypes and head dims."""
    tile = key.config._replace(threads=_MASK_THREADS, stages=1, blocks_per_sm=_MASK_BLOCKS_PER_SM)
    bounds = {"left": key.left, "right": key.right}
    return bare_key(MASK_TILES, key.arch, tile, mask=True, **bounds)


def bare_key(kernel: str, arch: int, config: Config, **facts: Any) -> KernelKey:
    """Of a kernel that computes no attention, with what makes no difference to it always the same:
    all but the facts given."""
    off = ("aligned", "left", "right", "mask", "alibi", "softcap", "sink", "dropout", "lse")
    same = {"dtype": "float32", "head_dim": 32, "head_dim_v": 32, "bias": None, "fold_scale": True}
    every = {**dict.fromkeys(off, False), **same, **facts}
    return KernelKey(kernel=kernel, arch=arch, config=config, **every)


def _only_scales(problem: Problem) -> bool:
    """Whether only a positive factor touches scores before the bias: then, where there is none,
    they may stay raw up to the exponent. The factor times log2(e), and the reciprocal of that, must
    be ordinary float32, neither denormal nor infinite."""
    modified = problem.softcap or problem.alibi_slopes
    return not modified and 1e-30 < problem.scale < 1e30


def make_plan(problem: Problem, device: Device) -> Plan:
    """The launches for a problem on a card.

    Raises
    ------
    UnsupportedError
        No kernel serves it, or a launch would have more than 2**31 - 1 blocks.
    """
    if not problem.batch * problem.heads * problem.seqlen_q:
        return Plan(())
    spec = select(problem, device)
    *before, key = _keys_for(spec, problem, device)
    tiles = -(-problem.seqlen_q // key.config.block_m)
    heads = problem.batch * problem.heads
    blocks = ranges(tiles, heads, key, device) if key.state_bytes else tiles
    work = blocks * heads
    mask = _mask_tiles(problem, key, tiles) if before else _MaskTiles()
    mask_work = -(-mask.blocks // (_MASK_THREADS // 32))
    if work > MAX_GRID:
        raise UnsupportedError(
            f"batch {problem.batch} x {problem.heads} heads x {tiles} query tiles is {work} "
            f"blocks; a launch takes at most {MAX_GRID}: split the batch"
        )
    if mask_work > MAX_GRID:
        raise UnsupportedError(
            f"a mask of {mask.blocks} tiles takes {mask_work} blocks to look at; a launch takes at "
            f"most {MAX_GRID}: split the batch"
        )
    rows_per_block = -(-tiles // blocks) * key.config.block_m
    params = make_params(problem, blocks, rows_per_block, section(problem), mask.strides)
    step = Step(
        key,
        min(work, slots(key, device)) if spec.persistent else work,
        params,
        _maps(problem, key.config) if spec.tma else (),
        spec.persistent,
    )
    looks = (Step(k, mask_work, params) for k in before)
    shared_bytes = heads * tiles * key.state_bytes + 8 * mask.words
    return Plan((*looks, step), shared_bytes // ITEMSIZE[problem.accumulator])


class _MaskTiles(NamedTuple):
    """The memory of attn/mask_tiles.cuh, in words of 8 bytes: strides by batch, head and query
    tile, 0 along what the mask is repeated along. `blocks` are those of keys, of all tiles that the
    mask tells apart, in whole words for each."""

    strides: tuple[int, int, int] = (0, 0, 0)
    words: int = 0
    blocks: int = 0


def _mask_tiles(problem: Problem, key: KernelKey, tiles: int) -> _MaskTiles:
    assert problem.mask is not None
    existing = -(-problem.seqlen_k // key.config.block_n)
    blocks = round_up(existing, 8)
    of_tile = blocks // 8 + existing * key.config.block_m * 2  # a row of a block has four u32
    strides, count = [0, 0, 0], 1
    for axis, n in ((2, tiles), (1, problem.heads), (0, problem.batch)):
        if problem.mask.strides[axis]:
            strides[axis] = of_tile * count
            count *= n
    return _MaskTiles((strides[0], strides[1], strides[2]), of_tile * count, blocks * count)


def slots(key: KernelKey, device: Device) -> int:
    """Blocks that a card has room for at once."""
    return device.sm_count * key.config.blocks_per_sm


def _maps(problem: Problem, config: Config) -> tuple[TensorMap, ...]:
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n}
    return tuple(TensorMap.of_rows(getattr(problem, name), n) for name, n in rows.items())


def section(problem: Problem) -> int:
    """How many query heads, of those of all batches, are worked on together.

    As many as have keys and values that fit L2 together, or 8 if fewer have, in whole groups that
    share a key/value head. Where up to twice as many sections would all be of one size, those.
    """
    bytes_per_key = (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    fitting = _L2_BYTES // max(1, problem.seqlen_k * bytes_per_key)
    kv_heads = max(1, problem.batch * problem.kv_heads)
    groups = min(kv_heads, max(fitting, -(-_SECTION // problem.group)))
    sections = -(-kv_heads // groups)
    even = (n for n in range(sections, 2 * kv_heads // groups + 1) if kv_heads % n == 0)
    return problem.group * -(-kv_heads // next(even, sections))


def ranges(tiles: int, heads: int, key: KernelKey, device: Device) -> int:
    """Into how many ranges a block each takes the `tiles` query tiles of each of `heads` heads.

    As many as it takes for the card to be full: one more range loads all keys once more. Where
    keys are bounded on the right, later ranges take longer: then eight times as many, so that
    short ones fill up beside long ones.
    """
    room = slots(key, device)
    if key.right:
        wanted = -(-8 * room // heads)
        return -(-tiles // -(-tiles // min(tiles, wanted)))
    best = min(
        range(1, min(tiles, -(-2 * room // heads)) + 1),
        key=lambda n: -(-heads * n // room) * (-(-tiles // n) + _LOAD_TILES),
    )
    return -(-tiles // -(-tiles // best))
