"""``python -m cufa verify``: finds what is wrong, and says how to see it again."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import cufa
from cufa import ArgumentError, UnsupportedError
from cufa.bounds import Error, worst_error
from cufa.gpu import launch
from cufa.gpu.device import Device
from cufa.gpu.registry import BACKWARD_KERNEL_NAMES, BACKWARD_KERNELS, BACKWARD_SPECS, KERNELS
from cufa.gradients import NAMES
from cufa.options import ALGORITHMS
from cufa.testing import (
    CONTIGUOUS,
    FEATURES,
    Case,
    Memory,
    assert_within_rounding,
    cases,
    memories,
)
from cufa.tools import cli, verify
from cufa.tools.backends import AROUND, Backend, find_backends
from cufa.tools.script import make_script
from cufa.tools.search import Wish, search
from cufa.tools.verify import Tally

CPU = Backend(np, None)
#: NumPy arrays in the place of a card's: which kernel serves them is asked as for the card's.
CARD = Backend(np, Device.of_arch(90))
#: A fault for a process that has a sitecustomize.py of this on its path.
FAULT = """
import cufa
right = cufa.attention
def wrong(q, k, v, **options):
    out, lse = right(q, k, v, **options)
    if options["softcap"] and k.strides[-2] < 0:
        out = out + out.dtype.type(1)
    return out, lse
