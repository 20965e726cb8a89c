"""Time attention beside other implementations, on the same inputs in the same run.

Without a preset, every combination of the given lengths, head dims, dtypes and kinds is a problem.
How it is timed is in `cufa.tools.timing`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import cufa
from cufa import cpu
from cufa.errors import ArgumentError
from cufa.gpu.device import get_device
from cufa.gpu.registry import KERNELS
from cufa.gradients import ALGORITHMS as BACKWARD_ALGORITHMS
from cufa.options import ALGORITHMS, FLOAT_DTYPES
from cufa.tools import layer, peers, picture, ranks
from cufa.tools.console import counting, print_table
from cufa.tools.peers import PEERS, Bind, Peer
from cufa.tools.results import COLUMNS, QUANTITIES, Report, Result, describe
from cufa.tools.rigs import BACKENDS, Rig, make_rig
from cufa.tools.shapes import (
    KINDS,
    add_shape_arguments,
    check_file,
    make_workload,
    positive,
    seconds,
)
from cufa.tools.timing import Contender, Figures, compare, reason
from cufa.tools.workloads import (
    DIRECTIONS,
    HOST_AMOUNT,
    PRESETS,
    Workload,
    copies_beyond,
    draw,
)

_ALGORITHMS = tuple(a for a in ALGORITHMS if a != "auto")
#: What a problem is made of where there is no preset, by option.
_SHAPE: dict[str, Any] = {
    "seqlen": [512, 2048, 8192],
    "seqlen_q": None,
    "head_dim": [64, 128],
    "head_dim_v": None,
    "dtype": ["bfloat16"],
    "causal": "both",
    "batch": None,
    "heads": None,
    "kv_heads": None,
}
#: The same on a CPU, where all of them together take about a minute.
_HOST_SHAPE = {**_SHAPE, "seqlen": [512, 2048], "dtype": ["float32"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m cufa bench``."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="problems that have a name; see docs/tools.md")
    keys = "keys; default 512 2048 8192, on a CPU 512 2048"
    add("--seqlen", type=positive, nargs="+", metavar="N", help=keys)
    add("--seqlen-q", type=positive, metavar="N", help="queries; default as many as keys")
    add("--head-dim", type=positive, nargs="+", metavar="D", help="default 64 128")
    add("--dtype", nargs="+", choices=FLOAT_DTYPES, help="default bfloat16, on a CPU float32")
    add("--causal", choices=KINDS, help="default both")
    add_shape_arguments(parser)
    add("--only", default="", metavar="TEXT", help="problems whose title contains this")
    add("--direction", choices=DIRECTIONS, default="forward", help="default forward")
    add("--backend", choices=BACKENDS, help="default cupy if there is a GPU, else numpy")
    add("--algorithm", nargs="+", choices=_ALGORITHMS, help="of cufa; default all there are")
    names = ", ".join(peer.name for peer in PEERS)
    add("--peer", nargs="+", metavar="NAME", help=f"none, or of: {names}; default all installed")
    add("--rounds", type=positive, default=7, metavar="N", help="bursts of each; default 7")
    add(
        "--sustained",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="let each work so long before its bursts, in place of a rest",
    )
    ranks.add_arguments(parser)
    add("--json", nargs="?", const="-", metavar="FILE", help="every figure; without FILE to stdout")
    add("--markdown", metavar="FILE", help="a table for documents")
    add("--plot", metavar="FILE.png", help="a picture")


def run(options: argparse.Namespace) -> int:
    """Measure, and write what was asked for; the exit status is 1 if nothing could be measured."""
    if options.distributed:
        _check_outputs(options)
        report = ranks.measure(options, workloads)
        if report is None:
            return 0
        _write_files(report, options)
        return _finish(report, options)
    return bench(options, make_rig(options.backend, options.sustained))


def bench(options: argparse.Namespace, rig: Rig) -> int:
    """`run` on a rig."""
    works = workloads(options, rig)
    chosen, missing = peers.open_all(choose_peers(options, rig))
    _check_outputs(options)
    algorithms = options.algorithm or _all_there(rig, options.direction)
    facts = {"cufa": cufa.__version__, **rig.facts, **peers.versions()}
    if options.sustained:
        facts["sustained"] = f"{options.sustained:g} s"
    report = Report(rig.backend, facts, options.rounds, missing)
    steps = options.rounds * (len(algorithms) + len(chosen))
    with rig.stream(), counting("bench") as show:
        for number, work in enumerate(works):
            on_burst = _progress(show, number * steps, len(works) * steps)
            result = measure(rig, work, algorithms, chosen, options.rounds, on_burst)
            report.results.append(result)
            if options.preset == "gpt3" and work.direction == "forward":
                report.layer = layer.share(result, layer.time_products(rig, work, options.rounds))
            _write_files(report, options)  # a run that is stopped leaves what it has found
    return _finish(report, options)


def _finish(report: Report, options: argparse.Namespace) -> int:
    """Show what was asked for; the exit status."""
    if options.plot:
        picture.draw(report, options.plot, _quantities(options))
    if options.json == "-":
        print(json.dumps(report.as_json(), indent=1))
    else:
        _print(report)
    return 0 if any(result.figures for result in report.results) else 1


def _all_there(rig: Rig, direction: str) -> list[str]:
    """Algorithms that a rig has, and gradients by them if these are to be timed."""
    found = [a for a in _ALGORITHMS if _is_there(a, rig)]
    return found if direction == "forward" else [a for a in found if a in BACKWARD_ALGORITHMS]


def _is_there(algorithm: str, rig: Rig) -> bool:
    """Whether what a rig measures has an algorithm for anything."""
    if rig.backend == "numpy":
        return algorithm in cpu.ALGORITHMS
    device = get_device(rig.xp.cuda.runtime.getDevice())
    return algorithm == "standard" or any(
        spec.algorithm == algorithm and spec.limit(spec.dtypes[0], 1, device) is None
        for spec in KERNELS
    )


def workloads(options: argparse.Namespace, rig: Rig) -> list[Workload]:
    """The problems that the options name.

    Raises
    ------
    ArgumentError
        A preset together with a shape, heads that kv_heads do not divide, or no problem at all.
    """
    given = {name: getattr(options, name) for name in _SHAPE if getattr(options, name) is not None}
    preset = options.preset or (None if given or rig.backend == "cupy" else "cpu")
    if preset and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ArgumentError(f"--preset {preset} has shapes of its own; leave out {names}")
    works = PRESETS[preset]() if preset else _combinations(given, rig.backend)
    if options.direction != "forward":  # whose results nobody passes an array for
        works = [replace(work, direction=options.direction) for work in works if not work.out]
    found = [work for work in works if options.only in str(work)]
    if not found:
        raise ArgumentError(f"--only is {options.only!r}, which is in no title of a problem")
    return found


def _combinations(given: dict[str, Any], backend: str) -> list[Workload]:
    host = backend == "numpy"
    shape = {**(_HOST_SHAPE if host else _SHAPE), **given}
    amount = HOST_AMOUNT if host else {}
    each = product(shape["dtype"], shape["head_dim"], KINDS[shape["causal"]], shape["seqlen"])
    names = ("batch", "heads", "kv_heads", "seqlen_q", "head_dim_v")
    fixed = {name: shape[name] for name in names} | amount
    return [make_workload(n, d, dtype=dtype, causal=c, **fixed) for dtype, d, c, n in each]


def choose_peers(options: argparse.Namespace, rig: Rig) -> list[Peer]:
    """The peers that the options name; the preset claims has none unless they are named.

    Raises
    ------
    ArgumentError
        A name that no peer of the backend has, or none together with others.
    """
    known = {peer.name: peer for peer in PEERS if peer.backend == rig.backend}
    names = options.peer or (["none"] if options.preset == "claims" else list(known))
    if names == ["none"]:
        return []
    if "none" in names:
        raise ArgumentError(
            f"--peer is {' '.join(names)}; none stands alone: leave it out, or the others"
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"--peer is {unknown[0]!r}; with {rig.backend} it must be none, or some of "
            f"{', '.join(map(repr, known))}"
        )
    return [known[name] for name in names]


def measure(
    rig: Rig,
    work: Workload,
    algorithms: Sequence[str],
    chosen: Sequence[tuple[Peer, Bind]],
    rounds: int,
    on_burst: Callable[[], Any] = lambda: None,
) -> Result:
    """One problem by cufa's algorithms and by peers, on the same arrays."""
    outcomes: dict[str, Figures | str] = {f"cufa {algorithm}": "" for algorithm in algorithms}
    outcomes |= {peer.name: "" for peer, _ in chosen}
    names = frozenset(peer.name for peer, _ in chosen)
    try:
        inputs = draw(rig.xp, work, copies_beyond(rig.cache_bytes, work))
    except MemoryError as error:
        return Result(work, dict.fromkeys(outcomes, reason(error)), names)
    contenders: list[Contender] = [
        peers.ours(algorithm, work, inputs, rig.extra_bytes) for algorithm in algorithms
    ]
    for peer, bind in chosen:
        try:
            contenders.append(peer.contender(bind, work, inputs))
        except Exception as error:  # whatever another library raises
            outcomes[peer.name] = reason(error)
    outcomes |= compare(contenders, rig.clock, rounds, on_burst)
    del inputs, contenders
    rig.release()
    peers.release()
    return Result(work, outcomes, names)


