"""The fixtures that several modules use, and three hypothesis profiles.

``pytest --hypothesis-profile=ci`` tries five times as many random problems as the default;
``--hypothesis-profile=few`` tries eight, for compute-sanitizer, under which a kernel takes a
hundred times as long.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

if "PYTEST_XDIST_WORKER" in os.environ:  # all processors are taken; read when BLAS is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

from cufa.gpu import build
from cufa.testing import Case

settings.register_profile("default", deadline=None, print_blob=True, derandomize=False)
settings.register_profile("ci", settings.get_profile("default"), max_examples=500)
settings.register_profile("few", settings.get_profile("default"), max_examples=8)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests on the GPU go to one process: they measure its memory and keep its streams busy."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """numpy, and cupy where there is a GPU."""
    return np if request.param == "numpy" else _cupy()


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """cupy; for tests that are marked gpu."""
    return _cupy()


@pytest.fixture(scope="session")
def fit(xp: ModuleType) -> Callable[[Case], Case]:
    """Bends a case so that a run of the GPU tests compiles few kernels; does nothing on NumPy."""
    return (lambda case: case) if xp is np else Case.few_kernels


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder cufa/kernels, built from in its place: a test may edit it."""
    folder = tmp_path / "kernels"
    shutil.copytree(build.KERNELS, folder)
    monkeypatch.setattr(build, "KERNELS", folder)
    build.source.cache_clear()
    yield folder
    build.source.cache_clear()


def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        pytest.skip(f"CuPy cannot be imported: {error}")
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no GPU: {error}")
    if not devices:
        pytest.skip("CuPy finds no GPU")
    return cupy
