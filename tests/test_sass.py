"""What the assembler makes of Hopper's kernel: read from the machine code, needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from tiles import BY_TMA, compiled, units

from cufa.gpu.config import Config
from cufa.gpu.plan import KernelKey

#: In one process, with the tests that compile the same units: that takes a minute.
pytestmark = pytest.mark.xdist_group("sass")


def disassembler() -> str | None:
    """nvdisasm, of the package nvidia-cuda-nvdisasm or on the PATH."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    found = (str(file.locate()) for file in files if file.name == "nvdisasm")
    return next(found, None) or shutil.which("nvdisasm")


class Machine(NamedTuple):
    """One unit's machine code."""

    #: How often each instruction occurs, without its modifiers.
    instructions: Counter[str]
    log: str


def one_unit_a_tile() -> list[KernelKey]:
    """With the largest head dims, of those that test_kernels.py compiles."""
    found: dict[Config, KernelKey] = {}
    for key in units(90):
        if key.kernel in BY_TMA:
            found.setdefault(key.config, key)
    return list(found.values())


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelKey, Machine]:
    """All units, disassembled."""
    tool, folder = disassembler(), tmp_path_factory.mktemp("cubins")
    if tool is None:
        pytest.skip("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")

    def read(numbered: tuple[int, KernelKey]) -> Machine:
        number, key = numbered
        code, log = compiled(key)
        path = Path(folder / f"{number}.cubin")
        path.write_bytes(code)
        text = subprocess.run([tool, str(path)], capture_output=True, text=True, check=True).stdout
        names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", text, re.MULTILINE)
        return Machine(Counter(names), log)

    keys = one_unit_a_tile()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(keys, pool.map(read, enumerate(keys)), strict=True))


def test_products_are_wgmma_and_loads_are_tma(machines: dict[KernelKey, Machine]) -> None:
    assert machines
    for key, machine in machines.items():
        found = machine.instructions
        assert found["HGMMA"], key
        assert found["UTMALDG"], key
        assert not found.keys() & {"HMMA", "LDGSTS", "UBLKCP"}, key


def test_registers_move_to_the_warpgroups_that_compute(machines: dict[KernelKey, Machine]) -> None:
    for key, machine in machines.items():
        assert machine.instructions["USETMAXREG"] == 2, key
        used = [int(n) for n in re.findall(r"Used (\d+) registers", machine.log)]
        assert used, machine.log
        assert max(used) <= 65536 // key.config.threads // 8 * 8, key


def test_nothing_lies_in_local_memory(machines: dict[KernelKey, Machine]) -> None:
    for key, machine in machines.items():
        assert not machine.instructions.keys() & {"LDL", "STL"}, key


def test_no_product_waits_for_the_one_before(machines: dict[KernelKey, Machine]) -> None:
    """Where registers of a wgmma are touched while it may run, the assembler says so (C7510 and its
    like), and waits after each."""
    for key, machine in machines.items():
        assert not re.search(r"\bC7\d\d\d\b", machine.log), f"{key}:\n{machine.log}"
