"""Every tile of the config table, by the problems that take it, and samples of units for each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

from allpairspy import AllPairs

from cufa.errors import UnsupportedError
from cufa.gpu import build
from cufa.gpu.backward_plan import PLAIN_TILES, plain_key
from cufa.gpu.config import (
    BWD_QUERIES_MMA,
    BWD_ROWS,
    BWD_SINK,
    LENGTHS,
    Config,
    Scores,
    find_config,
)
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey, _mask_tiles_key
from cufa.gpu.registry import BACKWARD_KERNELS, KERNELS

ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
_BOTH = [False, True]
_ENDS: dict[str, list[Any]] = {name: _BOTH for name in ("right", "sink", "lse", "aligned")}
_ANY_BOUNDS = {"left": _BOTH, **_ENDS}
_MODIFIED: dict[str, list[Any]] = {name: _BOTH for name in ("alibi", "softcap", "dropout")}
_NOT_MODIFIED: dict[str, list[Any]] = {name: [False] for name in _MODIFIED}
_DTYPES = ["float16", "bfloat16", "float32", "float64"]
#: What calls of a kind may have.
FEATURES: dict[Scores, dict[str, list[Any]]] = {
    Scores.OPEN: {"left": [False], **_ENDS},
    Scores.PLAIN: _ANY_BOUNDS,
    Scores.MASKED: {**_ANY_BOUNDS, "mask": [True]},
    Scores.MODIFIED: {**_ANY_BOUNDS, **_MODIFIED},
    Scores.BIASED: {**_ANY_BOUNDS, "bias": ["float16", "bfloat16"]},
    Scores.BIASED_32: {**_ANY_BOUNDS, "mask": _BOTH, "bias": ["float16", "bfloat16", "float32"]},
    Scores.MIXED: {
        **_ANY_BOUNDS,
        "mask": _BOTH,
        "bias": [None, *_DTYPES],
        **_MODIFIED,
    },
}
#: Of kinds whose scores have as much done to them, that which may have most.
_LAST = {
    scores: max(scores, Scores.PLAIN if scores < Scores.MASKED else Scores.MIXED)
    for scores in Scores
}
#: Kernels that take aligned arrays only.
ALIGNED = {spec.name for spec in KERNELS if spec.aligned}
#: Kernels that take what a tensor map describes only.
BY_TMA = {spec.name for spec in KERNELS if spec.tma}
#: Kernels that look at a mask first.
BY_MASK_TILES = {spec.name for spec in KERNELS if spec.mask_tiles}


@cache
def feature_sets(scores: Scores) -> list[dict[str, Any]]:
    """Every pair of values of two features occurs in one of these."""
    features: dict[str, list[Any]] = {"mask": [False], "bias": [None], **_NOT_MODIFIED}
    features |= FEATURES[scores]
    varied = {name: values for name, values in features.items() if len(values) > 1}
    fixed = {name: values[0] for name, values in features.items() if len(values) == 1}
    sets = [
        {**fixed, **dict(zip(varied, values, strict=True))}
        for values in AllPairs(list(varied.values()))
    ]
    for chosen in sets:
        modified = chosen["bias"] or chosen["alibi"] or chosen["softcap"]
        chosen["fold_scale"] = not modified and (
            scores < Scores.MODIFIED or chosen["mask"] or chosen["dropout"]
        )
    return sets


Place = tuple[str, Scores, Config]
#: dtype, head_dim, head_dim_v, causal
Member = tuple[str, int, int, bool]
Places = dict[Place, list[Member]]


@cache
def places(arch: int) -> Places:
    """By tile and kind of scores: what takes it, at some length."""
    found: dict[Place, dict[Member, None]] = defaultdict(dict)
    device = Device.of_arch(arch)
    for spec in KERNELS:
        if spec.limit(spec.dtypes[0], 1, device) is not None:
            continue
        dims = [d for d in HEAD_DIMS if d <= spec.max_head_dim]
        facts = product(spec.dtypes, dims, dims, LENGTHS, Scores, (False, True))
        for dtype, d, dv, seqlen, scores, causal in facts:
            find = partial(find_config, spec.name, dtype, d, dv, seqlen)
            tile, last = find(scores, causal, device), _LAST[scores]
            if last > scores and tile == find(last, causal, device):
                continue  # what it has is among what that is sampled with
            found[spec.name, scores, tile][dtype, d, dv, causal] = None
    return {place: list(members) for place, members in found.items()}


def sample(arch: int, places_of: Callable[[int], Places]) -> Iterator[Place]:
    """Places of an architecture that are new, since no older one has them in the same text; of
    others each tile with one kind of scores, that which has most to it."""
    known = {
        place
        for older in ARCHS[: ARCHS.index(arch)]
        for place in places_of(older)
        if text_of(place[0], older) == text_of(place[0], arch)
    }
    most: dict[tuple[str, Config], Scores] = {}
    for kernel, scores, tile in places_of(arch):
        most[kernel, tile] = max(scores, most.get((kernel, tile), scores))
    for place in places_of(arch):
        kernel, scores, tile = place
        if place not in known or scores == most[kernel, tile]:
            yield place


def units(arch: int) -> Iterator[KernelKey]:
    """A sample with the largest head dim, which needs most registers; the features go round."""
    for i, place in enumerate(sample(arch, places)):
        kernel, scores, tile = place
        fitting = [f for f in feature_sets(scores) if f["aligned"] or kernel not in ALIGNED]
        dtype, d, dv, causal = largest(places(arch)[place])
        features = {**fitting[(i + arch) % len(fitting)], "right": causal}
        yield KernelKey(kernel, arch, dtype, d, dv, config=tile, **features)


def largest(members: list[Member]) -> Member:
    """That with the largest head dims."""
    return max(members, key=lambda member: member[1] + member[2])


def mask_units(arch: int) -> Iterator[KernelKey]:
    """What looks at masks, for each tile of each kernel that asks for it, and all bounds."""
    found = {
        (kernel, tile): member
        for (kernel, scores, tile), (member, *_) in places(arch).items()
        if kernel in BY_MASK_TILES and scores in (Scores.MASKED, Scores.MIXED)
    }
    for ((kernel, tile), (dtype, d, dv, _)), left, right in product(found.items(), _BOTH, _BOTH):
        features = {**feature_sets(Scores.MASKED)[0], "left": left, "right": right}
        yield _mask_tiles_key(KernelKey(kernel, arch, dtype, d, dv, config=tile, **features))


def text_of(kernel: str, arch: int) -> int:
    """Equal for architectures that compile the same text of a kernel."""
    return sum(arch >= step for step in steps(kernel))


@cache
def steps(kernel: str) -> set[int]:
    """The architectures by which the text of a kernel changes."""

    def read(file: str) -> tuple[str, str]:
        return file, (build.KERNELS / file).read_text()

    text = build.expand(f"{kernel}.cu", read)
    return {int(arch) for arch in re.findall(r"\bkArch\W+(\d+)", text)}


@cache
def compiled(key: KernelKey) -> tuple[bytes, str]:
    """A unit's machine code and the compiler's log, made once in a process."""
    return build.compile_key(key, verbose=True)


def name_of(key: KernelKey) -> str:
    """As a test's name."""
    tile = f"{key.config.block_m}x{key.config.block_n}"
    return f"sm_{key.arch}-{key.kernel}-{tile}-{key.dtype}-{key.head_dim}x{key.head_dim_v}"