cufa.attention = wrong
"""


def asked_otherwise():
    """For `cases`: gradients of some inputs only, of another layout, or the same bits each time."""
    return {
        "constants": st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
        "deterministic": st.booleans(),
        "dout_memory": st.just(CONTIGUOUS) | memories(),
    }


def on_any(*arrays, algorithm="auto", **options):
    """Attention in NumPy, in the place of kernels of any algorithm too."""
    if algorithm in ("fa1", "fa3"):
        algorithm = "fa2"
    return cufa.attention(*arrays, algorithm=algorithm, **options)


class Seen(list):
    """What a search observed of the calls that were right."""

    def right(self, kernels, dtype, error):
        self += [(kernel, dtype, error) for kernel in kernels]

    def wrong(self):
        pass


def find(attention=cufa.attention, backends=(CPU,), attention_vjp=cufa.attention_vjp, **wish):
    """A failure, and what was observed before it."""
    seen, wish = Seen(), {"seed": 1, "max_examples": 100, "direction": "forward", **wish}
    return search(backends, Wish(**wish), seen, attention, attention_vjp), seen


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What becomes of a script, in a process that has this folder on its path."""
    script = folder / "script.py"
    script.write_text(text)
    paths = (str(folder), str(Path(cufa.__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_right_attention_passes_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("verify", "--max-examples", "50", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "float16" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_fault_is_shrunk_to_a_script_that_shows_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    # In the forward pass: to look at gradients too takes twice the time.
    wish = ("--dtype", "float32", "--direction", "forward", "--seed", "1")
    done = run("verify", "--max-examples", "2000", *wish, path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    text = done.stdout[done.stdout.index("import numpy") :]
    again = run_script(text, tmp_path)
    assert again.returncode == 1
    assert "out is wrong" in again.stderr
    (tmp_path / "sitecustomize.py").unlink()
    right = run_script(text, tmp_path)
    assert right.returncode == 0, right.stderr


def test_a_failure_is_made_small():
    def wrong(q, k, v, **options):
        out, lse = cufa.attention(q, k, v, **options)
        return out + (options["layout"] == "bshd" and q.shape[-1] > 40), lse

    failure, _ = find(wrong, dtypes=["float64"])
    case = failure.case
    assert case.layout == "bshd"
    assert 40 < case.head_dim <= 64
    assert (case.batch, case.heads, case.seqlen_q, case.seqlen_k) == (1, 1, 1, 1)
    assert not any(getattr(case, feature) for feature in FEATURES)
    assert failure.doubt is None


@pytest.mark.parametrize("kernel", ["cpu", *sorted({spec.name for spec in KERNELS})])
def test_dropout_is_held_by_every_kernel_and_made_small(kernel):
    def without(*arrays, **options):
        return on_any(*arrays, **{**options, "dropout_p": 0.0})

    backend = CPU if kernel == "cpu" else CARD
    failure, _ = find(without, backends=(backend,), kernels=[kernel], max_examples=2000)
    case = failure.case
    assert kernel in failure.kernels
    assert case.dropout_p == 0.1
    assert case.batch * case.heads * case.seqlen_q <= 4  # of fewer dropout may drop none
    assert not any(getattr(case, feature) for feature in FEATURES)


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_gradients_are_held_too(direction):
    def wrong(*arrays, **options):
        out, vjp = cufa.attention_vjp(*arrays, **options)

        def back(dout, dlse):
            got = vjp(dout, dlse)
            wrong = options["causal"] and got.dk is not None
            return got._replace(dk=-got.dk) if wrong else got

        return out, back

    wish = {"direction": direction, "dtypes": ["float64"], "max_examples": 1000}
    failure, seen = find(attention_vjp=wrong, **wish)
    assert failure.direction == "backward"
    assert failure.kernels == ("cpu_backward",)
    assert failure.case.causal
    assert (failure.case.constants, failure.case.deterministic) == ((), False)
    assert "dk is wrong" in str(failure.error)
    assert ("cpu" in {name for name, *_ in seen}) == (direction == "both")
    failure, seen = find(direction=direction, max_examples=40)
    assert failure is None
    assert "cpu_backward" in {name for name, *_ in seen}


def test_a_fault_of_gradients_that_are_asked_for_otherwise_is_found_and_kept_small():
    def wrong(*arrays, wrt, deterministic, **options):
        out, vjp = cufa.attention_vjp(*arrays, wrt=wrt, deterministic=deterministic, **options)

        def back(dout, dlse):
            got = vjp(dout, dlse)
            right = not deterministic or "k" in wrt or "q" not in wrt
            return got if right else got._replace(dq=got.dq + got.dq.dtype.type(1))

        return out, back

    failure, _ = find(attention_vjp=wrong, direction="backward", max_examples=1000)
    case = failure.case
    assert (case.constants, case.deterministic) == (("k",), True)
    assert (case.heads, case.seqlen_q) == (1, 1)
    assert not any(getattr(case, feature) for feature in FEATURES)
    script = make_script(case, "numpy", "backward")
    assert "deterministic=True" in script
    assert "wrt=('q', 'v')" in script


def test_a_kernel_for_gradients_that_is_missing_is_an_error(monkeypatch):
    """Every call by FlashAttention-2 has one, whatever its gradients."""
    without = {**BACKWARD_KERNELS, "queries": BACKWARD_KERNELS["queries"][:1]}
    monkeypatch.setattr("cufa.gpu.registry.BACKWARD_KERNELS", without)
    launch._prepare_backward.cache_clear()
    with pytest.raises(UnsupportedError, match="no backward kernel"):
        find(backends=(CARD,), direction="backward", max_examples=100)


def test_gradients_that_are_wrong_make_a_script_that_shows_it(tmp_path):
    case = Case(
        seqlen_q=3,
        seqlen_k=5,
        head_dim=4,
        head_dim_v=2,
        dtype="float64",
        sink=True,
        constants=("k", "v"),
        deterministic=True,
        dout_memory=Memory(step=(1, 1, 2, 1)),
    )
    script = make_script(case, "numpy", "backward")
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    fault = "got = got._replace(dsink=got.dsink + 1)\n\nwant ="
    done = run_script(script.replace("\nwant =", fault), tmp_path)
    assert "dsink is wrong" in done.stderr


def test_an_attention_that_raises_fails():
    def broken(*arrays, **options):
        raise cufa.UnsupportedError("no kernel")

    failure, seen = find(broken)
    assert isinstance(failure.error, cufa.UnsupportedError)
    assert not seen


def test_a_failure_that_comes_and_goes_is_said_to():
    calls = []

    def moody(*arrays, **options):
        calls.append(None)
        out, lse = cufa.attention(*arrays, **options)
        return (out, lse.astype("int8")) if len(calls) == 7 else (out, lse)

    failure, _ = find(moody)
    assert "not fail every time" in failure.doubt


def test_after_an_error_of_the_driver_nothing_more_is_tried():
    calls = []
    broken = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api"})

    def breaking(*arrays, **options):
        calls.append(None)
        if len(calls) == 5:
            raise broken("an illegal memory access was encountered")
        return cufa.attention(*arrays, **options)

    failure, seen = find(breaking)
    assert isinstance(failure.error, broken)
    assert "may take no more work" in failure.doubt
    assert len(calls) == 5 == len(seen) + 1


def test_a_fault_of_the_oracle_is_no_fault_of_attention(monkeypatch):
    def broken(*arrays, **options):
        raise FloatingPointError

    monkeypatch.setattr("cufa.tools.search.exact", broken)
    with pytest.raises(FloatingPointError):
        find()


def test_the_same_seed_draws_the_same_problems():
    def drawn(seed):
        return [error for *_, error in find(seed=seed, max_examples=15)[1]]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_time_ends_a_search():
    failure, seen = find(seconds=0, max_examples=1 << 40)
    assert failure is None
    assert not seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_only_the_dtype_wished_for_is_drawn(dtype):
    assert {seen[1] for seen in find(dtypes=[dtype], max_examples=20)[1]} == {dtype}


@pytest.mark.parametrize(
    "kernel", ["cpu", "fa3_fwd_sm90", "fa2_fwd", "fa2_fwd_simt", "fa1_fwd_simt", "standard"]
)
def test_only_the_kernel_wished_for_is_held(kernel):
    _, seen = find(on_any, backends=(CPU, CARD), kernels=[kernel], max_examples=10)
    assert {name for name, *_ in seen} == {kernel}


@pytest.mark.parametrize("kernel", [*BACKWARD_KERNEL_NAMES, *AROUND])
def test_every_kernel_that_is_launched_can_be_wished_for(kernel):
    dtypes = {spec.name: spec.dtypes[0] for spec in BACKWARD_SPECS}
    wish = {"kernels": [kernel], "dtypes": [dtypes.get(kernel, "float16")], "direction": "both"}
    _, seen = find(on_any, backends=(CARD,), max_examples=8, **wish)
    assert {name for name, *_ in seen} == {kernel}
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    assert parser.parse_args(["--kernel", kernel]).kernel == [kernel]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_algorithm_wished_for_is_drawn(algorithm):
    asked = set()

    def attention(*arrays, **options):
        asked.add(options.get("algorithm", "auto"))
        return on_any(*arrays, **options)

    find(attention, backends=(CPU, CARD), algorithms=[algorithm], max_examples=20)
    assert asked == {algorithm}


def test_every_algorithm_is_held_wherever_it_is():
    _, seen = find(on_any, backends=(CPU, CARD), max_examples=60)
    kernels = {name for name, *_ in seen}
    assert {"cpu", "standard", "fa2_fwd_simt", "fa1_fwd_simt"} <= kernels


def test_without_cublas_standard_is_held_in_numpy_and_said_not_to_be_on_the_gpu(
    monkeypatch, capsys
):
    without = CARD._replace(no_standard="there is no cuBLAS")
    monkeypatch.setattr("cufa.tools.verify.find_backends", lambda: [CPU, without])
    assert cli.main(["verify", "--algorithm", "standard", "--max-examples", "10", "--seed=1"]) == 0
    shown = capsys.readouterr().out
    assert "standard was not held in numpy: there is no cuBLAS" in shown
    assert find(backends=(CPU, without), algorithms=["standard"], max_examples=10)[1]
    with pytest.raises(ArgumentError, match=r"^nothing here serves any .* by standard that was"):
        find(backends=(without,), algorithms=["standard"], max_examples=5)


def test_a_kernel_of_another_algorithm_than_wished_for_is_an_error():
    with pytest.raises(ArgumentError, match=r"^kernel is fa1_fwd_simt; nothing .* by fa2 that"):
        find(backends=(CARD,), kernels=["fa1_fwd_simt"], algorithms=["fa2"], max_examples=5)


def test_a_kernel_that_serves_nothing_here_is_an_error():
    old = Backend(np, Device.of_arch(75))
    with pytest.raises(ArgumentError, match=r"kernel is fa2_fwd; .*any problem of float64"):
        find(backends=(old,), kernels=["fa2_fwd"], dtypes=["float64"], max_examples=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--direction backward --algorithm standard",
            "direction is backward, and algorithm is standard, which has no gradients; "
            "pass auto or fa2",
        ),
        (
            "--direction backward --algorithm fa1 --algorithm fa3",
            "direction is backward, and algorithm is fa1, fa3, which have no gradients; "
            "pass auto or fa2",
        ),
        (
            "--direction backward --kernel cpu",
            "direction is backward, and kernel is cpu, which computes no gradients; "
            "pass cpu_backward or fa2_bwd or",
        ),
        (
            "--direction backward --kernel mask_tiles --kernel standard",
            "direction is backward, and kernel is mask_tiles, standard, which compute no gradients",
        ),
        (
            "--direction forward --kernel cpu_backward",
            "direction is forward, and kernel is cpu_backward, which computes gradients alone; "
            "pass cpu or fa3_fwd_sm90 or",
        ),
        (
            "--direction forward --kernel fa2_bwd --kernel bwd_rows",
            "direction is forward, and kernel is fa2_bwd, bwd_rows, which compute gradients alone",
        ),
        (
            "--kernel cpu --algorithm standard",
            "algorithm is standard, and kernel is cpu, which is of fa2; pass auto or fa2",
        ),
        (
            "--kernel fa3_fwd_sm90 --kernel fa1_fwd --algorithm fa2",
            "algorithm is fa2, and kernel is fa3_fwd_sm90, fa1_fwd, which are of fa1, fa3; "
            "pass auto or fa1 or fa3",
        ),
        (
            "--kernel fa1_fwd --algorithm auto",
            "algorithm is auto, and kernel is fa1_fwd, which is of fa1; pass fa1",
        ),
    ],
)
def test_what_no_problem_can_launch_is_refused_before_any_is_drawn(
    monkeypatch, capsys, options, message
):
    def begun(*_):
        raise AssertionError("the search has begun")

    monkeypatch.setattr(verify, "search", begun)
    monkeypatch.setattr(verify, "find_backends", lambda: [CPU, CARD])
    assert cli.main(["verify", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "algorithms"),
    [
        ("--direction backward", {"auto", "fa2"}),
        ("--direction backward --algorithm fa2 --algorithm standard", {"fa2"}),
        ("--direction backward --kernel cpu_backward --kernel standard", {"fa2"}),
        ("--direction both --algorithm standard", {"standard"}),
        ("--kernel cpu --algorithm auto --algorithm fa1", {"auto"}),
        ("", {*ALGORITHMS}),
    ],
)
def test_of_what_is_wished_for_all_that_can_be_held_is_drawn(monkeypatch, options, algorithms):
    drawn = []

    def look(backends, wish, tally):
        drawn.extend(wish.algorithms)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "search", look)
    assert cli.main(["verify", *options.split()]) == 130
    assert {*drawn} == algorithms
    assert len(drawn) == len(algorithms)


@pytest.mark.parametrize("option", [["--max-examples", "0"], ["--max-examples=-3"]])
def test_no_examples_are_an_error(option, capsys):
    assert cli.main(["verify", *option]) == 2
    assert "it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_time_that_holds_nothing_or_never_ends_is_an_error(seconds, capsys):
    assert cli.main(["verify", f"--time={seconds}"]) == 2
    assert f"time is {seconds}; it must be above 0" in capsys.readouterr().err


def test_a_search_that_held_nothing_is_no_proof(capsys):
    assert cli.main(["verify", "--time=1e-9"]) == 2
    assert "time is 1e-09 seconds, and no problem was held by then" in capsys.readouterr().err


def test_a_kernel_that_takes_no_dtype_wished_for_is_an_error(monkeypatch, capsys):
    in_16_bits = [spec for spec in KERNELS if spec.dtypes == ("float16", "bfloat16")]
    monkeypatch.setattr("cufa.tools.verify.KERNELS", in_16_bits)
    assert cli.main(["verify", "--kernel", "fa2_fwd", "--dtype", "float64"]) == 2
    assert "dtype is float64; fa2_fwd takes float16, bfloat16" in capsys.readouterr().err


def test_a_kernel_of_the_gpu_needs_one(monkeypatch, capsys):
    monkeypatch.setattr("cufa.tools.verify.find_backends", lambda: [CPU])
    assert cli.main(["verify", "--kernel", "fa2_fwd"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@settings(max_examples=40)
@given(case=cases(max_elements=1 << 16, **asked_otherwise()))
def test_the_script_makes_the_case_it_is_about(case):
    text = make_script(case, "numpy", "backward")
    made = text[: text.index("q, k, v =")]
    names: dict[str, object] = {}
    exec(made, names)
    assert names["case"] == case
    compile(make_script(case, "cupy"), "script", "exec")


def rendered(tally):
    """What a terminal shows of it."""
    console = Console(file=io.StringIO(), width=100)
    console.print(tally)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"max_examples": 10}, "of 10 problems, seed 3"),
        ({"seconds": 5}, "of 5 s, seed 3"),
        ({"max_examples": 10, "seconds": 5}, "of 10 problems or 5 s, seed 3"),
    ],
)
def test_what_is_shown_meanwhile_is_the_worst_error_so_far(limits, shown):
    tally = Tally(Wish(seed=3, **limits))
    for fraction in (0.125, 0.5, 0.25):
        tally.right(("a", "b"), "float16", Error(absolute=1e-3, fraction=fraction))
    text = rendered(tally)
    assert "3 calls" in text
    assert shown in text
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "float16", "3", "0.500"] in rows
    assert ["b", "float16", "3", "0.500"] in rows


