"""A picture of what `bench` found: a quantity against seqlen, a panel a kind of problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cufa.errors import ArgumentError
from cufa.tools.results import QUANTITIES, Report, Result, describe

#: Ten colours are told apart, and further contenders by these.
_MARKERS = "os^v"


def check_format(path: str) -> None:
    """Raise if a picture of the kind that the ending of `path` names cannot be drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    ending, known = Path(path).suffix[1:].lower(), FigureCanvasAgg.get_supported_filetypes()
    if ending and ending not in known:  # without an ending, it is PNG
        raise ArgumentError(
            f"--plot is {path}, and there are no pictures of kind {ending!r}; choose one of "
            f"{', '.join(sorted(known))}"
        )


def draw(report: Report, path: str, quantities: Sequence[str] = ("TFLOP/s",)) -> None:
    """Write a picture; the ending of `path` says of which kind.

    Each row of panels shows one of the `QUANTITIES`, each column the problems that differ in
    nothing but their lengths and batch; a line is a contender.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(report.results)
    names = list(dict.fromkeys(name for r in report.results for name in r.figures))
    columns = min(4, len(panels)) or 1
    rows_each = -(-len(panels) // columns)
    rows = rows_each * len(quantities)
    figure = Figure(figsize=(1.5 + 4 * columns, 1.2 + 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for a in axes.flat:
        a.set_visible(False)
    for i, quantity in enumerate(quantities):
        for j, (title, results) in enumerate(panels.items()):
            _panel(axes[i * rows_each + j // columns][j % columns], title, quantity, results, names)
    handles = {h.get_label(): h for a in axes.flat for h in a.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    figure.suptitle(describe(report), fontsize="small")
    figure.savefig(path, dpi=150)


def panels_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by kind; kinds of one length are left out if others have more."""
    panels: dict[str, list[Result]] = {}
    for result in results:
        panels.setdefault(result.work.family, []).append(result)
    curves = {
        title: members
        for title, members in panels.items()
        if len({result.work.seqlen_k for result in members}) > 1
    }
    return curves or panels


def _panel(a: Any, title: str, quantity: str, results: list[Result], names: list[str]) -> None:
    a.set_visible(True)
    a.set_title(title, fontsize="medium")
    a.set_xlabel("seqlen")
    a.set_ylabel(quantity)
    a.set_xscale("log", base=2)
    a.grid(alpha=0.3)
    lengths = sorted({result.work.seqlen_k for result in results})
    a.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    for number, name in enumerate(names):
        points = sorted(
            (result.work.seqlen_k, value)
            for result in results
            if name in result.figures
            and (value := QUANTITIES[quantity](result, result.figures[name])) is not None
        )
        if points:
            ours = name.startswith("cufa")
            a.plot(
                *zip(*points, strict=True),
                color=f"C{number % 10}",
                label=name,
                linestyle="-" if ours else "--",
                linewidth=2.2 if ours else 1.3,
                marker=_MARKERS[number // 10 % len(_MARKERS)],
                markersize=4,
            )
    if quantity == "TFLOP/s":
        a.set_ylim(bottom=0)
    else:
        a.set_yscale("symlog", linthresh=1)
