"""What importing cufa costs and needs, and that its modules import each other in one direction."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cufa

PACKAGE = Path(cufa.__file__).parent
#: A module imports from rows above its own only.
LAYERS = (
    ("errors", "reference", "gpu.streaming", "gpu.passes"),
    ("options", "recompute"),
    ("dropout",),
    ("problem", "bounds", "gpu.cache"),
    ("arrays", "gpu.device", "gpu.tensor_map", "gradient_bounds", "long.plan"),
    ("gradients", "long.saved_blocks", "long.alibi", "merging"),
    (
        "gpu.registry",
        "gpu.params",
        "gpu.cublas",
        "standard",
        "rows",
        "blocks",
        "case",
        "rotary",
    ),
    ("gpu.config", "testing", "linear", "long.sums"),
    ("gpu.plan",),
    ("gpu.backward_plan",),
    ("gpu.build", "gpu.launch"),
    ("gpu.cards", "gpu.exchange", "gpu.warmup", "gpu.survey", "gpu.tuning", "cpu", "cpu_backward"),
    ("interop",),
    ("attention", "numerics"),
    ("flash_attn", "explanation", "backward", "layer_checks"),
    ("layers", "long.sweep", "distributed.hosts"),
    ("long.call", "distributed.communicator", "distributed.sequence", "distributed.scaling"),
    ("long.sequence", "distributed.mpi", "distributed.sockets", "distributed.calls", "gpu.nccl"),
    ("distributed.connection", "distributed.ring", "distributed.head_parallel"),
    ("distributed.tensor_parallel",),
    ("tools.console", "tools.backends", "tools.timing", "tools.workloads"),
    ("tools.script", "tools.search", "tools.card", "tools.results"),
    ("tools.formulas", "tools.rigs", "tools.picture", "tools.shapes"),
    ("tools.peers",),
    ("tools.layer", "tools.candidates", "tools.race", "tools.ranks"),
    ("tools.info", "tools.verify", "tools.warmup", "tools.bench", "tools.tune"),
    ("tools.cli",),
    ("__main__",),
)
#: The oracle and what stands on it share nothing with what they judge.
ORACLE = {"reference", "bounds", "gradient_bounds", "case", "testing"}
#: What runs on a card, or measures on one.
GPU_SIDE = ("gpu.", "tools.card")
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    ).stdout


def imported(name: str) -> set[str]:
    """The modules of cufa that one of them imports, anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.removeprefix("cufa.") for module in found} & MODULES.keys()


def libraries(name: str) -> set[str]:
    """The top-level packages that a module imports, anywhere in its source."""
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        module.partition(".")[0]
        for module in plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    }


def test_every_row_of_layers_names_modules_that_exist():
    assert {name for row in LAYERS for name in row} == MODULES.keys()


def layer(name: str) -> int:
    """Row of a module in `LAYERS`."""
    rows = [n for n, row in enumerate(LAYERS) if name in row]
    assert rows, f"cufa/{name} has no row in LAYERS"
    return rows[0]


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_in_one_direction(name):
    assert not {other for other in imported(name) if layer(other) >= layer(name)}


@pytest.mark.parametrize("name", sorted(ORACLE))
def test_the_oracle_shares_nothing_with_what_it_judges(name):
    assert imported(name) <= ORACLE


def test_the_formula_needs_numpy_alone():
    assert libraries("reference") <= {"__future__", "typing", "numpy"}


@pytest.mark.parametrize("name", [m for m in MODULES if not m.startswith(GPU_SIDE)])
def test_only_the_gpu_folder_imports_gpu_libraries(name):
    assert not libraries(name) & {"cupy", "cupyx", "cuda"}


def test_importing_cufa_loads_no_gpu_library():
    code = "import sys; before = set(sys.modules); import cufa; print(*set(sys.modules) - before)"
    loaded = run(code).split()
    heavy = {"cupy", "cuda", "hypothesis", "rich", "torch", "jax", "numba", "mpi4py"}
    assert "cufa" in loaded
    assert not {name.partition(".")[0] for name in loaded} & heavy
    assert not [name for name in loaded if name.startswith("cufa.gpu.")]


def test_importing_cufa_is_quick():
    code = (
        "import time, numpy; t = time.process_time(); import cufa; print(time.process_time() - t)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.1


# IN5
def test_a_broken_cupy_does_not_stop_numpy_users(tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    code = "import numpy as np, cufa; a = np.ones((3, 2)); print(cufa.attention(a, a, a).sum())"
    assert float(run(code, PYTHONPATH=str(tmp_path))) == 6
