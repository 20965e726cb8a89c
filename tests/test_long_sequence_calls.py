"""Calls of `LongSequenceAttention`: files, runs that are killed, what is refused, the example."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cufa
from cufa import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LongSequenceAttention,
    ShapeError,
    UnsupportedError,
)
from cufa.bounds import exact
from cufa.long import call as long_call
from cufa.testing import assert_within_rounding


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_arrays_may_be_files(tmp_path, layout):
    shape = (3, 200, 8) if layout == "bhsd" else (200, 3, 8)
    rng = np.random.default_rng(0)

    def file(name, values=None):
        a = np.memmap(tmp_path / name, np.float32, "w+", shape=shape)
        a[...] = np.nan if values is None else values
        return a

    q, k, v, dout = (file(n, rng.standard_normal(shape)) for n in ("q", "k", "v", "dout"))
    options = {"causal": True, "layout": layout}
    target, targets = file("out"), {f"d{n}": file(f"d{n}") for n in "qkv"}
    long = LongSequenceAttention(64, device="cpu")
    out, lse = long(q, k, v, out=target, return_lse=True, **options)
    gradients = long.backward(dout, q, k, v, out, lse, **targets, **options)
    assert out is target
    assert all(got is targets[n] for n, got in gradients._asdict().items() if n in targets)
    assert_within_rounding(out, exact(q, k, v, **options))
    same = long.backward(dout, q, k, v, out, lse, **options)
    np.testing.assert_array_equal(same.dk, np.fromfile(tmp_path / "dk", "f4").reshape(shape))


KILLED = """
import os, signal, sys
import numpy as np
import cufa

def stop(done, total):
    if done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 300, 8)).astype(np.float16)
out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
long = cufa.LongSequenceAttention(64, device="cpu", progress=stop)
if sys.argv[3] == "forward":
    found = (long(q, k, v, causal=True, checkpoint_dir=sys.argv[1]),)
else:
    found = long.backward(dout, q, k, v, out, lse, causal=True, checkpoint_dir=sys.argv[1])[:3]
