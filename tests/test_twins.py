"""Every function of `kernels/ptx` has a twin for the emulator, of the same name and signature."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulator.build import HOST

from cufa.gpu.build import KERNELS

DEVICE_PTX, HOST_PTX = KERNELS / "ptx", HOST / "ptx"
DECLARATION = re.compile(r"^((?:template *<[^>]*>\s*)?DEVICE\s[^{;]*\))\s*\{", re.MULTILINE)
TYPE = re.compile(r"^struct [^{;]*", re.MULTILINE)


def declared(path: Path, what: re.Pattern[str]) -> set[str]:
    """Functions or types of a header, their white space made one."""
    return {" ".join(found.split()) for found in what.findall(path.read_text())}


def test_the_same_headers() -> None:
    assert {path.name for path in HOST_PTX.iterdir()} == {p.name for p in DEVICE_PTX.iterdir()}


@pytest.mark.parametrize("header", sorted(path.name for path in DEVICE_PTX.iterdir()))
def test_the_same_functions_and_types(header: str) -> None:
    functions = declared(DEVICE_PTX / header, DECLARATION)
    assert len(functions) == (DEVICE_PTX / header).read_text().count("DEVICE ")
    assert declared(HOST_PTX / header, DECLARATION) == functions
    assert declared(HOST_PTX / header, TYPE) == declared(DEVICE_PTX / header, TYPE)
