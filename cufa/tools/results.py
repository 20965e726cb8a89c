"""What a run of `bench` found: figures by workload and contender, as rows, JSON or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cufa.tools.timing import Figures
from cufa.tools.workloads import Workload

COLUMNS = (
    "problem",
    "contender",
    "ms",
    "TFLOP/s",
    "±",
    "GB/s",
    "extra memory",
    "host µs",
    "ratio",
)
DASH = "-"


@dataclass(frozen=True)
class Result:
    """One workload. Who raised has the reason in the place of figures."""

    work: Workload
    outcomes: Mapping[str, Figures | str]
    #: Names of the contenders that are not cufa.
    peers: frozenset[str]

    @property
    def figures(self) -> dict[str, Figures]:
        return {name: f for name, f in self.outcomes.items() if isinstance(f, Figures)}

    @property
    def best_peer_ms(self) -> float | None:
        """The least median of a peer."""
        return min((f.median_ms for n, f in self.figures.items() if n in self.peers), default=None)

    def tflops(self, figures: Figures) -> float:
        """TFLOP/s at the median."""
        return self.work.flop / figures.median_ms / 1e9

    def gbytes(self, figures: Figures) -> float:
        """GB/s at the median, of inputs and result, once each."""
        return self.work.bytes / figures.median_ms / 1e6

    def ratio(self, figures: Figures) -> float | None:
        """How many times as fast as the best peer; None if there is no peer."""
        best = self.best_peer_ms
        return None if best is None else best / figures.median_ms


@dataclass
class Report:
    """A run. `layer` is what `tools.layer` has to say of the preset gpt3."""

    backend: str
    machine: dict[str, Any]
    rounds: int
    #: Peers that cannot be used here, and why.
    missing: dict[str, str]
    results: list[Result] = field(default_factory=list)
    layer: dict[str, Any] | None = None

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Lines under `COLUMNS`; a problem is named in its first."""
        for result in self.results:
            title = str(result.work)
            for name, outcome in result.outcomes.items():
                yield (title, name, *_cells(result, outcome))
                title = ""

    def refusals(self) -> list[str]:
        """Who raised, with the reason and on how many problems, a line each."""
        problems: dict[tuple[str, str], int] = {}
        for result in self.results:
            for name, outcome in result.outcomes.items():
                if isinstance(outcome, str):
                    problems[name, outcome] = problems.get((name, outcome), 0) + 1
        return [
            f"{DASH} {name}, {count} {'problem' if count == 1 else 'problems'}: {why}"
            for (name, why), count in problems.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "backend": self.backend,
            "machine": self.machine,
            "rounds": self.rounds,
            "missing": self.missing,
            "rows": [_plain(result) for result in self.results],
            **({"layer": self.layer} if self.layer else {}),
        }

    def as_markdown(self) -> str:
        """A table for documents: a line a problem, a column a contender."""
        names = list(dict.fromkeys(name for r in self.results for name in r.outcomes))
        lines = [["problem", *names], ["---"] * (1 + len(names))]
        for result in self.results:
            found = result.figures
            cells = [_brief(result, found[n]) if n in found else DASH for n in names]
            lines.append([str(result.work), *cells])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{describe(self)} TFLOP/s, extra memory.\n\n{table}\n"


def describe(report: Report) -> str:
    """The machine and the rounds in one sentence."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return f"{machine}; medians of {report.rounds} rounds."


def mebibytes(size: int | None) -> str:
    """A size for people."""
    return DASH if size is None else f"{size / 2**20:,.1f} MiB"


def significant(value: float) -> str:
    """A number with the three or four digits that mean something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _cells(result: Result, outcome: Figures | str) -> Sequence[str]:
    if isinstance(outcome, str):
        return (DASH,) * (len(COLUMNS) - 2)
    ratio = result.ratio(outcome)
    return (
        significant(outcome.median_ms),
        significant(result.tflops(outcome)),
        f"{outcome.spread:.1%}",
        significant(result.gbytes(outcome)),
        mebibytes(outcome.extra_bytes),
        significant(outcome.median_host_us),
        DASH if ratio is None else f"{ratio:.2f}",
    )


def _brief(result: Result, figures: Figures) -> str:
    return f"{significant(result.tflops(figures))}, {mebibytes(figures.extra_bytes)}"


def _plain(result: Result) -> dict[str, Any]:
    contenders: dict[str, Any] = {}
    for name, outcome in result.outcomes.items():
        if isinstance(outcome, str):
            contenders[name] = {"reason": outcome}
            continue
        contenders[name] = {
            "ms": outcome.ms,
            "median_ms": outcome.median_ms,
            "spread": outcome.spread,
            "tflops": result.tflops(outcome),
            "gbytes": result.gbytes(outcome),
            "extra_bytes": outcome.extra_bytes,
            "host_us": outcome.median_host_us,
            "ratio": result.ratio(outcome),
        }
    work = result.work
    return {
        "problem": asdict(work),
        "title": str(work),
        "flop": work.flop,
        "bytes": work.bytes,
        "contenders": contenders,
    }


#: Panels of a picture: what is on the y axis, and its value.
QUANTITIES: dict[str, Callable[[Result, Figures], float | None]] = {
    "TFLOP/s": Result.tflops,
    "extra memory, MiB": lambda result, figures: (
        None if figures.extra_bytes is None else figures.extra_bytes / 2**20
    ),
}
