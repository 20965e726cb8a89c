"""What the tools print through: rich where it is installed, else plain text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: Columns of a table in a file or a pipe, which have no width of their own: a line of `bench` fits.
_WIDTH = 140
#: Packages of the extra `tools`.
_PACKAGES = ("hypothesis", "matplotlib", "ml_dtypes", "rich")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install for an import that failed; None if it was of no package of `tools`."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return None
    return f"this needs the package {package}: {pip_install('tools')}"


def pip_install(extra: str) -> str:
    """The command that installs what an extra of cufa brings."""
    return f'python -m pip install "cufa[{extra}]"'


def make_console(*, stderr: bool = False) -> Console:
    """A rich Console as wide as the terminal, or `_WIDTH` columns where there is none."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH)


def make_progress(console: Console) -> Progress:
    """A rich Progress: what is done, a bar, how many of how many, time so far and to go."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, moved by calls with how much is done and how much there is to do.

    Nothing is shown without rich, or where stderr is no terminal.
    """
    try:
        console = make_console(stderr=True)
    except ModuleNotFoundError:
        console = None
    if console is None or not console.is_terminal:
        yield lambda done, total: None
        return
    with make_progress(console) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout."""
    cells = [[str(cell) for cell in row] for row in rows]
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        _print_plain(title, columns, cells)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in columns:
        table.add_column(name)
    for row in cells:
        table.add_row(*map(Text, row))
    console = make_console()
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        padded = [f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)]
        print(f"  {'  '.join(padded)}".rstrip())
