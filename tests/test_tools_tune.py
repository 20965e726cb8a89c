"""`python -m cufa tune` and its files: what is tried, what wins, what is written and in force.

No GPU: kernels run in the emulator or not at all, and a scripted clock says what each tile takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import build as emulator_build
from emulator.machine import attention as emulated_attention
from emulator.machine import emulator
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_machine import PaperMachine

import cufa
from cufa.arrays import Arrays, sign
from cufa.bounds import exact
from cufa.errors import ArgumentError, BuildError, DeviceError
from cufa.gpu import build, config, launch, tuning
from cufa.gpu.config import ANY, LENGTHS, Config, Scores, Tuned, find_config, smem_bytes
from cufa.gpu.device import Device
from cufa.gpu.plan import KernelKey
from cufa.testing import assert_within_rounding, to_numpy
from cufa.tools import race, tune
from cufa.tools.candidates import candidates
from cufa.tools.race import Track, key_of, row_of
from cufa.tools.rigs import Rig
from cufa.tools.timing import Burst, Contender
from cufa.tools.workloads import draw, workload

CARD = Device.of_arch(90)
#: Two lengths of one head dim: quick to compute on the CPU, which stands in for kernels.
SMALL = (
    "--seqlen",
    "40",
    "80",
    "--head-dim",
    "64",
    "--batch",
    "1",
    "--heads",
    "2",
    "--rounds",
    "2",
)
TILES = [Config(64, 64, 128, 1, 1), Config(64, 32, 128, 1, 2), Config(128, 64, 256, 1, 1)]


class Scripted:
    """A clock on which a tile takes what a function of it says, in milliseconds."""

    def __init__(self, cost: Callable[[Config], float]) -> None:
        self.cost = cost
        self.timed: list[Config] = []

    def burst(self, contender: Contender, count: int) -> Burst:
        tile = Config(*map(int, re.findall(r"=(\d+)", contender.name)))
        self.timed.append(tile)
        return Burst(self.cost(tile), 1.0)


def track_of(
    cost: Callable[[Config], float] = lambda tile: 1.0,
    attention: Callable[..., Any] = cufa.attention,
    compile: Callable[[KernelKey], str] = lambda key: "0 bytes spill stores",
    now: Callable[[], float] = lambda: 0.0,
) -> Track:
    """A track without a card."""
    rig = Rig("numpy", np, Scripted(cost), lambda call: 0, {})
    return Track(rig, CARD, attention, compile, now)


def options(*arguments: str) -> argparse.Namespace:
    """A command line of the tool."""
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args([*SMALL, *arguments])


def tile_in_use() -> Config:
    """Of the one row that a candidate is tried with."""
    (row,) = config.tuned.rows
    return row.config


@pytest.fixture(autouse=True)
def _built_in_table() -> Iterator[None]:
    with tuning.using(Tuned()):
        yield


@pytest.fixture
def three_tiles(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What is tried, for tests that try little."""
    monkeypatch.setattr(tune, "candidates", lambda *_: TILES)
    return TILES


# What is tried

SHAPES = [
    ("fa3_fwd_sm90", "bfloat16", 64, 64),
    ("fa3_fwd_sm90", "float16", 96, 128),
    ("fa2_fwd", "bfloat16", 64, 64),
    ("fa2_fwd", "float16", 96, 128),
    ("fa2_fwd", "bfloat16", 256, 256),
    ("fa2_fwd", "float32", 64, 64),
    ("fa2_fwd", "float64", 64, 64),
    ("fa2_fwd_simt", "float32", 192, 192),
    ("fa2_fwd_simt", "float64", 64, 192),
    ("fa1_fwd", "float16", 64, 64),
]