sys.stdout.write(b"".join(a.tobytes() for a in found).hex())
"""


def run_killed(folder, at, what):
    command = [sys.executable, "-c", KILLED, str(folder), str(at), what]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path, what):
    want = run_killed(tmp_path / "whole", -1, what).stdout
    killed = run_killed(tmp_path / "killed", 7, what)
    assert killed.returncode == -signal.SIGKILL
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*.block")}
    assert files
    resumed = run_killed(tmp_path / "killed", -1, what)
    assert want
    assert resumed.stdout == want
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())


def call_of(rng=0, n=100):
    return tuple(np.random.default_rng(rng).standard_normal((3, 2, n, 8), dtype=np.float32))


def touched(q, k, v):
    """The same but for one number."""
    v = v.copy()
    v[1, 57, 3] += 1
    return q, k, v


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda long, call, to: long(*call, causal=True, checkpoint_dir=to), "causal is"),
        (lambda long, call, to: long(*call_of(1), checkpoint_dir=to), "digest of inputs is"),
        (lambda long, call, to: long(*touched(*call), checkpoint_dir=to), "digest of inputs is"),
        (lambda long, call, to: long(*call_of(n=90), checkpoint_dir=to), "shape of q is"),
        (
            lambda long, call, to: LongSequenceAttention(20, device="cpu")(
                *call, checkpoint_dir=to
            ),
            "block sizes",
        ),
        (
            lambda long, call, to: long.backward(
                call[0], *call, *long(*call, return_lse=True), checkpoint_dir=to
            ),
            "computed is 'forward' there and 'backward' now",
        ),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, other, named):
    long, call = LongSequenceAttention(40, device="cpu"), call_of()
    want = long(*call, checkpoint_dir=tmp_path)
    with pytest.raises(ArgumentError, match=f"checkpoint_dir is .*{named}"):
        other(long, call, tmp_path)
    np.testing.assert_array_equal(long(*call, checkpoint_dir=tmp_path), want)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"x" * 9,
        lambda b: b + b"x",
        lambda b: bytes([b[0] ^ 1]) + b[1:],
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        lambda b: b[:10] + bytes([b[10] ^ 64]) + b[11:],  # of a zip file, how it is compressed
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_damaged_file_counts_as_none(tmp_path, damage):
    long, call = LongSequenceAttention(40, device="cpu"), call_of()
    want = long(*call, checkpoint_dir=tmp_path)
    file = min(tmp_path.glob("*.block"))
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_array_equal(long(*call, checkpoint_dir=tmp_path), want)


def folder_that_is_a_file(tmp_path):
    tmp_path.joinpath("file").write_text("")
    return tmp_path / "file"


def folder_of_something_else(tmp_path):
    tmp_path.joinpath("problem.json").write_text("[1]")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "message", "folder"),
    [
        (DTypeError, "checkpoint_dir is 3, a int; it must be a path", lambda _: 3),
        (ArgumentError, "file', which cannot be used .*File exists", folder_that_is_a_file),
        (ArgumentError, "problem.json is not one of a run", folder_of_something_else),
    ],
)
def test_a_folder_that_is_none_is_refused(tmp_path, kind, message, folder):
    with pytest.raises(kind, match=message):
        LongSequenceAttention(40, device="cpu")(*call_of(), checkpoint_dir=folder(tmp_path))


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ArgumentError, "block_size is 0; it must be at least 1", lambda: LongSequenceAttention(0)),
        (ArgumentError, r"block_size is \(1, 2, 3\)", lambda: LongSequenceAttention((1, 2, 3))),
        (DTypeError, "block_size is 1.5, a float", lambda: LongSequenceAttention(1.5)),
        (ArgumentError, "max_bytes is 0", lambda: LongSequenceAttention(max_bytes=0)),
        (ArgumentError, "device is 'tpu'", lambda: LongSequenceAttention(device="tpu")),
        (DTypeError, "progress is 3", lambda: LongSequenceAttention(progress=3)),
    ],
)
def test_options_of_another_kind_are_refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def read_only(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (UnsupportedError, "dropout_p is 0.5", {"dropout_p": 0.5}),
        (ShapeError, "mask has shape", {"mask": np.ones((3, 3), bool)}),
        (ShapeError, "out has shape", {"out": np.ones((3, 3), "float32")}),
        (
            UnsupportedError,
            "alibi_slopes are given with causal='top_left', 90 queries and 100 keys",
            {"alibi_slopes": np.ones(2), "causal": "top_left"},
        ),
        (ArgumentError, "out is read-only", {"out": read_only(np.ones((2, 90, 8), "float32"))}),
    ],
)
def test_what_attention_refuses_is_refused(kind, message, options):
    q, k, v = call_of()
    with pytest.raises(kind, match=message):
        LongSequenceAttention(device="cpu")(q[:, :90], k, v, **options)


@pytest.mark.parametrize(
    ("kind", "message", "targets"),
    [
        (ShapeError, "dk has shape", lambda q, k, v: {"dk": np.empty((2, 3, 8), "f4")}),
        (DTypeError, "dv is float64", lambda q, k, v: {"dv": np.empty((2, 100, 8))}),
        (
            ShapeError,
            r"dk has strides \(0, 32, 4\) .* elements overlap in memory",
            lambda q, k, v: {"dk": as_strided(np.empty_like(k), k.shape, (0, 32, 4))},
        ),
        (ArgumentError, "dq shares memory with k", lambda q, k, v: {"dq": k}),
        (ArgumentError, "dv is read-only", lambda q, k, v: {"dv": read_only(np.empty_like(v))}),
        (
            ArgumentError,
            "dq shares memory with dk",
            lambda q, k, v: dict.fromkeys(["dq", "dk"], np.empty_like(q)),
        ),
        (ShapeError, "lse has shape", lambda q, k, v: {"lse": np.ones((2, 3), "f4")}),
    ],
)
def test_gradients_that_fit_nowhere_are_refused(kind, message, targets):
    call = call_of()
    out, lse = cufa.attention(*call, return_lse=True)
    with pytest.raises(kind, match=message):
        LongSequenceAttention(device="cpu").backward(
            out, *call, **({"out": out, "lse": lse} | targets(*call))
        )


@pytest.mark.parametrize("block_size", [None, 50])
def test_max_bytes_that_are_too_few_are_named_and_those_that_do(block_size):
    few = LongSequenceAttention(block_size, max_bytes=1000, device="cpu")
    with pytest.raises(ArgumentError, match=r"max_bytes is 1000; a block .* pass at") as got:
        few(*call_of(n=300))
    assert ("smaller block_size" in str(got.value)) == (block_size is not None)
    enough = int(re.search(r"take (\d+)", str(got.value))[1])
    for_all = LongSequenceAttention(block_size, max_bytes=enough, device="cpu")
    assert for_all.plan(*call_of(n=300)).bytes == enough


def test_a_card_is_asked_for_in_vain(monkeypatch):
    monkeypatch.setattr(long_call, "_streaming", lambda: None)
    with pytest.raises(DeviceError, match="device is 'gpu' and CuPy finds none"):
        LongSequenceAttention(device="gpu")(*call_of())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nothing_is_warned_of_where_numbers_overflow(dtype):
    q, k, v = np.ones((3, 2, 50, 8), dtype)
    sink = np.ones(2, dtype)
    long = LongSequenceAttention(20, device="cpu")
    out, lse = long(q, k, v, sink=sink, return_lse=True)
    dout = np.full_like(out, 6e4)
    dout[0, 0, 0], dout[0, 1, 0] = np.inf, -np.inf
    dsink = long.backward(dout, q, k, v, out, lse, sink=sink).dsink
    want = cufa.attention_backward(dout, q, k, v, out, lse, sink=sink).dsink
    np.testing.assert_allclose(dsink, want, rtol=1e-3)


def test_one_object_serves_several_calls_at_once():
    """Even one that is made in the middle of another."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 60, 8), dtype=np.float32)
    inner = []

    def call_again(done, total):
        if done == 2 and not inner:
            inner.append(0)
            inner.append(long(q, k, v))

    long = LongSequenceAttention(20, device="cpu", progress=call_again)
    want = LongSequenceAttention(20, device="cpu")(q, k, v)
    with ThreadPoolExecutor(4) as threads:
        outer = [*threads.map(lambda _: long(q, k, v), range(8))]
    np.testing.assert_array_equal(np.stack([*outer, *inner[1:]]), np.stack([want] * 9))


