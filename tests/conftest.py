"""The fixtures that several modules use, and three hypothesis profiles.

``pytest --hypothesis-profile=ci`` tries ten times as many random problems as the default;
``--hypothesis-profile=few`` tries eight, for compute-sanitizer, under which a kernel takes a
hundred times as long.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Each process has its share of the processors; BLAS reads this when NumPy loads it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import numpy as np
import pytest
from hypothesis import settings
from streams import SHAPE, normal, spinning

import cufa
from cufa.gpu import build
from cufa.testing import Case

# As many examples as let all tests run in about a quarter of an hour on two cores.
settings.register_profile(
    "default", max_examples=48, deadline=None, print_blob=True, derandomize=False
)
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
def hopper_cupy(cupy: Any) -> Any:
    """cupy where the GPU is one that Hopper's kernels run on."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs sm_90")
    return cupy


@pytest.fixture(scope="session")
def fit(xp: ModuleType) -> Callable[[Case], Case]:
    """Bends a case so that a run of the GPU tests compiles few kernels; does nothing on NumPy."""
    return (lambda case: case) if xp is np else Case.few_kernels


@pytest.fixture
def busy(cupy: Any) -> Callable[..., None]:
    """Puts work of a tenth of a second, or so many, into CuPy's current stream."""
    return spinning(cupy)


@pytest.fixture
def streams(cupy: Any) -> Iterator[tuple[Any, Any]]:
    """CuPy's, which cufa works in, and another library's; neither waits for the default stream."""
    ours, theirs = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with ours:
        yield ours, theirs
    cupy.cuda.Device().synchronize()


@pytest.fixture
def qkv(cupy: Any) -> Any:
    """q, k and v of a call, in one array of CuPy."""
    return normal(cupy, 3, *SHAPE)


@pytest.fixture
def want(cupy: Any, qkv: Any) -> Any:
    """The answer to that call; its kernel is compiled, so that compiling hides no race."""
    out = cufa.attention(*qkv)
    cupy.cuda.Device().synchronize()
    return out.get()


@pytest.fixture(scope="module", params=["auto", "standard"])
def each_algorithm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls of `cufa.attention` are by one algorithm, then by the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cufa, "attention", partial(cufa.attention, algorithm=request.param))
        yield


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