def tried(kernel: str, dtype: str, d: int, dv: int) -> tuple[Config, list[Config]]:
    """The tile in force for some shape, and its candidates."""
    first = find_config(kernel, dtype, d, dv, 4096, Scores.OPEN, False, CARD)
    return first, candidates(kernel, dtype, d, dv, CARD, first)


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_are_many_and_the_card_has_room_for_each(shape):
    kernel, dtype, d, dv = shape
    first, found = tried(*shape)
    assert len(set(found) - {first}) == len(found) > 20
    for tile in found:
        assert smem_bytes(kernel, tile, dtype, d, dv) <= CARD.shared_memory
        assert tile.threads * tile.blocks_per_sm <= 2048


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_asserts_no_more_than_the_candidates_keep_to(shape):
    pytest.importorskip("cuda.bindings.nvrtc")
    kernel, dtype, d, dv = shape
    first, found = tried(*shape)
    work = workload(4096, d, dtype=dtype, head_dim_v=dv)
    key = key_of(work, CARD, kernel[:3])
    assert key.config == first
    most = max(found, key=lambda tile: tile.block_m * tile.stages)  # barriers and what goes by them
    for tile in {most, found[len(found) // 2]}:
        code, _ = build.compile_key(key._replace(config=tile))
        assert code


# What wins


@settings(max_examples=30)
@given(
    fast=st.sampled_from([0.5, 0.98, 0.995, 0.9999, 1.0, 1.2]),
    place=st.integers(0, 39),
    slower=st.floats(1.0, 4.0),
)
def test_the_fastest_tile_wins_unless_it_is_hardly_faster(fast, place, slower):
    work = workload(40, 64, batch=1, heads=1)
    key = key_of(work, CARD, "auto")
    tiles = tried("fa2_fwd", "bfloat16", 64, 64)[1][:40]
    track = track_of(lambda tile: {tiles[place]: fast, key.config: 1.0}.get(tile, slower))
    found = race.race(track, work, key, tiles, "auto", 2, 1.0)
    assert found.winner == (tiles[place] if fast < 0.99 else key.config)
    assert found.tried == 41
    assert found.gain == 1 / min(fast, 1) if fast < 0.99 else found.gain == 1


def test_a_tile_that_is_wrong_spills_or_does_not_compile_is_not_timed(three_tiles):
    right, wrong, spilling = three_tiles

    def attention(*arrays: Any, **how: Any) -> Any:
        out = cufa.attention(*arrays, **how)
        return out + out.dtype.type(1) if tile_in_use() == wrong else out

    def compile(key: KernelKey) -> str:
        if key.right:
            raise BuildError("static assertion failed")
        return f"ptxas info: {4 if key.config == spilling else 0} bytes spill stores"

    track = track_of(lambda tile: 0.5 if tile in three_tiles else 1.0, attention, compile)
    full, _, causal, _ = tune.search(options(), track, 1.0)
    assert {*track.rig.clock.timed} == {right, full.key.config, causal.key.config}
    assert full.winner == right
    assert causal.winner == causal.key.config


def test_when_time_is_up_what_is_in_force_stays(tmp_path):
    ticks = iter(range(0, 10**9, 1000))
    track = track_of(lambda tile: 1 / tile.block_m, now=lambda: float(next(ticks)))
    out = tmp_path / "late.json"
    assert tune.tune(options("--budget", "1", "--out", str(out)), track) == 0
    works = [workload(n, 64, causal=causal) for n in (40, 80) for causal in (False, True)]
    assert {*track.rig.clock.timed} == {key_of(work, CARD, "auto").config for work in works}
    tuning.read(out, [CARD.name])


@pytest.mark.skipif(emulator_build.obstacle() is not None, reason=str(emulator_build.obstacle()))
def test_tiles_are_checked_in_the_kernel_itself():
    machine = emulator(90)
    seen: list[Any] = []

    def attention(*arrays: Any, **how: Any) -> Any:
        seen.append(tile_in_use())
        return emulated_attention(machine, *arrays, **how)

    track = track_of(attention=attention)
    work = workload(40, 64)
    key = key_of(work, CARD, "fa2")
    for tile in TILES[:2]:
        assert race.is_right(track, work, key, tile, "fa2")
    assert seen == TILES[:2]


def test_tiles_are_checked_with_the_head_dims_that_they_are_timed_with(three_tiles):
    seen = set()

    def attention(q: Any, k: Any, v: Any, **how: Any) -> Any:
        seen.add((q.dtype.name, q.shape[-1], v.shape[-1]))
        return cufa.attention(q, k, v, **how)

    shape = ("--head-dim", "60", "--head-dim-v", "44", "--dtype", "float16")
    tune.search(options(*shape), track_of(attention=attention), 1.0)
    assert seen == {("float16", 60, 44)}


def test_a_shape_that_does_not_run_at_all_is_an_error(three_tiles):
    def attention(*arrays: Any, **how: Any) -> Any:
        raise MemoryError("out of memory")

    with pytest.raises(DeviceError, match=r"bfloat16 d64 40 full.*out of memory"):
        tune.search(options(), track_of(attention=attention), 1.0)


def test_heads_that_kv_heads_do_not_divide_are_refused():
    with pytest.raises(ArgumentError, match="--kv-heads is 3 and there are 2 heads"):
        tune.search(options("--kv-heads", "3"), track_of(), 1.0)


def test_a_kernel_that_does_not_serve_the_shape_is_refused():
    with pytest.raises(ArgumentError, match="--kernel is fa2_fwd_simt, and fa2_fwd is what serves"):
        tune.search(options("--kernel", "fa2_fwd_simt"), track_of(), 1.0)


# What is written


def tuned_file(path: Path, *arguments: str) -> Path:
    """A file by a track on which narrow tiles are fast."""
    track = track_of(lambda tile: tile.block_n + tile.blocks_per_sm / 8)
    assert tune.tune(options("--out", str(path), *arguments), track) == 0
    return path


def config_at(seqlen: int, head_dim: int = 64, causal: bool = False, **more: Any) -> Config:
    """Of bfloat16 on the card."""
    return cufa.get_best_config(seqlen, head_dim=head_dim, dtype="bfloat16", causal=causal, **more)


def test_a_file_gives_each_length_its_winner_and_says_why(tmp_path, three_tiles, capsys):
    path = tmp_path / "t.json"
    # The smallest wins at 40; at 80 the clock, which cannot tell lengths apart, gives the same.
    tuned_file(path)
    assert str(path) in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["card"] == CARD.name
    assert content["cufa"] == cufa.__version__
    for row in content["rows"]:
        for figures in row["measured"]:
            (tile,) = [t for t in figures["tiles"] if {**row["config"]}.items() <= t.items()]
            assert tile["median_ms"] == min(t["median_ms"] for t in figures["tiles"])
    before = [config_at(n) for n in (19, 20)]
    cufa.load_tuning(path)
    assert [config_at(n) for n in (19, 20)] == before  # below half of the shortest
    assert [config_at(n) for n in (40, 80, 10**6)] == [TILES[1]] * 3


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=4, unique=True).map(sorted),
    data=st.data(),
)
def test_a_tile_holds_where_it_was_measured_and_the_table_well_below(lengths, data):
    findings = []
    for n in lengths:
        work = workload(n, 128, causal=True)
        key = key_of(work, CARD, "auto")
        winner = data.draw(st.sampled_from([*TILES, key.config]))
        findings.append(race.Finding(work, key, winner, {}, 1))
    rows, measured = tune.table(findings, CARD)
    assert len(rows) == len(measured)
    bounds = [row.seqlen for row in rows]
    assert bounds == sorted({*bounds})
    assert bounds[-1] == ANY
    below = [n for n in {1, *LENGTHS, lengths[0] // 2} if 1 <= n <= lengths[0] // 2]
    built_in = {n: config_at(n, 128, True) for n in below}
    with tuning.using(Tuned(tuple(rows), (CARD.name,))):
        for finding in findings:
            assert config_at(finding.work.seqlen_q, 128, True) == finding.winner
        assert {n: config_at(n, 128, True) for n in below} == built_in


# What a file does


def test_the_next_call_uses_what_was_loaded_and_none_returns_to_the_table(tmp_path, three_tiles):
    first, second = (tuned_file(tmp_path / name) for name in ("a.json", "b.json"))
    machine = PaperMachine(CARD)
    q = np.zeros((1, 2, 80, 64), np.float16)
    call = sign(Arrays(q, q, q), False, None, None, None, "bhsd", False, "auto")

    def tile() -> Config:
        launch.run(machine, call, Arrays(q, q, q))
        return machine.launched[-1][0].key.config

    built_in = tile()
    for file in (first, None, second, first, None):
        cufa.load_tuning(file)
        assert tuning.in_force() == (None if file is None else str(file))
        assert tile() == (built_in if file is None else TILES[1])
    assert built_in != TILES[1]


head_dims = st.sampled_from([32, 64, 96, 128, 256])


@given(
    measured=st.tuples(head_dims, head_dims),
    asked=st.tuples(head_dims, head_dims),
    arch=st.sampled_from([80, 90, 100]),
    window=st.booleans(),
    seqlen=st.integers(0, 10**5),
)
def test_rows_hold_for_their_architecture_head_dims_and_scores(
    measured, asked, arch, window, seqlen
):
    head_dim, head_dim_v = measured
    tile = Config(16, 16, 32, 1, 4)  # small enough for all
    key = key_of(workload(64, head_dim, head_dim_v=head_dim_v), CARD, "auto")
    given = dict(head_dim=asked[0], head_dim_v=asked[1], arch=arch, window=window)
    before = config_at(seqlen, **given)
    with tuning.using(Tuned((row_of(key, tile),), (CARD.name,))):
        after = config_at(seqlen, **given)
    alike = max(measured) == max(asked) and (len({*measured}) == len({*asked}))
    assert after == (tile if alike and arch == 90 and not window else before)


def test_rows_hold_for_their_card_alone():
    key = key_of(workload(64, 64), CARD, "auto")
    before = config_at(64)
    with tuning.using(Tuned((row_of(key, TILES[1]),), ("another card (sm_90)",))):
        assert config_at(64) == before != TILES[1]


def test_warmup_compiles_the_tiles_of_a_file(monkeypatch):
    key = key_of(workload(64, 64), CARD, "auto")
    seen: list[KernelKey] = []
    monkeypatch.setattr(build, "ensure_cached", seen.append)
    rows = tuple(row_of(key, tile, n) for tile, n in zip(TILES, (100, 777, ANY), strict=True))
    with tuning.using(Tuned(rows, (CARD.name,))):
        cufa.warmup(head_dim=64, dtype="bfloat16", causal=False, arch=90)
    assert {key.config for key in seen} == {*TILES}


def test_a_file_is_read_by_a_new_process(tmp_path, three_tiles):
    file = tuned_file(tmp_path / "t.json")
    done = python(PRINT_TILE, CUFA_TUNING=str(file))
    assert done.stdout.strip() == str(TILES[1]), done.stderr
    assert python(PRINT_TILE).stdout.strip() == str(config_at(80))
    file.write_text("{")
    refused = python(PRINT_TILE, CUFA_TUNING=str(file))
    assert refused.returncode
    assert f"ArgumentError: tuning file {file} cannot be read" in refused.stderr


def test_a_refused_file_stops_calls_and_not_what_replaces_it(tmp_path):
    """A file of an older version must not stop the tool that makes a new one."""
    stale = {"CUFA_TUNING": str(tmp_path / "gone.json")}
    assert python(f"import cufa; cufa.load_tuning(None); {PRINT_TILE}", **stale).stdout.strip() == (
        str(config_at(80))
    )
    with_tool = "import sys; from cufa.tools import cli; sys.exit(cli.main({}))"
    tuned = python(with_tool.format(["tune", "--out", str(tmp_path)]), **stale)
    assert "gone.json" not in tuned.stderr
    shown = python(with_tool.format(["info", "--json"]), **stale)
    facts = json.loads(shown.stdout)
    assert shown.returncode == 1
    assert "gone.json cannot be read" in facts["tuning_refused"]
    assert facts["kernels"]
    for tool in ("verify", "bench", "warmup"):
        refused = python(with_tool.format([tool]), **stale)
        assert refused.returncode == 2
        assert refused.stderr.startswith("cufa: tuning file")


PRINT_TILE = "import cufa; print(cufa.get_best_config(80, dtype='bfloat16'))"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )


# On a card


@pytest.mark.gpu
def test_a_card_is_tuned_and_its_file_gives_right_results(cupy, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda *arguments: candidates(*arguments)[:6])
    out = tmp_path / "card.json"
    chosen = ("--seqlen", "512", "--dtype", "float16", "--budget", "60", "--out", str(out))
    assert tune.run(options(*chosen)) == 0
    cufa.load_tuning(out)
    (arrays,) = draw(cupy, workload(600, 64, dtype="float16", batch=1, heads=2))
    q, k, v = arrays[:3]
    got = cufa.attention(q, k, v, causal=True)
    assert_within_rounding(got, exact(*map(to_numpy, (q, k, v)), causal=True))
