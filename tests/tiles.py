"""Every tile of the config table, by the problems that take it, and samples of units for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from allpairspy import AllPairs

from cufa.gpu.config import Config, find_config
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey
from cufa.gpu.registry import KERNELS

ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
PLAIN: dict[str, list[Any]] = {
    name: [False, True] for name in ("left", "right", "sink", "lse", "aligned")
}
MODIFIED: dict[str, list[Any]] = {
    **PLAIN,
    "mask": [False, True],
    "bias": [None, "float16", "bfloat16", "float32", "float64"],
    "alibi": [False, True],
    "softcap": [False, True],
}
#: Units compiled for each tile of an architecture.
UNITS = 2


@cache
def feature_sets(plain: bool) -> list[dict[str, Any]]:
    """Every pair of values of two features occurs in one of these."""
    features = PLAIN if plain else MODIFIED
    sets = [
        dict(zip(features, values, strict=True)) for values in AllPairs(list(features.values()))
    ]
    nothing = {"mask": False, "bias": None, "alibi": False, "softcap": False}
    for chosen in sets:
        chosen.update({name: chosen.get(name, off) for name, off in nothing.items()})
        modified = chosen["bias"] or chosen["alibi"] or chosen["softcap"]
        chosen["fold_scale"] = plain or (chosen["mask"] and not modified)
    return sets


Place = tuple[str, bool, Config]


def places(arch: int) -> dict[Place, list[tuple[str, int, int]]]:
    """By tile: the (dtype, head_dim, head_dim_v) that take it."""
    found = defaultdict(list)
    for spec in KERNELS:
        if arch < spec.min_arch:
            continue
        for dtype, d, dv, plain in product(spec.dtypes, HEAD_DIMS, HEAD_DIMS, (True, False)):
            tile = find_config(spec.name, dtype, d, dv, 1, plain, Device.of_arch(arch))
            found[spec.name, plain, tile].append((dtype, d, dv))
    return found


def units(arch: int) -> Iterator[KernelKey]:
    """Each tile of the architecture with its largest head dim, one other, and some features."""
    for i, ((kernel, plain, tile), members) in enumerate(places(arch).items()):
        fitting = [f for f in feature_sets(plain) if f["aligned"] or kernel != "fa2_fwd"]
        largest = max(members, key=lambda member: member[1] + member[2])
        others = [members[(i * 7 + arch + j * 31) % len(members)] for j in range(UNITS - 1)]
        for j, (dtype, d, dv) in enumerate([largest, *others]):
            features = fitting[(i + arch + j * 5) % len(fitting)]
            yield KernelKey(kernel, arch, dtype, d, dv, config=tile, **features)
