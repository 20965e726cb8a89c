"""Hold attention to the formula on random problems; a failure is shrunk to a script to paste."""

from __future__ import annotations

import argparse
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from hypothesis.configuration import set_hypothesis_home_dir
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from cufa.bounds import Error
from cufa.errors import ArgumentError
from cufa.gpu.backward_plan import PLAIN_TILES
from cufa.gpu.config import MASK_TILES
from cufa.gpu.registry import BACKWARD_KERNEL_NAMES, BACKWARD_SPECS, KERNEL_NAMES, KERNELS
from cufa.gradients import ALGORITHMS as BACKWARD_ALGORITHMS
from cufa.options import ALGORITHMS
from cufa.testing import FLOATS
from cufa.tools.backends import (
    AROUND,
    CPU_BACKWARD,
    CPU_KERNEL,
    STANDARD,
    Backend,
    find_backends,
)
from cufa.tools.console import make_console, print_table
from cufa.tools.script import make_script
from cufa.tools.search import UNLIMITED, Failure, Wish, search
from cufa.tools.workloads import DIRECTIONS

EXAMPLES = 500
_ON_CPU = (CPU_KERNEL, CPU_BACKWARD)
_ON_GPU = (*KERNEL_NAMES, *BACKWARD_KERNEL_NAMES, *AROUND)
#: By direction, those that a call in it can launch.
_LAUNCHED = {
    "forward": (CPU_KERNEL, *KERNEL_NAMES, MASK_TILES, STANDARD),
    "backward": (CPU_BACKWARD, *BACKWARD_KERNEL_NAMES, *PLAIN_TILES),
}
QUANTILES = (0.5, 0.9, 0.99, 1.0)
_QUANTILE_NAMES = ("50 %", "90 %", "99 %", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to draw and when to stop."""
    add = parser.add_argument
    add(
        "--max-examples",
        type=int,
        metavar="N",
        help=f"problems to draw; default {EXAMPLES}, and no limit with --time",
    )
    add("--time", type=float, metavar="SECONDS", help="stop drawing after so long")
    add("--seed", type=int, help="the same seed draws the same problems; default: a new one")
    add(
        "--kernel",
        action="append",
        choices=(*_ON_CPU, *_ON_GPU, STANDARD),
        help="hold only calls that launch this kernel; may be repeated",
    )
    add(
        "--algorithm",
        action="append",
        choices=ALGORITHMS,
        help="hold only this algorithm; may be repeated",
    )
    add(
        "--direction",
        choices=DIRECTIONS,
        default=DIRECTIONS[-1],
        help="hold attention, its gradients, or both; default both",
    )
    add("--dtype", action="append", choices=FLOATS, help="draw only this dtype; may be repeated")
    add(
        "--wide",
        action="store_true",
        help="on a GPU any head dims and features: most problems then compile a kernel",
    )


def run(options: argparse.Namespace) -> int:
    """Search, showing how far it is; 1 if a problem fails."""
    if options.max_examples is not None and options.max_examples < 1:
        raise ArgumentError(f"max_examples is {options.max_examples}; it must be at least 1")
    if options.time is not None and not options.time > 0:
        raise ArgumentError(f"time is {options.time:g}; it must be above 0 seconds")
    kernels = _kernels(options.kernel, options.direction)
    limit = EXAMPLES if options.time is None else UNLIMITED
    wish = Wish(
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        max_examples=options.max_examples or limit,
        seconds=options.time,
        dtypes=_dtypes(options.dtype or FLOATS, kernels),
        algorithms=_algorithms(options.algorithm, kernels, options.direction),
        kernels=kernels,
        direction=options.direction,
        wide=options.wide,
    )
    backends = _backends(kernels)
    tally = Tally(wish)
    console = make_console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)  # else it leaves one in the current folder
        if console.is_terminal:
            with Live(tally, console=console, transient=True, refresh_per_second=4):
                failure = search(backends, wish, tally)
        else:
            failure = search(backends, wish, tally)
    if failure is None and not tally.calls:
        raise ArgumentError(
            f"time is {options.time:g} seconds, and no problem was held by then; allow more"
        )
    tally.show()
    _show_missing(backends, wish)
    if failure is not None:
        _show_failure(failure)
    return 0 if failure is None else 1


def _kernels(kernels: Sequence[str] | None, direction: str) -> Sequence[str] | None:
    """Those wished for that a call in this direction can launch; None: all."""
    if kernels is None or direction == "both":
        return kernels
    found = [kernel for kernel in kernels if kernel in _LAUNCHED[direction]]
    if not found:
        verb = "computes" if len(kernels) == 1 else "compute"
        what = "no gradients" if direction == "backward" else "gradients alone"
        raise ArgumentError(
            f"direction is {direction}, and kernel is {', '.join(kernels)}, which {verb} {what}; "
            f"pass {' or '.join(_LAUNCHED[direction])}"
        )
    return found


def _backends(kernels: Collection[str] | None) -> list[Backend]:
    """Those that may run one of the kernels."""
    found = find_backends()
    on_cpu = kernels is None or bool({*_ON_CPU, STANDARD} & {*kernels})
    on_gpu = kernels is None or bool({*kernels} - {*_ON_CPU})
    backends = [b for b in found if (on_cpu if b.device is None else on_gpu)]
    if not backends:
        raise ArgumentError(
            f"kernel is {', '.join(kernels or ())}, which needs a GPU, and there is none that CuPy "
            "can use; `python -m cufa info` says what is missing"
        )
    return backends


def _dtypes(dtypes: Sequence[str], kernels: Collection[str] | None) -> list[str]:
    """Those that one of the kernels takes."""
    takes: dict[str, tuple[str, ...]] = dict.fromkeys((*_ON_CPU, STANDARD, *AROUND), FLOATS)
    for spec in (*KERNELS, *BACKWARD_SPECS):
        takes[spec.name] = (*takes.get(spec.name, ()), *spec.dtypes)
    taken = {dtype for kernel in kernels or takes for dtype in takes[kernel]}
    found = [dtype for dtype in dtypes if dtype in taken]
    if not found:
        limits = "; ".join(f"{kernel} takes {', '.join(takes[kernel])}" for kernel in kernels or ())
        raise ArgumentError(f"dtype is {', '.join(dtypes)}; {limits}")
    return found


def _algorithms(
    algorithms: Sequence[str] | None, kernels: Collection[str] | None, direction: str
) -> Sequence[str]:
    """Those wished for, else all, that can launch one of the kernels, or have gradients if these
    alone are to be held."""
    if kernels is not None:
        return _algorithms_of(kernels, algorithms)
    if direction != "backward":
        return algorithms or ALGORITHMS
    found = [a for a in algorithms or ALGORITHMS if a in BACKWARD_ALGORITHMS]
    if not found:
        given = algorithms or ()
        raise ArgumentError(
            f"direction is backward, and algorithm is {', '.join(given)}, which "
            f"{'has' if len(given) == 1 else 'have'} no gradients; "
            f"pass {' or '.join(BACKWARD_ALGORITHMS)}"
        )
    return found


def _algorithms_of(kernels: Collection[str], algorithms: Sequence[str] | None) -> Sequence[str]:
    """Those wished for that can launch one of the kernels; else the kernels' own."""
    of = {**dict.fromkeys(_ON_CPU, "fa2"), STANDARD: "standard", **AROUND}
    of |= {spec.name: spec.algorithm for spec in (*KERNELS, *BACKWARD_SPECS)}
    own = sorted({of[kernel] for kernel in kernels})
    if not algorithms:
        return own
    able = ["auto", *own] if {*own} & {"fa2", "fa3"} else own  # what "auto" chooses from
    found = [algorithm for algorithm in algorithms if algorithm in able]
    if not found:
        raise ArgumentError(
            f"algorithm is {', '.join(algorithms)}, and kernel is {', '.join(kernels)}, which "
            f"{'is' if len(kernels) == 1 else 'are'} of {', '.join(own)}; "
            f"pass {' or '.join(able)}"
        )
    return found


class Tally:
    """The errors seen so far; rich shows it while a search runs, from a thread of its own."""

    def __init__(self, wish: Wish) -> None:
        self._wish, self._start = wish, time.monotonic()
        self._lock = threading.Lock()
        self._errors: defaultdict[tuple[str, str], list[Error]] = defaultdict(list)
        #: How many were right.
        self.calls = 0
        self._wrong = 0

    def right(self, kernels: Sequence[str], dtype: str, error: Error) -> None:
        """Count a call that was right, for each of its kernels."""
        with self._lock:
            self.calls += 1
            for kernel in kernels:
                self._errors[kernel, dtype].append(error)

    def wrong(self) -> None:
        """Count one that was wrong."""
        with self._lock:
            self._wrong += 1

    def __rich__(self) -> RenderableType:
        with self._lock:
            table = Table("kernel", "dtype", "calls", "worst error, of its bound", box=None)
            for (kernel, dtype), errors in sorted(self._errors.items()):
                worst = max(error.fraction for error in errors)
                table.add_row(kernel, dtype, str(len(errors)), f"{worst:.3f}")
            return Group(self._state(), table)

    def _state(self) -> str:
        if self._wrong:
            return f"WRONG; looking for a smaller problem that fails, {self._wrong} found so far"
        seconds = time.monotonic() - self._start
        limits = []
        if self._wish.max_examples < UNLIMITED:
            limits.append(f"{self._wish.max_examples} problems")
        if self._wish.seconds is not None:
            limits.append(f"{self._wish.seconds:.0f} s")
        return (
            f"{self.calls} calls, {self.calls / max(seconds, 1e-9):.0f} a second, "
            f"{seconds:.0f} s of {' or '.join(limits)}, seed {self._wish.seed}"
        )

    def show(self) -> None:
        """Print the quantiles of the errors, each that of a call's worst element."""
        rows = []
        for (kernel, dtype), errors in sorted(self._errors.items()):
            absolute, fraction = np.quantile(np.array(errors), QUANTILES, axis=0).T
            cells = [f"{x:.3f}" for x in fraction] + [f"{x:.1e}" for x in absolute]
            rows.append((kernel, dtype, len(errors), *cells))
        title = "Errors against float64: as fractions of their bounds, and absolute"
        names = ("kernel", "dtype", "calls", *_QUANTILE_NAMES, *_QUANTILE_NAMES)
        print_table(title, names, rows)
        print(f"\nseed {self._wish.seed}, {time.monotonic() - self._start:.0f} s")


def _show_missing(backends: Sequence[Backend], wish: Wish) -> None:
    for backend in backends:
        if "standard" in wish.algorithms and backend.no_standard:
            print(f"\nstandard was not held in {backend.xp.__name__}: {backend.no_standard}")


def _show_failure(failure: Failure) -> None:
    library = failure.backend.xp.__name__
    doubt = f" ({failure.doubt})" if failure.doubt else ""
    print(f"\nWRONG: {', '.join(failure.kernels)}, {failure.case.dtype}{doubt}")
    print(f"{type(failure.error).__name__}: {failure.error}")
    print("\nThe smallest problem found that fails, as a script:\n")
    print(make_script(failure.case, library, failure.direction))
