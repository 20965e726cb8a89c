"""``python -m cufa warmup``."""

from __future__ import annotations

import pytest

import cufa
from cufa.tools import cli

ONE = {"head_dim": 32, "dtype": "float16", "causal": False, "arch": 90}
ONE_LINE = ["warmup", "--arch", "90", "--head-dim", "32", "--dtype", "float16", "--causal", "full"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_command_compiles_what_the_function_does(folder, capsys):
    assert cli.main(ONE_LINE) == 0
    kept = sorted(folder.iterdir())
    assert kept
    assert f"{len(kept)} kernels are ready in {folder}" in capsys.readouterr().out
    assert cufa.warmup(**ONE) == len(kept)
    assert sorted(folder.iterdir()) == kept


def test_kernels_that_cannot_be_kept_are_an_error(folder, monkeypatch, capsys):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(folder / "file"))
    (folder / "file").touch()
    assert cli.main(ONE_LINE) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"cufa: cannot keep compiled kernels in {folder / 'file'}")


@pytest.mark.parametrize(
    "switches", [["--softcap", "--alibi-slopes", "--bias", "float32"], ["--dropout"]]
)
def test_a_feature_is_a_switch(folder, switches):
    cli.main(ONE_LINE)
    plain = set(folder.iterdir())
    cli.main([*ONE_LINE, *switches])
    assert set(folder.iterdir()) > plain


def test_progress_counts_up_to_all_kernels():
    told = []
    both = {**ONE, "causal": (False, True)}
    total = cufa.warmup(**both, progress=lambda *counts: told.append(counts))
    assert told == [(ready, total) for ready in range(total + 1)]


def test_an_architecture_newer_than_the_compiler_without_a_driver_says_what_it_needs(
    monkeypatch, capsys
):
    def no_driver(*arguments):
        raise RuntimeError("no driver")

    core = pytest.importorskip("cuda.core")
    monkeypatch.setattr(core, "Program", no_driver)
    assert cli.main([*ONE_LINE, "--arch", "999"]) == 2
    assert "knows no sm_999, and PTX of sm_" in capsys.readouterr().err
    assert cli.main(ONE_LINE) == 2
    assert "PTX" not in capsys.readouterr().err


def test_an_architecture_that_is_too_old_is_a_line(capsys):
    assert cli.main(["warmup", "--arch", "60"]) == 2
    assert capsys.readouterr().err == "cufa: arch is 60; it must be at least 70\n"
