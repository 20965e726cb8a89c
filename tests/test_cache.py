"""The cache of compiled kernels; compiling needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cufa
from cufa.gpu import build, cache

WARM = "import cufa; cufa.warmup(head_dim=32, dtype='float16', causal=False, arch=80)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled since."""
    compiled = []
    original = build.compile_key

    def counted(key, **options):
        compiled.append(key.kernel)
        return original(key, **options)

    monkeypatch.setattr(build, "compile_key", counted)
    return compiled


def warm() -> int:
    return cufa.warmup(head_dim=32, dtype="float16", causal=False, arch=80)


def test_a_kernel_is_compiled_once_and_then_found(folder, compilations):
    assert warm() == 1
    (file,) = folder.iterdir()
    before = file.stat().st_mtime_ns
    assert warm() == 1
    assert compilations == ["fa2_fwd"]
    assert file.stat().st_mtime_ns == before


def test_a_changed_header_of_a_header_means_a_new_kernel(folder, compilations, kernels):
    warm()
    assert '"ptx/mma.cuh"' not in (kernels / "fa2_fwd.cu").read_text()
    with (kernels / "ptx" / "mma.cuh").open("a") as header:
        header.write("// changed\n")
    build.source.cache_clear()
    warm()
    assert len(compilations) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""])
def test_a_damaged_file_is_compiled_anew(folder, compilations, damage):
    warm()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    warm()
    assert len(compilations) == 2
    assert [f.read_bytes() for f in folder.iterdir()] == [whole]


def test_what_a_killed_process_left_is_not_taken_for_a_kernel(folder, compilations):
    warm()
    (file,) = folder.iterdir()
    file.rename(folder / ".partial-abc")
    warm()
    assert len(compilations) == 2


def test_many_processes_fill_an_empty_cache_at_once(folder):
    jobs = [
        subprocess.Popen([sys.executable, "-c", WARM], stderr=subprocess.PIPE) for _ in range(4)
    ]
    errors = [job.communicate()[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), errors
    files = list(folder.iterdir())
    assert files
    for file in files:
        assert file.stem.rpartition("-")[2] == cache.digest(file.read_bytes())


#: Two calls in a process whose user has no home folder; prints compilations, warnings, files.
HOMELESS = """
import json, pathlib, sys, warnings
import cufa
from cufa.gpu import build, cache

def expanduser(path):
    if str(path).startswith("~"):
        raise RuntimeError("Could not determine home directory.")
    return path

pathlib.Path.expanduser = expanduser
compiled = []
original = build.compile_key
build.compile_key = lambda key: compiled.append(key.kernel) or original(key)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        cufa.warmup(head_dim=32, dtype="float16", causal=False, arch=80)
folder = cache._private_directory()
files = [str(path) for path in folder.iterdir()]
json.dump([compiled, [str(w.message) for w in caught], files], sys.stdout)
"""


@pytest.mark.parametrize("chosen", [None, "file/cache"], ids=["no home", "not to be written"])
def test_without_a_folder_kernels_live_as_long_as_the_process(tmp_path, chosen):
    env = {k: v for k, v in os.environ.items() if k not in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME")}
    if chosen:  # a file where the folder should be: also root cannot write there
        (tmp_path / "file").write_text("")
        env["CUFA_CACHE_DIR"] = str(tmp_path / chosen)
    job = subprocess.run([sys.executable, "-c", HOMELESS], env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    compiled, messages, files = json.loads(job.stdout)
    assert compiled == ["fa2_fwd"]
    assert len(messages) == 1
    assert str(tmp_path / chosen) in messages[0] if chosen else "home" in messages[0]
    assert "set CUFA_CACHE_DIR" in messages[0]
    assert len(files) == 1
    assert not Path(files[0]).parent.exists()


def test_a_home_folder_that_is_not_there_is_made(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME")}
    env["HOME"] = str(tmp_path / "missing")
    job = subprocess.run([sys.executable, "-c", WARM], env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert not job.stderr
    assert len(list((tmp_path / "missing" / ".cache" / "cufa").iterdir())) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CUFA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "cufa"
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "mine"))
    assert cache.directory() == tmp_path / "mine"


def test_a_relative_xdg_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.delenv("CUFA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == tmp_path / ".cache" / "cufa"


def test_a_tilde_in_the_cache_folder_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUFA_CACHE_DIR", "~/kernels")
    assert cache.directory() == tmp_path / "kernels"


def test_a_source_that_does_not_compile_shows_the_compilers_words(folder, monkeypatch):
    monkeypatch.setattr(build, "source", lambda name: "this is no kernel")
    with pytest.raises(cufa.BuildError, match="error"):
        warm()
    assert not folder.exists() or not list(folder.iterdir())


def test_an_architecture_older_than_the_compiler_is_named(folder):
    from cufa.gpu.device import Device
    from cufa.gpu.plan import make_key
    from cufa.gpu.warmup import _call, _Features
    from cufa.problem import make_problem

    problem = make_problem(_call(32, "float32", False, False, 128, None, _Features()))
    key = make_key(problem, Device.of_arch(70))
    with pytest.raises(cufa.BuildError, match=r"sm_10.*NVRTC knows sm_\d+ and later"):
        build.compile_key(key._replace(arch=10))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": "int8"}, cufa.ArgumentError, "dtype is 'int8'"),
        ({"head_dim": 300}, cufa.UnsupportedError, "head_dim up to 256"),
        ({"bias": "int32"}, cufa.ArgumentError, "bias is 'int32'"),
        ({"head_dim": 0}, cufa.ArgumentError, "head_dim is 0"),
        ({"head_dim": "64"}, cufa.DTypeError, "head_dim is '64'"),
        ({"causal": None}, cufa.ArgumentError, "causal is None"),
    ],
)
def test_warmup_refuses_what_no_call_could_use(folder, options, error, text):
    with pytest.raises(error, match=text):
        cufa.warmup(arch=90, **options)


def test_warmup_with_a_window_serves_windows_open_on_either_side(folder):
    from cufa.gpu.device import Device
    from cufa.gpu.plan import make_key
    from cufa.gpu.warmup import _call, _Features
    from cufa.problem import make_problem

    options = {"head_dim": 32, "dtype": "float32", "causal": False, "window": True}
    assert cufa.warmup(arch=90, **options) == 3
    for window in ((50, None), (None, 50), (0, 50)):
        call = _call(32, "float32", False, False, 70, window, _Features())
        assert cache.find(build._cache_key(make_key(make_problem(call), Device.of_arch(90))))


def test_warmup_with_gradients_compiles_what_a_backward_pass_launches(monkeypatch):
    from emulator.machine import Emulator, backward_keys

    from cufa.gpu import warmup

    compiled = []
    monkeypatch.setattr(warmup.build, "ensure_cached", compiled.append)
    q = np.ones((2, 70, 64), np.float32)
    bias, sink = np.ones((70, 70), np.float16), np.ones(2, np.float32)
    options = {"head_dim": 64, "dtype": "float32", "causal": True, "bias": "float16", "sink": True}
    cufa.warmup(**options, gradients=True, arch=90)
    out, lse = cufa.attention(q, q, q, causal=True, bias=bias, sink=sink, return_lse=True)
    keys = backward_keys(Emulator(90), out, q, q, q, out, lse, causal=True, bias=bias, sink=sink)
    assert len(keys) == 5
    assert {*keys} <= {*compiled}
    assert all(key.lse for key in compiled if "fwd" in key.kernel)
