"""What can be known of the kernels without a GPU: they compile, and keep to the rules.

A kernel asserts the size of its shared memory when it is compiled, so compiling one also checks
`smem_bytes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiles import ARCHS, BY_TMA, HEAD_DIMS, backward_units, compiled, mask_units, name_of, units

import cufa
from cufa.gpu import build, config
from cufa.gpu.config import LENGTHS, Config, Scores, find_config
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey, make_key
from cufa.gpu.registry import BACKWARD_KERNELS, KERNELS
from cufa.gpu.warmup import _call, _Features
from cufa.options import FLOAT_DTYPES
from cufa.problem import make_problem

UNITS = [key for arch in ARCHS for key in (*units(arch), *mask_units(arch), *backward_units(arch))]
#: All tables of tiles, by their names.
ROWS = [
    (name, row)
    for name in ("_TABLE", "_BACKWARD_TABLE")
    for row in range(len(getattr(config, name)))
]
SPECS = (*KERNELS, *(spec for specs in BACKWARD_KERNELS.values() for spec in specs))


def in_its_group(key: KernelKey) -> Any:
    """Of a kernel whose machine code test_sass.py reads too: in the same process."""
    marks = pytest.mark.xdist_group("sass") if key.kernel in BY_TMA else ()
    return pytest.param(key, marks=marks, id=name_of(key))


@pytest.mark.parametrize("key", [in_its_group(key) for key in UNITS])
def test_every_tile_compiles_without_spills(key: KernelKey) -> None:
    code, log = compiled(key)
    assert code.startswith(b"\x7fELF")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, f"no report:\n{log}"
    assert not any(spills), log
    assert not re.search(r"[1-9]\d* bytes stack frame", log), log


def answers(kernel: str) -> Iterator[Config | None]:
    """What the table gives for all that it is asked about a kernel."""
    specs = [spec for spec in SPECS if spec.name == kernel]
    for spec, device in product(specs, map(Device.of_arch, ARCHS)):
        facts = product(spec.dtypes, HEAD_DIMS, HEAD_DIMS, LENGTHS, Scores, (False, True))
        for dtype, d, dv, *more in facts:
            if spec.limit(dtype, max(d, dv), device) is None:
                try:
                    yield find_config(kernel, dtype, d, dv, *more, device)
                except cufa.UnsupportedError:
                    yield None


@cache
def of_whole_table(kernel: str) -> list[Config | None]:
    """The same, before a row is taken out."""
    return list(answers(kernel))


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_without_any_row_of_a_table_some_card_would_work_otherwise(
    name: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = getattr(config, name)
    kernel = table[row].kernel
    whole = of_whole_table(kernel)
    # float64 of the largest head dims has no tile of the backward pass on the oldest cards.
    assert None not in whole or name == "_BACKWARD_TABLE"
    monkeypatch.setattr(config, name, table[:row] + table[row + 1 :])
    assert any(a != b for a, b in zip(answers(kernel), whole, strict=True))


def code_lines(path: Any) -> Iterator[tuple[int, str]]:
    """Lines without their comments."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield number, line.partition("//")[0]


def test_instructions_and_builtins_appear_only_in_ptx() -> None:
    words = "global device forceinline noinline launch_bounds grid_constant"
    reserved = re.compile(
        rf"\basm\b|\batomic|\bmem(cpy|set|move)\b|\b(threadIdx|blockIdx|blockDim|gridDim)\b"
        rf"|\b__(?!({words.replace(' ', '|')})__\b)\w+"
    )
    for path in build.KERNELS.rglob("*.cu*"):
        if path.parent.name != "ptx":
            for number, line in code_lines(path):
                assert not reserved.search(line), f"{path.name}:{number}: {line}"


def test_macros_are_read_in_one_header_only() -> None:
    for path in build.KERNELS.rglob("*.cu*"):
        for number, line in code_lines(path):
            if path.name != "config.cuh":
                assert "CUFA_" not in line, f"{path.name}:{number}"
            directive = re.match(r"\s*#\s*(\w+)", line)
            if directive and path.name != "types.cuh":
                allowed = {"include", "pragma"}
                if path.parent.name == "ptx":  # asm takes literals only
                    allowed |= {"define", "undef"}
                assert directive[1] in allowed, f"{path.name}:{number}: {line}"


