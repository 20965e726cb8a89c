"""Find the fastest tiles for this card and your shapes, and write them to a tuning file.

Use the file by ``CUFA_TUNING=FILE`` or ``cufa.load_tuning(FILE)``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import isqrt
from typing import Any

import cufa
from cufa.errors import ArgumentError, DeviceError
from cufa.gpu import build, tuning
from cufa.gpu.config import ANY, LENGTHS, Config, Scores, Tuned, _Row, find_config, round_up
from cufa.gpu.device import Device, get_device
from cufa.gpu.registry import KERNEL_NAMES, KERNELS
from cufa.options import FLOAT_DTYPES
from cufa.tools.candidates import candidates
from cufa.tools.console import counting, print_table
from cufa.tools.race import Finding, Track, compiled, is_right, key_of, race, row_of
from cufa.tools.results import significant
from cufa.tools.rigs import make_rig
from cufa.tools.shapes import (
    KINDS,
    add_shape_arguments,
    check_file,
    make_workload,
    positive,
)
from cufa.tools.workloads import Workload

_COLUMNS = ("problem", "kernel", "before", "ms", "now", "ms", "gain", "tiles timed")
#: What compiling may take of the time for a kernel.
_COMPILING = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m cufa tune``."""
    add = parser.add_argument
    lengths, dims = [1024, 4096, 16384], [64, 128]
    add("--seqlen", type=positive, nargs="+", default=lengths, metavar="N", help="keys and queries")
    add("--head-dim", type=positive, nargs="+", default=dims, metavar="D")
    add("--dtype", choices=FLOAT_DTYPES, default="bfloat16", help="16-bit dtypes share their rows")
    add("--causal", choices=KINDS, default="both")
    add_shape_arguments(parser)
    add("--kernel", choices=KERNEL_NAMES, help="default the one that cufa.attention takes")
    add("--budget", type=positive, default=300, metavar="SECONDS", help="about; default 300")
    add("--rounds", type=positive, default=7, metavar="N", help="bursts of each in a final")
    add("--out", default="cufa_tuning.json", metavar="FILE", help="default cufa_tuning.json")


def run(options: argparse.Namespace) -> int:
    """Search, write the file, and show what was found."""
    return tune(options, _card())


def tune(options: argparse.Namespace, track: Track) -> int:
    """`run` on a track."""
    check_file("out", options.out)
    begin = track.now()
    with tuning.using(Tuned()), track.rig.stream(), counting("tune") as show:

        def progress() -> None:
            show(min(options.budget, int(track.now() - begin)), options.budget)

        track = replace(track, progress=progress)
        findings = search(options, track, begin + options.budget)
        rows, measured = table(findings, track.device)
    tuning.write(options.out, track.device, rows, measured)
    title = f"{track.device.name}, cufa {cufa.__version__}: written to {options.out}"
    print_table(title, _COLUMNS, map(_line, findings))
    return 0


def search(options: argparse.Namespace, track: Track, deadline: float) -> list[Finding]:
    """What won each workload, those of a kernel in order of their lengths."""
    algorithm = _algorithm(options.kernel)
    groups = _groups(options, track.device, algorithm)
    findings = []
    for number, works in enumerate(groups):
        work = works[0]
        key = key_of(work, track.device, algorithm)
        tiles = candidates(
            key.kernel, key.dtype, work.head_dim, work.head_dim_v, track.device, key.config
        )
        ends = _share(track, deadline, len(groups) - number)
        tiles = compiled(track, key, tiles, track.now() + _COMPILING * (ends - track.now()))
        tiles = [tile for tile in tiles if is_right(track, work, key, tile, algorithm)]
        tiles.append(key.config)  # at other lengths another may be in force
        for left, work in zip(range(len(works), 0, -1), works, strict=True):
            key = key_of(work, track.device, algorithm)
            others = [tile for tile in tiles if tile != key.config]
            until = _share(track, ends, left)
            findings.append(race(track, work, key, others, algorithm, options.rounds, until))
            track.rig.release()
    return findings


def _share(track: Track, deadline: float, parts: int) -> float:
    """When the first of some equal parts of the time that is left ends."""
    now = track.now()
    return now + max(0.0, deadline - now) / parts