#: What a backward kernel whose blocks own keys may be asked for: dQ, dK, dV.
WANTED = (
    (True, True, True),
    (False, True, True),
    (False, False, True),
    (False, True, False),
    (True, True, False),
    (True, False, True),
)
_ANY_SCORES = (Scores.OPEN, Scores.PLAIN, Scores.MIXED)


@cache
def backward_places(arch: int) -> Places:
    """Likewise of the kernels of the backward pass that see scores."""
    found: dict[Place, dict[Member, None]] = defaultdict(dict)
    device = Device.of_arch(arch)
    for spec in (spec for specs in BACKWARD_KERNELS.values() for spec in specs):
        dims = [d for d in HEAD_DIMS if d <= spec.max_head_dim]
        for facts in product(spec.dtypes, dims, dims, _ANY_SCORES, (False, True)):
            dtype, d, dv, scores, causal = facts
            if spec.limit(dtype, max(d, dv), device) is None:
                try:
                    tile = find_config(spec.name, dtype, d, dv, 1, scores, causal, device)
                    mixed = find_config(spec.name, dtype, d, dv, 1, Scores.MIXED, causal, device)
                except UnsupportedError:
                    continue
                if scores < Scores.MIXED and tile == mixed:
                    continue  # what it has is among what that is sampled with
                found[spec.name, scores, tile][dtype, d, dv, causal] = None
    return {place: list(members) for place, members in found.items()}


def part_of(kernel: str) -> str:
    """What the blocks of a backward kernel own."""
    parts = BACKWARD_KERNELS.items()
    return next(part for part, specs in parts if kernel in {spec.name for spec in specs})


def backward_key(member: Member, features: dict[str, Any], n: int, **fixed: Any) -> KernelKey:
    """The unit of a tile for the nth of what may be wanted."""
    dtype, d, dv, causal = member
    part = part_of(fixed["kernel"])
    dq, dk, dv_ = WANTED[n % len(WANTED)] if part == "keys" else (part == "queries", False, False)
    result = None if part != "bias" else features["bias"] or "float32"
    more = {"right": causal, "sink": False, "lse": False}
    wanted = {"dq": dq, "dk": dk, "dv": dv_, "result": result}
    bias = {} if part != "bias" else {"bias": result, "fold_scale": False}
    return KernelKey(
        dtype=dtype, head_dim=d, head_dim_v=dv, **{**features, **more, **wanted, **bias, **fixed}
    )


def backward_units(arch: int) -> Iterator[KernelKey]:
    """Of the backward pass: a sample with the largest head dim, on Hopper for all gradients; the
    features go round. Then what goes around them."""
    aligned_only = {s.name for specs in BACKWARD_KERNELS.values() for s in specs if s.aligned}
    for i, place in enumerate(sample(arch, backward_places)):
        kernel, scores, tile = place
        fitting = [f for f in feature_sets(scores) if f["aligned"] or kernel not in aligned_only]
        member, features = largest(backward_places(arch)[place]), fitting[(i + arch) % len(fitting)]
        n = 0 if arch == 90 else i + arch
        yield backward_key(member, features, n, kernel=kernel, arch=arch, config=tile)
    for i, (kernel, dtype, aligned) in enumerate(product(PLAIN_TILES, _DTYPES, _BOTH)):
        new = arch == ARCHS[0] or arch in steps(kernel)
        if not new and i % len(ARCHS) != ARCHS.index(arch):
            continue
        if kernel == BWD_QUERIES_MMA and not (aligned and dtype in _DTYPES[:2] and arch >= 80):
            continue
        dims = HEAD_DIMS[(i + arch) % 8], HEAD_DIMS[(3 * i + arch) % 8]
        dq, result = kernel == BWD_ROWS and i % 3 > 0, _DTYPES[i % 4]
        yield plain_key(kernel, arch, dtype, *dims, aligned, dq, (None, result)[kernel == BWD_SINK])
