"""The frame of ``python -m cufa``: which tool, and what it says where something is missing."""

from __future__ import annotations

import importlib
import os

import pytest
from commands import run, without

from cufa.tools import cli


@pytest.mark.parametrize("name", cli.TOOLS)
def test_the_help_of_a_tool_is_the_first_line_of_its_docstring(name, capsys):
    first = importlib.import_module(f"cufa.tools.{name}").__doc__.splitlines()[0]
    for arguments in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
        assert first in " ".join(capsys.readouterr().out.split())


def test_the_list_of_tools_needs_no_extra(tmp_path):
    done = run("--help", path=without(tmp_path, "rich", "hypothesis", "matplotlib", "ml_dtypes"))
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.TOOLS)


def test_info_needs_numpy_alone(tmp_path):
    missing = ("rich", "hypothesis", "matplotlib", "ml_dtypes", "cuda", "cupy")
    done = run("info", path=without(tmp_path, *missing))
    assert done.returncode == 0, done.stderr
    assert "fa2_fwd" in done.stdout
    assert "right" in done.stdout


@pytest.mark.parametrize("package", ["rich", "hypothesis", "ml_dtypes"])
def test_a_missing_extra_is_named_in_a_line_with_the_command(package, tmp_path):
    done = run("verify", "--max-examples", "20", path=without(tmp_path, package))
    command = 'python -m pip install "cufa[tools]"'
    assert done.returncode == 2
    assert done.stderr == f"cufa: this needs the package {package}: {command}\n"


def test_an_import_that_fails_for_another_reason_is_not_hidden(monkeypatch):
    def fail(options):
        raise ModuleNotFoundError("no module", name="cufa.tools.nothing")

    monkeypatch.setattr("cufa.tools.info.run", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["info"])


def test_an_error_of_cufa_is_a_line_and_no_traceback():
    done = run("info", "--arch", "60")
    assert done.returncode == 2
    assert done.stderr == "cufa: arch is 60; it must be at least 70\n"
    assert not done.stdout


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("cufa.tools.info.run", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
def test_output_that_cannot_be_written_is_a_line_and_no_wrong_result(arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "cufa: [Errno 28] No space left on device\n"


def test_a_reader_who_has_gone_is_a_line():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = run("info", "--json", stdout=pipe)
    assert done.returncode == 2
    assert done.stderr == "cufa: [Errno 32] Broken pipe\n"


def test_without_a_tool_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "TOOL" in capsys.readouterr().err
