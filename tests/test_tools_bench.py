"""`python -m cufa bench`: what it counts, whom it times, what it writes. On a card:
test_tools_bench_gpu.py."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa import cpu
from cufa.bounds import exact
from cufa.errors import ArgumentError, DeviceError, UnsupportedError
from cufa.gradient_bounds import exact_gradients
from cufa.options import FLOAT_DTYPES
from cufa.testing import assert_within_rounding
from cufa.tools import bench, layer, peers, picture, rigs, timing
from cufa.tools.peers import PEERS, Peer
from cufa.tools.results import COLUMNS, Report, Result
from cufa.tools.timing import (
    MAX_CALLS,
    Burst,
    Contender,
    Figures,
    HostClock,
    compare,
    host_extra_bytes,
)
from cufa.tools.workloads import DIRECTIONS, PRESETS, Workload, copies_beyond, draw, workload

SMALL = ("--seqlen", "16", "24", "--head-dim", "8", "--dtype", "float32", "--heads", "2")
QUICK = (*SMALL, "--batch", "1", "--rounds", "2", "--backend", "numpy")


@st.composite
def works(draw: st.DrawFn) -> Workload:
    """Small workloads of every kind."""
    kv_heads = draw(st.integers(1, 3))
    return workload(
        draw(st.integers(1, 20)),
        draw(st.sampled_from([1, 8, 17])),
        dtype=draw(st.sampled_from(FLOAT_DTYPES)),
        causal=draw(st.booleans()),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen_q=draw(st.none() | st.integers(1, 20)),
        head_dim_v=draw(st.none() | st.sampled_from([4, 16])),
        bias=draw(st.booleans()),
        out=draw(st.booleans()),
    )


class Scripted:
    """A clock on which each contender takes the time that it is given, in milliseconds."""

    def __init__(self, **ms: float) -> None:
        self.ms = ms
        self.bursts: list[tuple[str, int]] = []

    def burst(self, contender: Contender, count: int) -> Burst:
        self.bursts.append((contender.name, count))
        return Burst(self.ms[contender.name], 7.0)


def options(*arguments: str) -> argparse.Namespace:
    """A command line of the tool."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def idle(name: str, **more: Any) -> Contender:
    """A contender that does nothing."""
    return Contender(name, [lambda: None], **more)


def idle_rig(backend: str) -> rigs.Rig:
    """A rig on which nothing can be timed."""
    return rigs.Rig(backend, np, Scripted(), host_extra_bytes, {})


def failing(name: str, said: str) -> Contender:
    """A contender that raises."""

    def call() -> None:
        raise RuntimeError(said)

    return Contender(name, [call])


# What is counted