def test_no_heads_have_no_gradients():
    q, k = np.ones((0, 5, 8), "f4"), np.ones((2, 6, 8), "f4")
    long = LongSequenceAttention(4, device="cpu")
    out, lse = long(q, k, k, return_lse=True)
    gradients = long.backward(out, q, k, k, out, lse)
    assert out.shape == (0, 5, 8)
    assert (gradients.dk == 0).all()


def test_the_docstring_shows_what_is_computed():
    found = doctest.testmod(importlib.import_module("cufa.long.sequence"))
    assert found.attempted > 4
    assert not found.failed


EXAMPLE = Path(__file__).parents[1] / "examples" / "long_sequence.py"


@pytest.mark.parametrize("options", [("--no-causal", "--backward"), ("--max-bytes", "2MiB")])
def test_the_example_checks_itself(tmp_path, options):
    sizes = ["--tokens", "1500", "--heads", "2", "--head-dim", "32", "--from-file", tmp_path]
    command = [sys.executable, str(EXAMPLE), *map(str, sizes), *options, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("backend", "q, k, v", "blocks", "cufa", "resident"):
        assert f"\n{line} " in f"\n{done.stdout}"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("5TB", "5TB is not a size"),
        ("1", "--max-bytes: max_bytes is 1; a block of 128"),
        ("1400KiB", "--max-bytes: max_bytes is 1433600; a block"),  # too few for gradients
    ],
)
def test_the_example_refuses_a_size_that_does_not_do(option, message):
    command = [sys.executable, str(EXAMPLE), "--tokens", "200", "--max-bytes", option, "--backward"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


FILE = """
import resource, sys
import numpy as np
import cufa

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

tokens = 6000
arrays = {n: np.memmap(sys.argv[1] + n, "f2", "w+", shape=(2, tokens, 32)) for n in "qkvo"}
for name in "qkv":
    arrays[name][...] = np.random.default_rng(0).random(arrays[name].shape, np.float32)
q, k, v, out = arrays.values()
long = cufa.LongSequenceAttention(1000, device="cpu")
long(q[:, :100], k, v)
before = peak()
long(q, k, v, out=out, causal=True)
print(peak() - before)
"""


def test_a_long_file_takes_little_memory(tmp_path):
    pytest.importorskip("resource")
    command = [sys.executable, "-c", FILE, f"{tmp_path}/"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 40e6  # scores would be 288 MB in float32
