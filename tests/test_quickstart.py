"""The first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "quickstart.py"


@pytest.mark.parametrize("options", [(), ("--full", "--head-dim", "40", "--dtype", "float16")])
def test_quickstart_checks_itself(options):
    command = [sys.executable, str(SCRIPT), "--seqlen", "300", "--heads", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("backend", "q, k, v", "cufa", "plain", "error"):
        assert f"\n{line} " in f"\n{done.stdout}"


@pytest.mark.parametrize("option", ["--batch", "--heads", "--seqlen", "--head-dim"])
@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_quickstart_refuses_a_size_that_is_none(option, value):
    command = [sys.executable, str(SCRIPT), option, value]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"error: argument {option}: {value} is not an integer of at least 1" in done.stderr
