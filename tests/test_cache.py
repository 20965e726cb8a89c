"""The cache of compiled kernels; compiling needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cufa
from cufa.gpu import build

WARM = "import cufa; cufa.warmup(head_dim=32, dtype='float16', causal=False, arch=90)"


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
    return cufa.warmup(head_dim=32, dtype="float16", causal=False, arch=90)


def test_a_kernel_is_compiled_once_and_then_found(folder, compilations):
    assert warm() == 1
    (file,) = folder.iterdir()
    before = file.stat().st_mtime_ns
    assert warm() == 1
    assert compilations == ["fa2_fwd"]
    assert file.stat().st_mtime_ns == before


def test_a_changed_header_means_a_new_kernel(folder, compilations, monkeypatch):
    warm()
    text = build.source("fa2_fwd")
    monkeypatch.setattr(build, "source", lambda name: text + "\n// changed\n")
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
        assert file.stem.rpartition("-")[2] == build._digest(file.read_bytes())


def test_a_folder_that_cannot_be_written_costs_one_warning_only(tmp_path):
    # A file where the folder should be: also root cannot write there.
    (tmp_path / "file").write_text("")
    env = {**os.environ, "CUFA_CACHE_DIR": str(tmp_path / "file" / "cache")}
    code = f"{WARM}\n{WARM.replace('False', 'True')}"
    job = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("RuntimeWarning") == 1
    assert "CUFA_CACHE_DIR" in job.stderr


def test_without_a_home_folder_it_still_works(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME")}
    env["HOME"] = str(tmp_path / "missing")
    job = subprocess.run([sys.executable, "-c", WARM], env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CUFA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / "cufa"
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "mine"))
    assert build.cache_directory() == tmp_path / "mine"


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

    problem = make_problem(_call(32, "float32", False, False, _Features()))
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