@given(work=works())
def test_causal_counts_the_pairs_that_are_visible_and_half_of_a_square(work):
    seen = np.tri(work.seqlen_q, work.seqlen_k, work.seqlen_k - work.seqlen_q, bool).sum()
    square = work.seqlen_q * work.seqlen_k
    half = work.seqlen_q == work.seqlen_k
    assert work.pairs == (square if not work.causal else square // 2 if half else seen)


@given(work=works(), copies=st.integers(1, 3))
def test_bytes_are_those_of_the_arrays(work, copies):
    for q, k, v, *_ in draw(np, work, copies):
        out = cufa.attention(q, k, v)
        assert work.bytes == sum(a.nbytes for a in (q, k, v, out))
        assert work.flop == 2 * work.pairs * (q.size + out.size) // work.seqlen_q


@given(work=works())
def test_both_directions_are_one_and_the_other(work):
    forward, backward, both = (replace(work, direction=name) for name in DIRECTIONS)
    assert both.flop == forward.flop + backward.flop
    assert both.bytes == forward.bytes + backward.bytes
    assert len({str(forward), str(backward), str(both)}) == 3
    assert len({forward.family, backward.family, both.family}) == 3
    square = replace(backward, head_dim_v=work.head_dim)
    assert square.flop == 2.5 * replace(square, direction="forward").flop  # 5 products, not 2


@given(work=works(), copies=st.integers(2, 4))
def test_copies_of_the_inputs_share_no_memory(work, copies):
    drawn = draw(np, work, copies)
    assert len(drawn) == copies
    first, last = drawn[0], drawn[-1]
    assert not any(np.shares_memory(a, b) for a, b in zip(first[:3], last[:3], strict=True))


@given(work=works(), cache=st.integers(0, 1 << 16))
def test_the_inputs_are_rotated_until_they_exceed_the_cache_twice(work, cache):
    copies = copies_beyond(cache, work)
    assert copies * work.bytes >= 2 * cache or copies == copies_beyond(1 << 40, work)
    assert copies == 1 or (copies - 1) * work.bytes < 2 * cache


@given(seqlen=st.integers(1, 2048), head_dim=st.integers(1, 256))
def test_a_cpu_is_given_a_thirtieth_of_the_work_of_a_gpu(seqlen, head_dim):
    asked = options("--seqlen", str(seqlen), "--head-dim", str(head_dim))
    flop = {
        backend: sum(work.flop for work in bench.workloads(asked, idle_rig(backend)))
        for backend in rigs.BACKENDS
    }
    assert 30 * flop["numpy"] <= flop["cupy"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_each_of_its_problems_once(name):
    titles = [str(work) for work in PRESETS[name]()]
    assert len(set(titles)) == len(titles) > 0


# Who is timed, and how


@given(rounds=st.integers(1, 5), names=st.sets(st.sampled_from("abcd"), min_size=1))
def test_every_round_times_each_contender_once(rounds, names):
    clock = Scripted(**dict.fromkeys(names, 1.0))
    found = compare([idle(name) for name in sorted(names)], clock, rounds)
    assert list(found) == sorted(names)
    bursts = [name for name, _ in clock.bursts][len(names) :]  # without those that warm up
    for start in range(0, len(bursts), len(names)):
        assert {*bursts[start : start + len(names)]} == names
    assert all(len(figures.ms) == rounds for figures in found.values())


def test_rounds_have_orders_of_their_own():
    clock = Scripted(a=1.0, b=1.0)
    compare([idle("a"), idle("b")], clock, 60)
    firsts = [name for name, _ in clock.bursts[2::2]]
    assert {*firsts} == {"a", "b"}  # by chance alone they agree once in 2**59 runs


@given(ms=st.floats(1e-9, 1e4))
def test_a_burst_has_at_least_one_call_and_fits_the_queue(ms):
    clock = Scripted(a=ms)
    compare([idle("a")], clock, 1)
    assert 1 <= clock.bursts[-1][1] <= MAX_CALLS


@given(count=st.integers(1, 9), seconds=st.floats(0, 30))
def test_a_sustained_burst_begins_after_so_much_work_and_does_not_count_it(count, seconds):
    now = [0.0]

    def call():
        now[0] += 1  # a second

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        burst = HostClock(seconds).burst(Contender("a", [call]), count)
    assert burst.ms == 1000
    before = now[0] - count
    assert seconds <= before < seconds + count + 1


def test_only_a_length_of_time_is_one(capsys):
    assert options("--sustained", "1.5").sustained == 1.5
    for text in ("-1", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            options("--sustained", text)
        assert "--sustained" in capsys.readouterr().err


def test_who_raises_is_named_with_the_reason_and_the_others_are_timed():
    found = compare([failing("a", "no kernel\nmore"), idle("b")], Scripted(b=2.0), 3)
    assert found["a"] == "no kernel"
    assert found["b"] == Figures((2.0,) * 3, (7.0,) * 3)


def test_a_burst_goes_round_the_copies():
    seen: list[int] = []
    calls = [partial(seen.append, copy) for copy in range(3)]
    HostClock().burst(Contender("a", calls), 7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


@given(ms=st.lists(st.floats(0.1, 10), min_size=1), factor=st.floats(0.5, 2))
def test_spread_does_not_depend_on_the_unit(ms, factor):
    here = Figures(tuple(ms), (0.0,))
    there = Figures(tuple(m * factor for m in ms), (0.0,))
    assert math.isclose(here.spread, there.spread, abs_tol=1e-9)
    assert math.isclose(here.median_ms * factor, there.median_ms)


@pytest.mark.filterwarnings("error")
@settings(max_examples=40)
@given(work=works())
@pytest.mark.parametrize("peer", [p for p in PEERS if p.backend == "numpy"], ids=lambda p: p.name)
def test_plain_numpy_is_the_same_attention(peer, work):
    (arrays,) = draw(np, work)
    (call,) = peer.contender(peer.open(), work, [arrays]).calls
    bias = None if arrays.bias is None else arrays.bias[None, None]
    seen = slice(max(0, work.seqlen_q - work.seqlen_k) if work.causal else 0, None)
    out = call()  # a row that sees no key is NaN, as in the formula
    q, k, v = arrays[:3]
    wanted = exact(q, k, v, causal=work.causal, bias=bias)
    assert out.shape == wanted.out.shape
    assert out.dtype == q.dtype
    error = abs(out.astype(np.float64) - wanted.out)[:, :, seen]
    assert (error <= 2 * wanted.out_bound[:, :, seen]).all()


@settings(max_examples=40)
@given(work=works())
@pytest.mark.parametrize("algorithm", ["fa2", "standard"])
def test_cufa_is_called_as_the_problem_says(algorithm, work):
    (arrays,) = draw(np, work)
    (call,) = peers.ours(algorithm, work, [arrays], lambda call: 0).calls
    bias = None if arrays.bias is None else arrays.bias[None, None]
    out = call()
    assert_within_rounding(out, exact(*arrays[:3], causal=work.causal, bias=bias))
    assert (out is call()) == work.out


@pytest.mark.filterwarnings("error")
@settings(max_examples=40)
@given(work=works().filter(lambda work: not work.causal or work.seqlen_q <= work.seqlen_k))
@pytest.mark.parametrize("direction", ["backward", "both"])
@pytest.mark.parametrize("name", ["cufa fa2", "plain"])
def test_gradients_are_those_of_the_problem(name, direction, work):
    work = replace(work, direction=direction, out=False)
    (arrays,) = draw(np, work)
    if name == "plain":
        (peer,) = (peer for peer in PEERS if peer.name == name)
        contender = peer.contender(peer.open(), work, [arrays])
    else:
        contender = peers.ours("fa2", work, [arrays], host_extra_bytes)
    (call,) = contender.calls
    first, again = ([a for a in call() if a is not None] for _ in range(2))
    bias = None if arrays.bias is None else arrays.bias[None, None]
    (*want, _, _), (*bounds, _, _), _ = exact_gradients(
        arrays.dout, *arrays[:3], causal=work.causal, bias=bias
    )
    for got, same, gradient, bound in zip(first, again, want, bounds, strict=True):
        assert (got.shape, got.dtype) == (gradient.shape, arrays.q.dtype)
        assert np.array_equal(got, same)
        assert (abs(got.astype(np.float64) - gradient) <= 2 * bound).all()


def test_who_has_no_gradients_is_named_with_the_reason(capsys):
    assert bench.run(options(*QUICK, "--causal", "full", "--direction", "backward")) == 0
    shown = capsys.readouterr().out
    assert "- in-place, 2 problems: has no gradients" in shown
    assert "backward" in shown
    assert "cufa fa2" in shown
    assert "cufa standard" not in shown


def test_extra_memory_is_what_a_call_holds_beyond_its_result():
    def call() -> Any:
        scratch = np.ones(1 << 20, np.uint8)
        return scratch[: 1 << 19].copy()

    assert 1 << 20 <= host_extra_bytes(call) < 5 << 18


def test_a_peer_that_is_not_here_is_named_with_the_reason():
    def absent() -> Any:
        raise ImportError("No module named 'nobody'")

    found, missing = peers.open_all([Peer("nobody", "numpy", FLOAT_DTYPES, absent), *PEERS[-1:]])
    assert [peer.name for peer, _ in found] == [PEERS[-1].name]
    assert missing == {"nobody": "No module named 'nobody'"}


def test_a_peer_refuses_a_dtype_that_it_does_not_take():
    half = PEERS[0]
    with pytest.raises(UnsupportedError, match="takes float16 or bfloat16"):
        half.contender(lambda *_: idle("x"), workload(8, 8, dtype="float64"), [])


# What comes out


def report(**ms: float) -> Report:
    """Of one problem, where contenders took so long; those with a capital are peers."""
    outcomes: dict[str, Figures | str] = {n: Figures((t,), (1.0,), 1 << 20) for n, t in ms.items()}
    outcomes["absent"] = "out of memory"
    result = Result(workload(64, 8), outcomes, frozenset(n for n in ms if n.isupper()))
    return Report("numpy", {"machine": "toy"}, 1, {"nobody": "not installed"}, [result])


@given(ours=st.floats(0.1, 10), theirs=st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_the_ratio_is_to_the_best_peer(ours, theirs):
    (result,) = report(ours=ours, **dict(zip("ABC", theirs, strict=False))).results
    ratios = {name: result.ratio(figures) for name, figures in result.figures.items()}
    assert math.isclose(ratios.pop("ours"), min(theirs) / ours)
    assert max(ratios.values()) == 1


def test_without_peers_there_is_no_ratio():
    found = report(ours=1.0)
    assert found.results[0].ratio(found.results[0].figures["ours"]) is None
    assert all(len(row) == len(COLUMNS) for row in found.rows())


def test_json_holds_every_figure_and_every_reason():
    found = json.loads(json.dumps(report(ours=2.0, A=1.0).as_json()))
    (row,) = found["rows"]
    assert row["contenders"]["absent"] == {"reason": "out of memory"}
    assert row["contenders"]["ours"]["ratio"] == 0.5
    assert row["contenders"]["A"]["tflops"] * 1e9 == row["flop"]
    assert found["missing"] == {"nobody": "not installed"}


def test_markdown_has_a_column_for_each_contender_and_a_line_for_each_problem():
    *_, head, rule, line = report(ours=2.0, A=1.0).as_markdown().strip().splitlines()
    assert head == "| problem | ours | A | absent |"
    assert len({text.count("|") for text in (head, rule, line)}) == 1


def test_json_on_stdout_is_all_that_is_there(capsys):
    assert bench.run(options(*QUICK, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {f"cufa {a}" for a in cpu.ALGORITHMS if a != "auto"} | {"plain", "in-place"}
    assert [{*row["contenders"]} for row in found["rows"]] == [wanted] * 4
    assert found["backend"] == "numpy"


def test_the_table_names_problems_contenders_and_who_is_missing(capsys):
    assert bench.run(options(*QUICK, "--causal", "full", "--peer", "plain")) == 0
    said = capsys.readouterr().out
    for text in ("float32 d8 16 full", "float32 d8 24 full", "cufa fa2", "plain", "TFLOP/s"):
        assert text in said
    assert "in-place" not in said


def test_files_are_written_as_asked(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown", "plot")}
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    arguments[-1] = str(tmp_path / "bench.png")
    assert bench.run(options(*QUICK, *arguments)) == 0
    assert len(json.loads(paths["json"].read_text())["rows"]) == 4
    assert paths["markdown"].read_text().count("| float32") == 4
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_panel_for_each_kind_with_a_curve():
    works = [workload(n, 8, causal=causal) for n, causal in ((16, True), (32, True), (16, False))]
    results = [Result(work, {}, frozenset()) for work in works]
    (panel,) = picture.panels_of(results).values()
    assert panel == results[:2]
    assert len(picture.panels_of(results[1:])) == 2  # without curves, points


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "llm", "--seqlen", "8"), "--preset llm has shapes of its own.*--seqlen"),
        ((*QUICK, "--peer", "nobody"), "--peer is 'nobody'.*'plain'"),
        ((*QUICK, "--peer", "none", "plain"), "--peer is none plain; none stands alone"),
        ((*QUICK, "--only", "nothing"), "--only is 'nothing'"),
        ((*QUICK, "--kv-heads", "3"), "--kv-heads is 3"),
        ((*QUICK, "--json", "/no/such/folder/x"), "--json is /no/such"),
        ((*QUICK, "--json", "/"), "--json is /, which is a folder"),
        ((*QUICK, "--markdown", "."), r"--markdown is \., which is a folder"),
        ((*QUICK, "--plot", "x.foo"), "--plot is x.foo, .*'foo'; choose one of .*png"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_timed(arguments, said):
    rig = idle_rig("numpy")
    with pytest.raises(ArgumentError, match=said):
        bench.bench(options(*arguments), rig)
    assert not rig.clock.bursts


@pytest.mark.parametrize("option", ["--preset=cpu", "--peer=none", "--sustained=1"])
def test_ranks_have_no_use_for_presets_and_peers(option):
    with pytest.raises(ArgumentError, match="does not go with --distributed"):
        bench.run(options("--distributed", "--backend", "numpy", option))


def test_a_file_that_may_not_be_written_is_said_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the superuser may write any
    with pytest.raises(ArgumentError, match=r"--json is .*x\.json, which may not be written"):
        bench.check_file("json", str(tmp_path / "x.json"))


def test_asking_for_a_gpu_where_there_is_none_is_an_error(monkeypatch):
    monkeypatch.setattr(rigs, "obstacle", lambda: "no CUDA-capable device is detected")
    with pytest.raises(DeviceError, match=r"no CUDA-capable device.*'numpy'"):
        rigs.make_rig("cupy")
    assert rigs.make_rig().backend == "numpy"


# A layer of GPT-3


def test_a_layer_of_gpt3_has_24_hidden_squared_for_each_token():
    (work,) = PRESETS["gpt3"]()
    hidden = 12288
    assert layer.product_flop(work) == 24 * hidden**2 * 2048
    assert work.flop == 2 * 2048**2 * hidden


@given(attention=st.floats(0.1, 10), rest=st.floats(0.1, 10))
def test_attention_and_the_rest_are_all_of_a_layer(attention, rest):
    (work,) = PRESETS["gpt3"]()
    result = Result(work, {"cufa fa2": Figures((attention,), (1.0,))}, frozenset())
    found = layer.share(result, Figures((rest,), (1.0,)))
    assert math.isclose(found["time_share"]["cufa fa2"] * (attention + rest), attention)
    assert "cufa fa2" in "\n".join(layer.lines(found))


def test_a_layer_whose_products_cannot_be_timed_is_counted_still():
    (work,) = PRESETS["gpt3"]()
    rig = idle_rig("numpy")
    found = layer.share(Result(work, {}, frozenset()), layer.time_products(rig, work, 1))
    assert 0 < found["flop_share"] < 1
    assert "there is no GPU" in layer.lines(found)[-1]
