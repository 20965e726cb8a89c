"""``python -m cufa info``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run

import cufa
from cufa.gpu import cache, survey
from cufa.gpu.config import tuned_arch
from cufa.gpu.device import Device
from cufa.gpu.registry import KERNELS
from cufa.tools import cli, info


def test_info_runs_and_finds_the_results_right():
    done = run("info")
    assert done.returncode == 0, done.stderr
    assert cufa.__version__ in done.stdout
    assert "right" in done.stdout


def test_json_is_one_object_of_all_that_is_shown(capsys):
    assert cli.main(["info", "--json", "--arch", "80"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == info.gather(80).keys()
    assert {test["passed"] for test in facts["self_test"]} == {True}


@pytest.mark.parametrize("arch", [70, 75, 80, 89, 90, 120])
def test_the_kernels_shown_are_those_that_are_used(arch):
    for row in info.gather(arch)["kernels"]:
        used = cufa.get_best_config(
            info.SEQLEN,
            head_dim=row["head_dim"],
            dtype=row["dtype"],
            kernel=row["kernel"],
            arch=arch,
        )
        assert used == cufa.get_best_config(
            info.SEQLEN, head_dim=row["head_dim"], dtype=row["dtype"], arch=arch
        )
        assert used._asdict().items() <= row.items()


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_tiles_that_were_measured_elsewhere_are_said_to_be(arch, capsys):
    cli.main(["info", "--arch", str(arch)])
    shown = capsys.readouterr().out
    kernels = {row["kernel"] for row in info.gather(arch)["kernels"]}
    own = {name for name in kernels if tuned_arch(name, Device.of_arch(arch)) == arch}
    said = {name for name in kernels if f"{name} has no tiles of sm_{arch}" in shown}
    assert said == kernels - own


def test_the_cache_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    cache.store("a", b"12345")
    cache.store("b", b"678")
    kept = info.gather()["cache"]
    assert kept == {"folder": str(tmp_path), "files": 2, "bytes": 8}


@pytest.mark.parametrize(
    ("driver", "shown", "extra"),
    [
        (12080, "for CUDA 12.8", "cuda12"),
        (13000, "for CUDA 13.0", "cuda13"),
        (None, None, "compile"),
    ],
)
def test_what_is_missing_comes_with_the_command_for_this_driver(driver, shown, extra, monkeypatch):
    monkeypatch.setattr(survey, "driver_version", lambda: driver)
    monkeypatch.setattr(survey, "_installed", lambda *names: None)
    parts = {part["name"]: part for part in info.gather()["parts"]}
    assert f'python -m pip install "cufa[{extra}]"' in parts["cuda.core"]["way_out"]
    assert parts["driver"]["version"] == shown


def test_a_wrong_result_fails(monkeypatch, capsys):
    right = cufa.attention

    def wrong(*arrays, **options):
        out, lse = right(*arrays, **options)
        return out + 0.1, lse

    monkeypatch.setattr(cufa, "attention", wrong)
    assert cli.main(["info"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_nan_in_the_self_test_fails_and_json_stays_json(monkeypatch, capsys):
    def empty(q, k, v, **options):
        return q * np.nan, q[..., 0]

    monkeypatch.setattr(cufa, "attention", empty)
    assert cli.main(["info", "--json"]) == 1
    text = capsys.readouterr().out
    assert "NaN or infinity" in json.loads(text)["self_test"][0]["error"]


def test_an_error_in_the_self_test_is_shown_and_fails(monkeypatch, capsys):
    def broken(*arrays, **options):
        raise cufa.BuildError("no compiler")

    monkeypatch.setattr(cufa, "attention", broken)
    assert cli.main(["info"]) == 1
    assert "failed: BuildError: no compiler" in capsys.readouterr().out


@pytest.mark.gpu
def test_every_card_is_shown_and_tested(cupy):
    facts = info.gather()
    count = cupy.cuda.runtime.getDeviceCount()
    assert [device["number"] for device in facts["devices"]] == list(range(count))
    places = {f"GPU {number}" for number in range(count)}
    kernels = {test["kernel"] for test in facts["self_test"] if test["place"] in places}
    assert {"CPU"} | places == {test["place"] for test in facts["self_test"]}
    assert kernels
    assert kernels <= {spec.name for spec in KERNELS}
    assert all(test["passed"] for test in facts["self_test"]), facts["self_test"]
    assert all(part["version"] for part in facts["parts"]), facts["parts"]
