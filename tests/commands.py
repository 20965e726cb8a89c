"""Runs ``python -m cufa`` as a user does, in a process whose imports a test may arrange."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cufa

#: Makes imports fail, in a process whose PYTHONPATH has a sitecustomize.py of it.
BLOCK = "import sys\nsys.modules.update(dict.fromkeys({packages!r}))\n"


def run(
    *arguments: str, path: Path | None = None, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """``python -m cufa``, with a folder first on the path."""
    paths = [str(path)] * (path is not None) + [str(Path(cufa.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, "-m", "cufa", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def without(folder: Path, *packages: str) -> Path:
    """The folder, with what makes packages missing for a process that has it on its path."""
    (folder / "sitecustomize.py").write_text(BLOCK.format(packages=packages))
    return folder
