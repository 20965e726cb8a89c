"""The examples beside other libraries check themselves; each is run where its library is."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PIPELINES = {"jax": ["jax"], "numba": ["numba"], "onnx": ["onnx", "onnxruntime"]}


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(EXAMPLES / f"{name}_pipeline.py")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_checks_itself(name):
    missing = [library for library in PIPELINES[name] if not find_spec(library)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = run(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at most" in done.stdout


@pytest.mark.parametrize("name", PIPELINES)
def test_a_missing_library_is_named_in_one_line(name, tmp_path, monkeypatch):
    for library in PIPELINES[name]:
        (tmp_path / f"{library}.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = run(name)
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1