def test_shrinking_is_shown():
    tally = Tally(Wish(seed=3, max_examples=10))

    def broken(*arrays, **options):
        raise cufa.UnsupportedError("no kernel")

    search([CPU], Wish(seed=3, max_examples=10), tally, broken)
    assert "WRONG" in rendered(tally)


def test_the_table_at_the_end_has_the_quantiles_of_the_errors(capsys):
    tally = Tally(Wish(seed=3))
    for n in range(101):
        tally.right(["cpu"], "float16", Error(absolute=n, fraction=n / 100))
    tally.show()
    want = ["cpu", "float16", "101", "0.500", "0.900", "0.990", "1.000"]
    want += ["5.0e+01", "9.0e+01", "9.9e+01", "1.0e+02"]
    assert want in [line.split() for line in capsys.readouterr().out.splitlines()]


@settings(max_examples=30)
@given(case=cases(max_elements=1 << 16), part=st.floats(0, 3))
def test_an_error_above_its_bound_is_what_the_assertion_refuses(case, part):
    expected = case.exact()
    wide = expected._replace(dtype=np.dtype("float64"))  # so that the shift is not rounded
    result = expected.out + part * expected.out_bound, expected.lse
    fraction = worst_error(result, wide).fraction
    try:
        assert_within_rounding(result, wide)
    except AssertionError:
        assert fraction > 1
    else:
        assert fraction <= 1


@pytest.mark.gpu
def test_kernels_of_the_gpu_are_held(cupy):
    backends = [backend for backend in find_backends() if backend.device]
    failure, seen = find(backends=backends, max_examples=40)
    assert failure is None, failure
    assert "fa2_fwd_simt" in {name for name, *_ in seen}


@pytest.mark.gpu
def test_a_script_for_the_gpu_runs(cupy):
    exec(make_script(Case(causal=True, softcap=10.0), "cupy"), {})
