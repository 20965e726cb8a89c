"""The options by which tools name problems, and the problems that they name."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from cufa.errors import ArgumentError
from cufa.tools.workloads import Workload, workload

#: What ``--causal`` says.
KINDS = {"full": (False,), "causal": (True,), "both": (False, True)}


def positive(text: str) -> int:
    """An option that is a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def seconds(text: str) -> float:
    """An option that is a length of time, or none."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, 0 or more")
    return number


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes that all problems share; what is not given makes the papers' amount of work, or, on a
    CPU, a small part of it."""
    add = parser.add_argument
    add("--head-dim-v", type=positive, metavar="D", help="default as --head-dim")
    add("--batch", type=positive, metavar="N", help="default: 16384 tokens together; on a CPU 2048")
    add("--heads", type=positive, metavar="N", help="default: heads * head_dim 2048; on a CPU 512")
    add("--kv-heads", type=positive, metavar="N", help="default as --heads")


def make_workload(seqlen: int, head_dim: int, **sizes: Any) -> Workload:
    """`workload` of what the options say.

    Raises
    ------
    ArgumentError
        kv_heads do not divide heads.
    """
    work = workload(seqlen, head_dim, **sizes)
    if work.heads % work.kv_heads:
        raise ArgumentError(
            f"--kv-heads is {work.kv_heads} and there are {work.heads} heads; "
            "the first must divide the second"
        )
    return work


def check_file(option: str, path: str) -> None:
    """Raise if no file can be written there."""
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ArgumentError(f"--{option} is {path}, and there is no such folder; make it first")
    if file.is_dir():
        raise ArgumentError(f"--{option} is {path}, which is a folder; name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentError(f"--{option} is {path}, which may not be written; name another file")
