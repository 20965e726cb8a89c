"""Show what cufa finds on this machine, which kernel serves what, and whether it computes right."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import cufa
from cufa.bounds import exact, worst_error
from cufa.errors import UnsupportedError
from cufa.gpu import cache, survey, tuning
from cufa.gpu.config import Tuned, get_best_config, tuned_arch
from cufa.gpu.device import OLDEST_ARCH, Device
from cufa.gpu.registry import select_for
from cufa.options import FLOAT_DTYPES, plain_integer
from cufa.tools.backends import Backend
from cufa.tools.console import pip_install, print_table

HEAD_DIMS = (64, 128, 256)
#: Of the sequences whose tiles are shown.
SEQLEN = 4096
#: What tiles are shown for without a card.
ARCH = 90
_Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--arch and --json."""
    parser.add_argument(
        "--arch",
        type=int,
        help=f"whose kernels to show, 90 for sm_90; default: those here, without a GPU {ARCH}",
    )
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the facts; 1 if the self-test fails, or the tuning file was refused."""
    facts = gather(options.arch)
    right = all(test["passed"] for test in facts["self_test"])
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0 if right and facts["tuning_refused"] is None else 1


def gather(arch: int | None = None) -> _Facts:
    """All that is shown, as JSON has it.

    Parameters
    ----------
    arch : int, default those of the cards here, and `ARCH` where there is none
        Whose kernels to list.

    Raises
    ------
    ArgumentError
        `arch` is below 70.
    """
    cards = survey.find_cards()
    archs = sorted({card.device.arch for card in cards}) or [ARCH]
    if arch is not None:
        archs = [plain_integer("arch", arch, OLDEST_ARCH)]
    runtime = survey.runtime_version()
    refusal = tuning.refusal()
    with tuning.using(Tuned()) if refusal else nullcontext():
        kernels = [row for a in archs for row in _kernels(a)]
    return {
        "versions": {
            "cufa": cufa.__version__,
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            "CUDA runtime": None if runtime is None else survey.cuda_version(runtime),
        },
        "parts": _parts(),
        "devices": [
            {
                "number": card.number,
                "name": card.device.name,
                "arch": card.device.arch,
                "memory_bytes": card.memory_bytes,
                "multiprocessors": card.device.sm_count,
            }
            for card in cards
        ],
        "kernels": kernels,
        "cache": _cache(),
        "tuning": tuning.in_force(),
        "tuning_refused": None if refusal is None else str(refusal),
        "self_test": _self_test(cards),
    }


def _parts() -> list[_Facts]:
    driver = survey.driver_version()
    return [
        {**part._asdict(), "way_out": None if part.version else _way_out(part.name, driver)}
        for part in survey.find_parts()
    ]


def _way_out(part: str, driver: int | None) -> str:
    """How to come by a part that is missing."""
    if part == "ml_dtypes":
        return "needed only for bfloat16: python -m pip install ml_dtypes"
    if part == "driver" or (driver is not None and driver < 12000):
        return "an NVIDIA GPU needs its driver, for CUDA 12 or later; the CPU backend needs none"
    if driver is not None:
        return pip_install("cuda13" if driver >= 13000 else "cuda12")
    if part == "CuPy":
        return f"needed only with an NVIDIA GPU: {pip_install('cuda13')}, or cuda12"
    return f"needed only to compile kernels for another machine: {pip_install('compile')}"


def _kernels(arch: int) -> list[_Facts]:
    """For each dtype and head dim the first kernel that serves it, and its tile."""
    device = Device.of_arch(arch)
    return [
        {"arch": arch, "dtype": dtype, "head_dim": head_dim, **_kernel(dtype, head_dim, device)}
        for dtype in FLOAT_DTYPES
        for head_dim in HEAD_DIMS
    ]


def _kernel(dtype: str, head_dim: int, device: Device) -> _Facts:
    try:
        name = select_for(dtype, head_dim, device).name
        config = get_best_config(SEQLEN, head_dim=head_dim, dtype=dtype, arch=device.arch)
    except UnsupportedError:
        return {"kernel": None}
    return {"kernel": name, "tiles_of": tuned_arch(name, device), **config._asdict()}


def _cache() -> _Facts:
    folder = cache.directory()
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}


def _self_test(cards: list[survey.Card]) -> list[_Facts]:
    """A small problem on the CPU and on each card, against the formula."""
    tests = [_hold("CPU", Backend(np, None), "float32", nullcontext())]
    cupy: Any = survey.import_cupy()
    for card in cards:
        for dtype in ("float16", "float32"):
            backend = Backend(cupy, card.device)
            tests.append(_hold(f"GPU {card.number}", backend, dtype, cupy.cuda.Device(card.number)))
    return tests


def _hold(place: str, backend: Backend, dtype: str, current: AbstractContextManager[Any]) -> _Facts:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 70, 64)).astype(dtype)
    k, v = rng.standard_normal((2, 1, 2, 90, 64)).astype(dtype)
    test: _Facts = {"place": place, "dtype": dtype, "passed": False}
    expected = exact(q, k, v, causal=True)
    try:
        test["kernel"] = backend.kernels(q, k, v, causal=True)[-1]
        with current:
            on_device = [backend.xp.asarray(a) for a in (q, k, v)]
            start = time.perf_counter()
            result = cufa.attention(*on_device, causal=True, return_lse=True)
            fraction = worst_error(result, expected).fraction
            test["milliseconds"] = 1e3 * (time.perf_counter() - start)
    except Exception as error:  # whatever a driver or a library raises is what was to be found
        return {**test, "error": f"{type(error).__name__}: {error}"}
    if not math.isfinite(fraction):  # JSON has no such number
        return {**test, "error": "NaN or infinity in the place of a number"}
    return {**test, "error_of_bound": fraction, "passed": fraction <= 1}


def show(facts: _Facts) -> None:
    """Print what `gather` found."""
    found = [(name, version, "") for name, version in facts["versions"].items() if version]
    found += [(p["name"], p["version"] or "missing", p["way_out"] or "") for p in facts["parts"]]
    print_table("Found", ("", "version", "to have it"), found)
    if facts["devices"]:
        columns = ("number", "name", "memory", "multiprocessors")
        rows = [
            (d["number"], d["name"], f"{d['memory_bytes'] / 2**30:.0f} GiB", d["multiprocessors"])
            for d in facts["devices"]
        ]
        print_table("Devices", columns, rows)
    for arch in sorted({row["arch"] for row in facts["kernels"]}):
        _show_kernels(arch, facts)
    kept = facts["cache"]
    print(f"\ncache    {kept['folder']}: {kept['files']} kernels, {kept['bytes'] / 1e6:.1f} MB")
    refused = facts["tuning_refused"] and f"REFUSED: {facts['tuning_refused']}"
    print(f"tuning   {refused or facts['tuning'] or 'the tiles that cufa comes with'}")
    print_table("Self-test", ("", "dtype", "kernel", "result"), map(_verdict, facts["self_test"]))


def _show_kernels(arch: int, facts: _Facts) -> None:
    here = [row for row in facts["kernels"] if row["arch"] == arch]
    cells = {(row["dtype"], row["head_dim"]): _tile(row) for row in here}
    rows = [(dtype, *(cells[dtype, d] for d in HEAD_DIMS)) for dtype in FLOAT_DTYPES]
    absent = "" if facts["devices"] else ", of which there is none here"
    title = f"Kernels on sm_{arch}{absent}: queries x keys of a tile, at seqlen {SEQLEN}"
    print_table(title, ("dtype", *(f"head_dim {d}" for d in HEAD_DIMS)), rows)
    for kernel, tuned in {row["kernel"]: row.get("tiles_of") for row in here}.items():
        if kernel and tuned != arch:
            print(f"{kernel} has no tiles of sm_{arch}; those of sm_{tuned} serve")


def _tile(row: _Facts) -> str:
    if row["kernel"] is None:
        return "none"
    return f"{row['kernel']} {row['block_m']}x{row['block_n']}, {row['threads']} threads"


def _verdict(test: _Facts) -> tuple[str, str, str, str]:
    if "error" in test:
        result = f"failed: {test['error']}"
    else:
        verdict = "right" if test["passed"] else "WRONG"
        result = (
            f"{verdict}: error {test['error_of_bound']:.2f} of its bound, "
            f"first call {test['milliseconds']:.0f} ms"
        )
    return test["place"], test["dtype"], test.get("kernel", ""), result
