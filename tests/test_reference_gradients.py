"""The oracle's gradients against derivatives taken of the formula itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa import reference
from cufa.testing import Case, cases

problems = cases(
    dtypes=["float64"],
    head_dims=st.integers(1, 9),
    seqlen_q=st.integers(0, 9),
    seqlen_k=st.integers(0, 9),
    extra_dtype="float64",
    v_size=1.0,
    dropout_p=st.sampled_from([0.0, 0.0, 0.5]),
    max_elements=1 << 14,
)


def problem(case: Case):
    """Inputs that a loss depends on, and other options, by name; derivatives of the loss."""
    options = case.options(np)
    inputs = dict(zip("qkv", case.arrays(np), strict=True))
    inputs |= {name: options.pop(name) for name in ("bias", "sink") if name in options}
    rng = np.random.default_rng([case.seed, 2])
    out, lse = reference.attention(**inputs, **options)
    douts = (
        rng.standard_normal(out.shape),
        np.where(lse > -np.inf, rng.standard_normal(lse.shape), 0),
    )
    along = {name: rng.uniform(-1, 1, a.shape) for name, a in inputs.items()}
    return inputs, options, douts, along


def slope(gradients, along):
    """Of the loss in a direction, by its gradients."""
    return sum((getattr(gradients, f"d{name}") * a).sum() for name, a in along.items())


def steepness(case: Case, inputs, douts):
    """Bounds on how fast scores and loss may change in any direction."""
    q, k, v = (abs(inputs[name]).max(initial=0) for name in "qkv")
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else abs(case.scale)
    size = abs(douts[0]).sum() * (v + 1) / (1 - case.dropout_p)
    of_scores = 1 + scale * case.head_dim * (q + k)
    return of_scores, 1e-300 + (size + abs(douts[1]).sum()) * of_scores


def results(
    case: Case, visible, q, k, v, bias=0, sink=-np.inf, alibi_slopes=None, dropout_seed=None, **_
):
    """The formula for complex numbers, of which it is an analytic function, in layout bhsd."""
    k, v = (a.repeat(case.group, axis=1) for a in (k, v))
    s = (1 / math.sqrt(case.head_dim) if case.scale is None else case.scale) * q @ k.swapaxes(2, 3)
    if case.softcap is not None:
        s = case.softcap * np.tanh(s / case.softcap)
    if alibi_slopes is not None:
        i, j = np.ogrid[: case.seqlen_q, : case.seqlen_k]
        s = s - alibi_slopes[..., None, None] * abs(i + case.seqlen_k - case.seqlen_q - j)
    s = np.where(visible, s + bias, 0)
    sink = np.broadcast_to(sink, case.heads)[:, None, None]
    top = np.where(visible, s.real, -np.inf).max(3, keepdims=True, initial=-np.inf)
    top = np.maximum(top, sink.real)
    top = np.where(top == -np.inf, 0, top)
    weights = np.where(visible, np.exp(s - top), 0)
    total = weights.sum(3, keepdims=True) + np.exp(sink - top)
    total = np.where(total == 0, 1, total)
    if case.dropout_p:
        keep = reference.kept(dropout_seed, case.dropout_p, weights.shape)
        weights = weights * keep / (1 - case.dropout_p)
    return weights @ v / total, (top + np.log(total))[..., 0]


@given(case=problems.filter(lambda case: case.rank == 4 and case.layout == "bhsd"))
def test_gradients_are_the_complex_step_derivative(case):
    """Squire and Trapp 1998: the derivative is the imaginary part, without cancellation."""
    inputs, options, douts, along = problem(case)
    of_rows = ("v", "sink", "dropout_p", "dropout_seed")
    shown = {name: a for name, a in {**inputs, **options}.items() if name not in of_rows}
    visible = reference.scores(**shown) > -np.inf
    h = 1e-200
    with np.errstate(invalid="ignore"):  # -inf and its imaginary part
        moved = {name: a + 1j * h * along[name] for name, a in inputs.items()}
        got = results(case, visible, **moved, **options)
    want = sum((d * part.imag / h).sum() for d, part in zip(douts, got, strict=True))
    gradients = reference.gradients(douts[0], dlse=douts[1], **inputs, **options)
    _, size = steepness(case, inputs, douts)
    assert slope(gradients, along) == pytest.approx(want, rel=1e-9, abs=1e-11 * size)
    exact = reference.attention(**inputs, **options)
    np.testing.assert_allclose(got[0].real, exact[0], rtol=1e-9, atol=1e-11)


@given(case=problems)
def test_gradients_are_the_slope_of_the_loss(case):
    inputs, options, douts, along = problem(case)
    steep, size = steepness(case, inputs, douts)
    h = 1e-5 / steep

    def loss(step):
        moved = {name: a + step * along[name] for name, a in inputs.items()}
        out, lse = reference.attention(**moved, **options)
        return (douts[0] * out).sum() + (douts[1] * np.where(lse > -np.inf, lse, 0)).sum()

    gradients = reference.gradients(douts[0], dlse=douts[1], **inputs, **options)
    want = (loss(h) - loss(-h)) / (2 * h)
    # Scores reach thousands, of which h is a small part.
    assert slope(gradients, along) == pytest.approx(want, rel=1e-4, abs=1e-7 * size)


@given(case=cases(max_elements=1 << 16, v_size=1.0))
def test_gradients_have_the_shapes_of_their_inputs_and_are_finite(case):
    inputs, options, douts, _ = problem(case)
    gradients = reference.gradients(douts[0], dlse=douts[1], **inputs, **options)
    given = {f"d{name}": np.shape(a) for name, a in inputs.items()}
    assert {n: a.shape for n, a in gradients._asdict().items() if a is not None} == given
    assert all(np.isfinite(a).all() for a in gradients if a is not None)


LOG3 = math.log(3)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        # Weights 3/4 and 1/4, output 5: dS = (3/4 * (4 - 5), 1/4 * (8 - 5)) = (-3/4, 3/4).
        pytest.param({}, (-0.75 * LOG3, [-0.75, 0.75], [0.75, 0.25]), id="two keys"),
        pytest.param({"mask": [[False, True]]}, (0, [0, 0], [0, 1]), id="one key"),
        pytest.param({"mask": [[False, False]]}, (0, [0, 0], [0, 0]), id="no key"),
        pytest.param({"dlse": [4.0]}, (2.25 * LOG3, [2.25, 1.75], [0.75, 0.25]), id="through lse"),
        pytest.param({"scale": -1}, (0.75 * LOG3, [0.75, -0.75], [0.25, 0.75]), id="scale -1"),
    ],
)
def test_gradients_of_one_query_and_two_keys(options, want):
    got = reference.gradients([[1.0]], [[1.0]], [[LOG3], [0.0]], [[4.0], [8.0]], **options)
    for gradient, by_hand in zip(got[:3], want, strict=True):
        np.testing.assert_allclose(gradient.ravel(), by_hand, rtol=1e-14)