def _algorithm(kernel: str | None) -> str:
    return "auto" if kernel is None else next(s.algorithm for s in KERNELS if s.name == kernel)


def _groups(options: argparse.Namespace, device: Device, algorithm: str) -> list[list[Workload]]:
    """The workloads, together those that one kernel serves, in order of their lengths."""
    names = ("batch", "heads", "kv_heads", "head_dim_v")
    fixed = {name: getattr(options, name) for name in names}
    groups = []
    # Head dims that are rounded up to the same one would share their rows.
    head_dims = {round_up(d, 32): d for d in sorted(options.head_dim)}
    for d in head_dims.values():
        for causal in KINDS[options.causal]:
            works = [
                make_workload(n, d, dtype=options.dtype, causal=causal, **fixed)
                for n in sorted({*options.seqlen})
            ]
            served = key_of(works[0], device, algorithm).kernel
            if options.kernel not in (None, served):
                raise ArgumentError(
                    f"--kernel is {options.kernel}, and {served} is what serves {works[0]} on "
                    f"{device.name}; leave it out, or choose another --dtype"
                )
            groups.append(works)
    return groups


def table(findings: Sequence[Finding], device: Device) -> tuple[list[_Row], list[Any]]:
    """The rows of a tuning file, and the figures that justify each.

    A tile holds from the geometric mean of its length and the next shorter one to that of its
    length and the next longer one, the longest one's for all beyond. Below half of the shortest
    length the table's tiles stay.
    """
    rows: list[_Row] = []
    measured: list[Any] = []
    for _, group in groupby(findings, key=lambda f: (f.key.head_dim, f.key.right)):
        found = list(group)
        key, lengths = found[0].key, [f.work.seqlen_q for f in found]
        bounds = [isqrt(a * b) for a, b in pairwise(lengths)] + [ANY]
        entries: list[tuple[int, Config, list[Any]]] = [
            *[(n, _built_in(found[0], n, device), []) for n in _below(lengths[0] // 2)],
            *[(n, f.winner, [_plain(f)]) for n, f in zip(bounds, found, strict=True)],
        ]
        for config, alike in groupby(entries, key=lambda entry: entry[1]):
            same = list(alike)
            rows.append(row_of(key, config, same[-1][0]))
            measured.append([figures for _, _, of_length in same for figures in of_length])
    return rows, measured


def _below(length: int) -> list[int]:
    """The last length of each class that the table tells apart, up to a length."""
    return [*(n - 1 for n in LENGTHS if 1 < n <= length), *([length] if length else [])]


def _built_in(finding: Finding, seqlen: int, device: Device) -> Config:
    key = finding.key
    d, dv = key.head_dim, key.head_dim_v
    return find_config(key.kernel, key.dtype, d, dv, seqlen, Scores.OPEN, key.right, device)


def _plain(finding: Finding) -> dict[str, Any]:
    """A finding as a file has it."""
    return {
        "problem": str(finding.work),
        "tried": finding.tried,
        "before": finding.key.config._asdict(),
        "tiles": [
            {**tile._asdict(), "median_ms": f.median_ms, "spread": f.spread}
            for tile, f in finding.finalists.items()
        ],
    }


def _line(finding: Finding) -> tuple[str, ...]:
    before, now = finding.key.config, finding.winner
    return (
        str(finding.work),
        finding.key.kernel,
        _tile(before),
        significant(finding.finalists[before].median_ms),
        _tile(now),
        significant(finding.finalists[now].median_ms),
        f"{finding.gain:.3f}",
        str(finding.tried),
    )


def _tile(c: Config) -> str:
    return f"{c.block_m}x{c.block_n}, {c.threads} threads, {c.stages} st, {c.blocks_per_sm} a SM"


def _card() -> Track:
    """The current device.

    Raises
    ------
    DeviceError
        There is none.
    """
    rig = make_rig()
    if rig.backend != "cupy":
        raise DeviceError("tune needs a GPU, and CuPy finds none; tiles are of GPU kernels only")
    device = get_device(rig.xp.cuda.runtime.getDevice())
    return Track(rig, device, cufa.attention, build.compile_into_cache)
