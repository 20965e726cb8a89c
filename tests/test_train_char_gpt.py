"""A GPT that is trained through `MultiHeadAttention`; the script is its own user."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[1] / "examples" / "train_char_gpt.py"
SMALL = {"layers": 2, "width": 32, "context": 24, "head_dim": 16}
SCRIPT_SMALL = ("--layers", "1", "--width", "32", "--context", "24", "--batch", "8")


def load() -> Any:
    spec = importlib.util.spec_from_file_location("train_char_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = load()
TEXT = gpt.Text(gpt.language_reference()[:50_000])


def make_model(xp=np, **options):
    return gpt.GPT(gpt.Config(len(TEXT.characters), **SMALL), xp, **options)


def curve(model, steps, params=None):
    """Losses of some steps; all models begin alike and read alike."""
    params = params or model.init(np.random.default_rng(1))
    rng = np.random.default_rng(2)
    return np.array(list(gpt.train(model, params, TEXT.train, steps, batch=8, rng=rng)))


@pytest.mark.parametrize("algorithm", ["fa2", "standard"])
def test_the_loss_falls(xp, algorithm):
    model = make_model(xp, algorithm=algorithm)
    params = model.init(np.random.default_rng(1))
    before = gpt.mean_loss(model, params, TEXT.held_out, batches=1)
    losses = curve(model, 40, params)
    assert gpt.mean_loss(model, params, TEXT.held_out, batches=1) < 0.8 * before
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()


def noise(xp, steps):
    """A curve by standard attention, and how far rounding may lead another from it.

    How far it is from the curve in float64, all else equal, is what rounding does; so two curves
    differ by at most about twice that, and two units in the last place. Three times, since one of
    them may be lucky.
    """
    plain, exact = (
        curve(make_model(xp, algorithm="standard", dtype=dtype), steps)
        for dtype in ("float32", "float64")
    )
    last_place = np.finfo("float32").eps * exact.max()
    return plain, 3 * abs(plain - exact).max() + 2 * last_place


def test_loss_curves_by_flash_and_standard_attention_agree(xp):
    plain, bound = noise(xp, 20)
    assert abs(curve(make_model(xp), 20) - plain).max() <= bound


def test_the_comparison_sees_a_key_too_many(monkeypatch):
    def leaky(layer, params, x, recompute=False):
        y, vjp = layer.vjp(params, x, window=(None, 1))
        return y, lambda dy: vjp(dy)[:2]

    plain, bound = noise(np, 20)
    monkeypatch.setitem(gpt.ATTENTION, "leaky", leaky)
    assert abs(curve(make_model(algorithm="leaky"), 20) - plain).max() > 100 * bound


def test_recomputing_changes_no_bit():
    kept, recomputed = (curve(make_model(recompute=again), 5) for again in (False, True))
    np.testing.assert_array_equal(kept, recomputed)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("which", range(18))  # of the parameters' arrays
@pytest.mark.parametrize("algorithm", ["fa2", "standard"])
def test_gradients_of_the_model_are_the_slope_of_the_loss(algorithm, which, seed):
    """By central differences, whose own error is what they change by at twice the step."""
    rng = np.random.default_rng(seed)
    model = make_model(algorithm=algorithm, dtype="float64")
    params = model.init(rng)
    pair = gpt.stretches(model, TEXT.train, 2, rng)
    arrays = list(gpt.leaves(params))
    assert len(arrays) == 18
    _, vjp = model.loss(params, *pair)
    gradient = list(gpt.leaves(vjp()))[which]
    array = arrays[which]
    start, along = array.copy(), rng.uniform(-1, 1, array.shape)

    def loss(step):
        array[...] = start + step * along
        return float(model.loss(params, *pair)[0])

    def slope(h):
        return (loss(h) - loss(-h)) / (2 * h)

    h = 1e-5
    room = abs(slope(2 * h) - slope(h)) + 1e-9
    assert abs((gradient * along).sum() - slope(h)) <= room


@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, SMALL["context"]))
@pytest.mark.parametrize("algorithm", ["fa2", "standard"])
def test_no_character_sees_what_comes_after_it(algorithm, seed, first):
    rng = np.random.default_rng(seed)
    model = make_model(algorithm=algorithm)
    params = model.init(rng)
    tokens, others = (gpt.stretches(model, TEXT.train, 2, rng)[0] for _ in range(2))
    others[:, :first] = tokens[:, :first]
    whole, changed = (model.hidden(params, a)[0][:, :first] for a in (tokens, others))
    np.testing.assert_array_equal(whole, changed)


@given(
    gradient=st.floats(-1e-3, 1e-3).filter(lambda g: abs(g) > 1e-5),
    start=st.floats(-10, 10),
    rate=st.floats(1e-4, 1e-1),
)
def test_the_first_step_of_adamw_is_as_long_as_the_rate(gradient, start, rate):
    params = {"matrix": np.full((1, 1), start), "vector": np.full(1, start)}
    optimizer = gpt.AdamW(params, decay=0.1)
    optimizer.step({name: np.full_like(a, gradient) for name, a in params.items()}, rate)
    step = rate * np.sign(gradient)
    assert params["vector"] == pytest.approx(start - step, abs=2e-3 * rate)
    assert params["matrix"] == pytest.approx((1 - 0.1 * rate) * start - step, abs=2e-3 * rate)


@given(size=st.floats(1e-6, 1e6))
def test_gradients_longer_than_1_are_cut_to_it(size):
    optimizer = gpt.AdamW({"a": np.zeros(2), "b": np.zeros((1, 1))})
    gradients = {"a": np.array([0.0, 0.6]) * size, "b": np.full((1, 1), 0.8) * size}
    optimizer.step(gradients, rate=0.1, beta1=0.5)
    length = 0.5 * min(size, 1)
    np.testing.assert_allclose(optimizer.mean[0], [0, 0.6 * length])
    np.testing.assert_allclose(optimizer.mean[1], [[0.8 * length]])


def test_what_is_written_is_of_the_text_and_repeats_with_a_seed():
    model = make_model()
    params = model.init(np.random.default_rng(1))
    write = partial(model.write, params, [0])
    first, second = (list(islice(write(np.random.default_rng(3)), 30)) for _ in range(2))
    assert first == second
    assert len(first) == 30
    assert set(first) <= set(range(len(TEXT.characters)))


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--backend", "numpy", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


def test_the_script_learns_writes_and_draws(tmp_path):
    picture = tmp_path / "curve.png"
    options = ("--steps", "20", "--characters", "50", "--picture", str(picture))
    done = run_script(*SCRIPT_SMALL, *options)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 51
    assert "training 20/20  loss" in done.stderr
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_the_text_is_written_though_the_picture_fails(tmp_path, monkeypatch, capsys):
    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(gpt, "draw", full_disk)
    options = ("--backend", "numpy", "--steps", "1", "--characters", "50")
    with pytest.raises(OSError, match="no space left"):
        gpt.main([*SCRIPT_SMALL, *options, "--picture", str(tmp_path / "curve.png")])
    assert len(capsys.readouterr().out) == 51


def test_a_terminal_without_a_character_shows_another(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\N{SNOWMAN}" * 400, encoding="utf-8")
    options = ("--steps", "1", "--characters", "5", "--picture", str(tmp_path / "curve.png"))
    done = run_script(*SCRIPT_SMALL, "--text", str(text), *options, PYTHONIOENCODING="ascii")
    assert done.stdout == "?????\n", done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files to be named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "bytes.txt").write_bytes(b"\xff" * 5000)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "long.txt").write_text("long " * 1000)
    return tmp_path


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--text", "absent.txt", "absent.txt cannot be read"),
        ("--text", "folder.png", "folder.png cannot be read"),
        ("--text", "bytes.txt", "bytes.txt cannot be read"),
        ("--text", "", " cannot be read"),
        ("--steps", "0", "0 is not an integer of at least 1"),
        ("--steps", "-3", "-3 is not an integer of at least 1"),
        ("--steps", "1.5", "1.5 is not an integer of at least 1"),
        ("--batch", "0", "0 is not an integer of at least 1"),
        ("--layers", "0", "0 is not an integer of at least 1"),
        ("--context", "0", "0 is not an integer of at least 1"),
        ("--context", "500", "500 is too long for a text of 5000 characters"),
        ("--width", "40", "40 is not a multiple of 32"),
        ("--width", "-32", "-32 is not an integer of at least 32"),
        ("--width", "0", "0 is not an integer of at least 32"),
        ("--characters", "-5", "-5 is not an integer of at least 0"),
        ("--characters", "many", "many is not an integer of at least 0"),
        ("--seed", "-1", "-1 is not an integer of at least 0"),
        ("--picture", "absent/x.png", "absent/x.png must be a file in a folder that is there"),
        ("--picture", "short.txt/x.png", "short.txt/x.png must be a file in a folder"),
        ("--picture", "folder.png", "folder.png must be a file in a folder that is there"),
        ("--picture", "loss.foo", "loss.foo must end in one of .png, .pdf, .svg"),
        ("--picture", "loss", "loss must end in one of .png, .pdf, .svg"),
        ("--picture", ".", ". must end in one of .png, .pdf, .svg"),
        ("--picture", "", " must end in one of .png, .pdf, .svg"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_trained(
    folder, monkeypatch, capsys, option, value, message
):
    def untrained(*_):
        raise AssertionError("training has begun")

    monkeypatch.setattr(gpt, "train", untrained)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(SystemExit) as caught:
        gpt.main(["--backend", "numpy", "--text", "long.txt", option, value])
    assert caught.value.code == 2
    assert f"error: argument {option}: {message}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_picture_that_may_not_be_written_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(gpt.os, "access", lambda *_: False)  # a superuser may write everywhere
    with pytest.raises(SystemExit):
        gpt.main(["--text", "long.txt"])
    assert "argument --picture: loss.png may not be written" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg", ".PNG"])
def test_a_picture_is_written_where_it_is_said_to_be(folder, capsys, ending):
    pytest.importorskip("matplotlib")
    path = gpt.picture_file(f"curve{ending}")
    gpt.draw([2.0, 1.0], (2.0, 1.0), "title", path)
    assert path.stat().st_size > 0
    assert f"loss curve in curve{ending}" in capsys.readouterr().err