def test_macros_of_an_instruction_end_with_its_header() -> None:
    for path in (build.KERNELS / "ptx").iterdir():
        text = path.read_text()
        defined = re.findall(r"^#define (\w+)", text, re.MULTILINE)
        assert defined == re.findall(r"^#undef (\w+)", text, re.MULTILINE), path.name


def test_kernels_include_only_their_own_headers_and_upwards_never() -> None:
    order = ["ptx", "base", "tile", "attn", "kernels"]
    for path in build.KERNELS.rglob("*.cu*"):
        mine = order.index(path.parent.name)
        for _, line in code_lines(path):
            if include := re.match(r"#include (.*)", line):
                target = include[1].strip().strip('"')
                assert (build.KERNELS / target).is_file(), f"{path.name} includes {include[1]}"
                if target == "base/types.cuh":  # the integers' names, for all
                    continue
                theirs = order.index(target.partition("/")[0])
                assert path.parent.name != "ptx", f"{path.name} includes {target}"
                assert theirs <= mine, f"{path.name} includes {target}"


def test_lines_of_kernels_and_of_the_emulator_fit_a_page() -> None:
    emulator = Path(__file__).parent / "emulator"
    for path in (*build.KERNELS.rglob("*.cu*"), *emulator.rglob("*.c*"), *emulator.rglob("*.h")):
        if path.suffix in (".cu", ".cuh", ".cpp", ".h"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert len(line) <= 100, f"{path.name}:{number}"


@pytest.mark.parametrize("kernel", sorted({key.kernel for key in UNITS}))
def test_the_cache_key_sees_every_header(kernel: str, kernels: Path) -> None:
    key = next(key for key in UNITS if (key.kernel, key.arch) == (kernel, 90))
    seen = {build._cache_key(key)}
    assert seen == {build._cache_key(key)}
    headers = included(kernels, f"{kernel}.cu")
    assert len(headers) > 10
    for header in headers:
        with (kernels / header).open("a") as file:
            file.write("// changed\n")
        build.source.cache_clear()
        seen.add(build._cache_key(key))
    assert len(seen) == 1 + len(headers)


def included(folder: Path, name: str) -> set[str]:
    """Every header that a file includes, and those that they include."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        text = (folder / waiting.pop()).read_text()
        new = set(re.findall(r'^#include "(.*)"', text, re.MULTILINE)) - found
        found |= new
        waiting += new
    return found


def test_the_cache_key_sees_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(units(90))
    first = build._cache_key(key)
    monkeypatch.setattr(build, "compiler_version", lambda: "another")
    assert build._cache_key(key) != first


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "fa9"}, cufa.ArgumentError, "kernel is 'fa9'; .*'fa2_fwd', 'fa2_fwd_simt'"),
        (
            {"kernel": "fa2_fwd", "dtype": "float32", "head_dim": 160},
            cufa.UnsupportedError,
            "float16 or bfloat16; fa2_fwd takes head_dim up to 128",
        ),
        ({"kernel": "fa2_fwd", "arch": 75}, cufa.UnsupportedError, "needs sm_80"),
        ({"head_dim": 300}, cufa.UnsupportedError, "fa2_fwd_simt takes head_dim up to 256"),
        ({"head_dim": -5}, cufa.ArgumentError, "head_dim is -5; .*at least 1"),
        ({"arch": 30}, cufa.ArgumentError, "arch is 30; .*at least 70"),
        ({"dtype": "int8"}, cufa.ArgumentError, "dtype is 'int8'; .*float16"),
        ({"dtype": None}, cufa.ArgumentError, "dtype is None; .*float16"),
        ({"bias": np.ones(2)}, cufa.ArgumentError, r"bias is an array of shape \(2,\) .*float16"),
        ({"mask": np.ones(2)}, cufa.ArgumentError, r"mask is an array of shape \(2,\) .*True"),
        ({"window": None}, cufa.ArgumentError, "window is None; .*False, True"),
        ({"plain": 2}, cufa.ArgumentError, "plain is 2; .*False, True"),
    ],
)
def test_get_best_config_says_why_there_is_none(options, error, message):
    with pytest.raises(error, match=message):
        cufa.get_best_config(100, **options)


@pytest.mark.parametrize("seqlen", [128, 2048])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_get_best_config_is_what_a_call_takes(arch, dtype, causal, seqlen):
    call = _call(96, dtype, causal, False, seqlen, None, _Features())
    key = make_key(make_problem(call), Device.of_arch(arch))
    best = cufa.get_best_config(seqlen, head_dim=96, dtype=dtype, causal=causal, arch=arch)
    assert best == key.config
