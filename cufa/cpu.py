"""The NumPy backend (being written)."""

from __future__ import annotations

from typing import Any

from cufa.arrays import Arrays, check_overlap
from cufa.problem import Signature, make_problem


def run(call: Signature, arrays: Arrays) -> Any:
    problem = make_problem(call)
    if arrays.out is not None:
        check_overlap(arrays.out, arrays._asdict())

    raise NotImplementedError