def _progress(show: Callable[[int, int], None], done: int, total: int) -> Callable[[], None]:
    """Moves the bar of the whole run by a burst, from where a problem begins."""
    bursts = count(done)

    def on_burst() -> None:
        show(next(bursts), total)

    on_burst()
    return on_burst


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise before anything is measured if what is found could not be written."""
    if options.plot:
        picture.check_format(options.plot)
    for name in ("json", "markdown", "plot"):
        path = getattr(options, name)
        if path and (name, path) != ("json", "-"):
            check_file(name, path)


def _write_files(report: Report, options: argparse.Namespace) -> None:
    if options.json and options.json != "-":
        text = json.dumps(report.as_json(), indent=1)
        Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    if options.markdown:
        Path(options.markdown).write_text(report.as_markdown(), encoding="utf-8")


def _quantities(options: argparse.Namespace) -> tuple[str, ...]:
    """The claims are on memory too."""
    return tuple(QUANTITIES) if options.preset == "claims" else tuple(QUANTITIES)[:1]


def _print(report: Report) -> None:
    print_table(describe(report), COLUMNS, report.rows())
    for line in report.refusals():
        print(line)
    if report.missing:
        print("not here:", "; ".join(f"{name} ({why})" for name, why in report.missing.items()))
    for line in layer.lines(report.layer) if report.layer else ():
        print(line)
