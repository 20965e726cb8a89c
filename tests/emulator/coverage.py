"""Which lines of the kernels were executed: gcov's counts, by file and line, over many units."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from emulator.build import HOST
from emulator.run import load

#: By file, then line: how often it was executed.
Lines = dict[str, dict[int, int]]


def forget(libraries: Iterable[Path]) -> None:
    """Start counting anew."""
    for library in libraries:
        library.with_suffix(".gcda").unlink(missing_ok=True)


def executed(libraries: Iterable[Path]) -> Lines:
    """The counts of units that were compiled in mode "coverage" and have run in this process.

    Of the twins of `ptx/`, and of what is not a kernel's, nothing is counted.
    """
    lines: Lines = defaultdict(lambda: defaultdict(int))
    for library in libraries:
        load(library).write_coverage()
        command = ["gcov", "--json-format", "--stdout", library.with_suffix(".o").name]
        done = subprocess.run(command, cwd=library.parent, capture_output=True, check=True)
        for file in json.loads(done.stdout)["files"]:
            path = Path(file["file"])
            if path.suffix not in (".cu", ".cuh") or path.is_relative_to(HOST):
                continue
            for line in file["lines"]:
                lines[f"{path.parent.name}/{path.name}"][line["line_number"]] += line["count"]
    return lines


def report(lines: Lines) -> tuple[float, str]:
    """The fraction of lines that were executed, and a table by file with those that were not."""
    rows, hit, total = [], 0, 0
    for file, counts in sorted(lines.items()):
        missed = sorted(line for line, count in counts.items() if not count)
        hit, total = hit + len(counts) - len(missed), total + len(counts)
        text = f"not {', '.join(map(str, missed))}" if missed else ""
        rows.append(
            f"  {file:32} {len(counts) - len(missed):3} of {len(counts):3}  {text}".rstrip()
        )
    return hit / max(total, 1), "\n".join(rows)
