"""The search of `tune`: tiles are compiled, checked, and timed against each other."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, sign
from cufa.bounds import exact
from cufa.errors import BuildError, DeviceError
from cufa.gpu import tuning
from cufa.gpu.config import ANY, Config, Scores, Tuned, _Row, element_bytes
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey, make_key
from cufa.options import numpy_dtype
from cufa.problem import make_problem
from cufa.tools.rigs import Rig
from cufa.tools.timing import Contender, Figures, compare
from cufa.tools.workloads import Inputs, Workload, copies_beyond, draw, to_device

_SPILL = re.compile(r"(\d+) bytes spill")
#: Tiles of a heat, a round each beside the tile in force; and of the final, less that.
_HEAT, _FINAL = 15, 5
#: A tile replaces the one in force only if it is faster by more than this, and than both spreads.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Track:
    """What tiles are tried on.

    Parameters
    ----------
    rig : Rig
    device : Device
    attention : callable
        `cufa.attention`, or what stands in for it on `device`.
    compile : callable
        Makes a kernel ready and returns the compiler's log.
    now : callable
        Seconds.
    progress : callable
        Called now and then.
    """

    rig: Rig
    device: Device
    attention: Callable[..., Any]
    compile: Callable[[KernelKey], str]
    now: Callable[[], float] = time.monotonic
    progress: Callable[[], Any] = lambda: None


class Finding(NamedTuple):
    """The outcome of one workload. `key` has the tile that was in force before."""

    work: Workload
    key: KernelKey
    winner: Config
    #: By tile; the one in force before among them.
    finalists: dict[Config, Figures]
    #: How many tiles were timed.
    tried: int

    @property
    def gain(self) -> float:
        """How many times as fast as the tile in force before."""
        before, now = self.finalists[self.key.config], self.finalists[self.winner]
        return before.median_ms / now.median_ms


def key_of(work: Workload, device: Device, algorithm: str) -> KernelKey:
    """The kernel that serves a workload, with the tile in force."""
    dtype = numpy_dtype(work.dtype)
    shapes = (
        (1, work.heads // work.kv_heads, work.seqlen_q, work.head_dim),
        (1, 1, work.seqlen_k, work.head_dim),
        (1, 1, work.seqlen_k, work.head_dim_v),
    )
    arrays = Arrays(*(np.empty(shape, dtype) for shape in shapes))
    call = sign(arrays, work.causal, None, None, None, "bhsd", False, algorithm)
    return make_key(make_problem(call), device)


def row_of(key: KernelKey, config: Config, seqlen: int = ANY) -> _Row:
    """The row that gives a kernel a tile, for lengths up to one."""
    return _Row(
        kernel=key.kernel,
        element_bytes=element_bytes(key.kernel, key.dtype),
        arch=key.arch,
        scores=Scores.OPEN,
        causal=key.right,
        head_dim=max(key.head_dim, key.head_dim_v),
        square=key.head_dim == key.head_dim_v,
        seqlen=seqlen,
        config=config,
    )


def compiled(
    track: Track, key: KernelKey, configs: Sequence[Config], deadline: float
) -> list[Config]:
    """Those that compile without spills, and before the deadline."""

    def attempt(config: Config) -> bool:
        if track.now() > deadline:
            return False
        track.progress()
        try:
            log = track.compile(key._replace(config=config))
        except BuildError:  # an assertion of the kernel
            return False
        return not any(int(spilled) for spilled in _SPILL.findall(log))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fit = list(pool.map(attempt, configs))
    return [config for config, good in zip(configs, fit, strict=True) if good]


def is_right(track: Track, work: Workload, key: KernelKey, config: Config, algorithm: str) -> bool:
    """Whether a tile gives what the oracle gives, on a small problem that ends within tiles."""
    work = replace(
        work,
        batch=1,
        heads=2,
        kv_heads=1,
        seqlen_q=config.block_m + 37,
        seqlen_k=2 * config.block_n + 19,
    )
    host = draw(np, work)[0][:3]
    wanted = exact(*host, causal=work.causal)
    arrays = Inputs(*(to_device(track.rig.xp, a) for a in host))
    contender = _contender(track, key, config, work, [arrays], algorithm)
    try:
        with contender.around():
            out = contender.calls[0]()
    except Exception:  # no kernel, or a launch that the driver refuses
        return False
    out = np.asarray(out.get() if hasattr(out, "get") else out)
    return bool((abs(out.astype(np.float64) - wanted.out) <= wanted.out_bound).all())


def race(
    track: Track,
    work: Workload,
    key: KernelKey,
    configs: Sequence[Config],
    algorithm: str,
    rounds: int,
    deadline: float,
) -> Finding:
    """The fastest of some tiles and the one in force; heats end at the deadline, then the final.

    Every heat has the tile in force among its contenders, and heats are compared by ratios to it.
    """
    inputs = draw(track.rig.xp, work, copies_beyond(track.rig.cache_bytes, work))

    def timed(tiles: Sequence[Config], rounds: int) -> dict[Config, Figures]:
        named = {str(tile): tile for tile in tiles}
        contenders = [_contender(track, key, c, work, inputs, algorithm) for c in named.values()]
        found = compare(contenders, track.rig.clock, rounds, track.progress)
        failure = found[str(key.config)]
        if isinstance(failure, str):
            raise DeviceError(f"{work} cannot be timed with the tile in force: {failure}")
        return {named[name]: f for name, f in found.items() if isinstance(f, Figures)}

    before = key.config
    ratios: dict[Config, float] = {}
    for start in range(0, len(configs), _HEAT):
        if track.now() > deadline:
            break
        figures = timed([before, *configs[start : start + _HEAT]], 1)
        base = figures.pop(before).median_ms
        ratios |= {tile: f.median_ms / base for tile, f in figures.items()}
    finalists = timed([before, *sorted(ratios, key=ratios.__getitem__)[:_FINAL]], rounds)
    return Finding(work, key, _winner(finalists, before), finalists, 1 + len(ratios))


def _winner(finalists: dict[Config, Figures], before: Config) -> Config:
    """The fastest, unless it is not clearly faster than what there was before."""
    best = min(finalists, key=lambda tile: finalists[tile].median_ms)
    old, new = finalists[before], finalists[best]
    gain = old.median_ms / new.median_ms - 1
    return best if gain > max(_LEAST_GAIN, old.spread + new.spread) else before


def _contender(
    track: Track,
    key: KernelKey,
    config: Config,
    work: Workload,
    inputs: Sequence[Inputs],
    algorithm: str,
) -> Contender:
    rows = Tuned((row_of(key, config),), (track.device.name,))
    options = {"causal": work.causal, "algorithm": algorithm}
    return Contender(
        str(config),
        [partial(track.attention, *arrays[:3], **options) for arrays in inputs],
        around=partial(tuning.using, rows),
    )
