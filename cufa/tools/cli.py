"""``python -m cufa TOOL``, or ``cufa TOOL``: finds the tool, and says what went wrong in a line.

A tool is a module of this folder. The first line of its docstring is its help; it has
``add_arguments(parser)`` and ``run(options)``, which returns the exit status. Only the module that
is asked for is imported, so that each needs no more than its own packages.

Exit status: 0; 1 if the tool found something wrong; 2 if it could not do its work; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import cufa
from cufa.errors import CufaError
from cufa.gpu import tuning
from cufa.tools.console import missing_package

TOOLS = ("info", "verify", "bench", "tune", "warmup")
#: Those that work though the file named by CUFA_TUNING is refused: they say so, or make a new one.
_WITHOUT_TUNING = ("info", "tune")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tool on the arguments of the command line; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser = argparse.ArgumentParser(prog="cufa", description="Tools of cufa.")
        parser.add_argument("--version", action="version", version=f"cufa {cufa.__version__}")
        commands = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
        for name in TOOLS:
            summary = _summary(name)
            command = commands.add_parser(name, help=summary, description=summary)
            if name == _tool(arguments):
                tool = importlib.import_module(f"cufa.tools.{name}")
                tool.add_arguments(command)
        options = parser.parse_args(arguments)
        if options.tool not in _WITHOUT_TUNING and (refusal := tuning.refusal()) is not None:
            raise refusal
        status: int = tool.run(options)
        sys.stdout.flush()  # what cannot be written must be known by now
        return status
    except CufaError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None:
            raise
        return _fail(message)
    except OSError as error:  # a file that cannot be written, a full disk, a reader who has gone
        _give_up_stdout()
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _tool(arguments: Sequence[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _summary(name: str) -> str:
    """The first line of a tool's docstring, read without importing the tool."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _give_up_stdout() -> None:
    """Where it cannot be written: Python tries once more as it ends, and would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # there need not be a file behind it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"cufa: {message}", file=sys.stderr)
    return 2
