"""docs/algorithm.md: its code is attention, its outputs are what the code prints, and every file
and function that it names is there.

The functions under test are the page's own: `standard`, `fa1`, `fa2`, and `inverse`, which makes of
`fa2` the misprint of line 10.
"""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa import reference
from cufa.bounds import exact
from cufa.testing import Case, assert_within_rounding, cases

PAGE = Path(__file__).parents[1] / "docs" / "algorithm.md"
TEXT = PAGE.read_text(encoding="utf-8")
#: Code, and the block right below it if there is one.
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", TEXT, re.M | re.S)
PROSE = re.sub(r"^```.*?^```\n", "", TEXT, flags=re.M | re.S)
POINTERS = sorted(set(re.findall(r"\[`([\w:.]+)`\]\(([^)#]+)\)", PROSE)))
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("cufa", "tests/emulator")
    for path in (PAGE.parents[1] / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh")
}


def run_page() -> tuple[dict[str, Any], list[str]]:
    """The names that the page defines, and what each of its blocks prints."""
    names: dict[str, Any] = {}
    printed = []
    for code, _ in BLOCKS:
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), names)
        printed.append(out.getvalue())
    return names, printed


NAMES, PRINTED = run_page()


def call(name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Output and lse by a function of the page; log(0), and what the misprint does, are silent."""
    with np.errstate(all="ignore"):
        out, lse = NAMES[name](*args, **options)
    return out, lse[:, 0]


def test_the_outputs_on_the_page_are_what_its_code_prints():
    assert any(PRINTED)
    assert [shown for _, shown in BLOCKS] == PRINTED


# --- The three algorithms -------------------------------------------------------------------------

PROBLEMS = cases(
    dtypes=("float32", "float64"),
    head_dims=st.integers(1, 40),
    features=("causal", "window", "mask"),
    rank=2,
    layout="bhsd",
    scale=1.0,
)
BLOCK_SIZES = st.integers(1, 130)


def arguments(case: Case) -> tuple[Any, ...]:
    """q, k, v and what hides keys, as the page's functions take them."""
    q, k, v = case.arrays(np)
    hidden = reference.scores(q, k, **case.options(np))[0, 0] == -np.inf
    return q, k, v, np.where(hidden, -np.inf, 0).astype(q.dtype)


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2"])
@given(case=PROBLEMS, block=BLOCK_SIZES)
def test_each_algorithm_is_the_formula_whatever_the_block_size(name, case: Case, block):
    blocks = () if name == "standard" else (block,)
    assert_within_rounding(call(name, *arguments(case), *blocks), case.exact())


# --- Line 10 --------------------------------------------------------------------------------------

DTYPES = st.sampled_from(["float32", "float64"])


@st.composite
def rows(draw: st.DrawFn) -> tuple[Any, ...]:
    """One query of 1, so that keys are scores; nothing is hidden."""
    scores = draw(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60))
    k = np.array(scores, draw(DTYPES))[:, None]
    v = np.linspace(draw(st.floats(-1, 1)), 1, len(k), dtype=k.dtype)[:, None]
    return np.ones_like(k[:1]), k, v, np.zeros_like(k.T)


def rising(dtype: str, rise: float, blocks: int) -> tuple[Any, ...]:
    """Like `rows`: each score is `rise` above the one before, and every value is 1."""
    k = (rise * np.arange(blocks))[:, None].astype(dtype)
    return np.ones_like(k[:1]), k, np.ones_like(k), np.zeros_like(k.T)


@given(case=PROBLEMS.filter(lambda case: case.seqlen_k > 0), block=BLOCK_SIZES)
def test_the_inverse_as_printed_is_nan_everywhere(case: Case, block):
    out, _ = call("fa2", *arguments(case), block, np.divide)
    assert np.isnan(out).all()


@given(row=rows(), block=st.integers(1, 20))
def test_the_inverse_is_right_where_the_maximum_comes_first(row, block):
    q, k, v, hide = row
    falling = q, np.sort(k, axis=0)[::-1], v, hide
    for right, wrong in zip(
        call("fa2", *falling, block),
        call("fa2", *falling, block, NAMES["inverse"]),
        strict=True,
    ):
        np.testing.assert_array_equal(right, wrong)


@given(row=rows(), block=st.integers(1, 20))
def test_the_inverse_adds_twice_the_rise_of_the_maximum_to_early_scores(row, block):
    """Formula (4): attention with that bias, but divided by the sum without it."""
    q, k, v, _ = row
    out, lse = call("fa2", *row, block, NAMES["inverse"])
    tops = np.maximum.accumulate([k[j : j + block].max() for j in range(0, len(k), block)])
    bias = 2 * (tops[-1] - tops.repeat(block)[: len(k)].astype(np.float64))
    plain = exact(q, k, v, scale=1.0)
    biased = exact(q, k, v, scale=1.0, bias=bias[None])
    want = biased.out * np.exp(biased.lse - plain.lse)[:, None]
    room = biased.out_bound / abs(biased.out).clip(np.finfo(k.dtype).tiny)
    room += (biased.lse_bound + plain.lse_bound)[:, None]
    assert (abs(out - want) <= room * abs(want)).all()
    assert_within_rounding((plain.out.astype(k.dtype), lse), plain)  # lse is right nevertheless


@given(dtype=DTYPES, rise=st.floats(0.01, 5), blocks=st.integers(2, 12))
def test_the_inverse_is_wrong_where_scores_rise_and_lse_does_not_show_it(dtype, rise, blocks):
    row = rising(dtype, rise, blocks)
    expected = exact(*row[:3], scale=1.0)
    out, lse = call("fa2", *row, 1)
    assert_within_rounding((out, lse), expected)
    wrong, wrong_lse = call("fa2", *row, 1, NAMES["inverse"])
    assert wrong_lse == lse
    with pytest.raises(AssertionError, match="out is wrong"):
        assert_within_rounding(wrong, expected)


@given(dtype=DTYPES, blocks=st.integers(2, 12), above=st.floats(1, 40), more=st.booleans())
def test_the_inverse_overflows_once_e_to_the_rise_does(dtype, blocks, above, more):
    largest = math.log(np.finfo(dtype).max)
    row = rising(dtype, (largest + (above if more else -above)) / (blocks - 1), blocks)
    assert np.isinf(call("fa2", *row, 1, NAMES["inverse"])[0]).all() == more
    assert_within_rounding(call("fa2", *row, 1), exact(*row[:3], scale=1.0))


# --- Pointers -------------------------------------------------------------------------------------


def defines(source: str, name: str) -> bool:
    """Whether a Python or CUDA source defines a function, class, constant or lambda."""
    return bool(
        re.search(
            rf"^\s*(def|class) {name}\b|^{name}\b.* = |^{name}\(const __grid_constant__"
            rf"|\b(struct|auto|f32) {name}\b|\bDEVICE\b[^;=(]*\b{name}\(",
            source,
            re.M,
        )
    )


@pytest.mark.parametrize(("name", "file"), POINTERS)
def test_a_pointer_leads_to_what_it_names(name, file):
    source = SOURCES.get((PAGE.parent / file).resolve())
    assert source is not None, f"{file} is not there"
    missing = [part for part in name.split("::") if not defines(source, part)]
    assert not missing, f"{file} defines no {' and no '.join(missing)}"


def test_every_link_of_the_page_leads_to_a_file_or_a_heading():
    headings = re.findall(r"^#+ (.*)", TEXT, re.M)
    anchors = {"#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    links = re.findall(r"\]\(([^)]+)\)", PROSE)
    assert links
    assert not [
        link
        for link in links
        if link not in anchors and not (PAGE.parent / link.split("#")[0]).is_file()
    ]


def test_every_name_in_code_style_is_one_of_the_source_or_of_the_page():
    known = "\n".join([*SOURCES.values(), *(code for code, _ in BLOCKS)])
    spans = set(re.findall(r"`([A-Za-z_][\w.]*)`", PROSE))
    assert spans
    files = {path.name for path in SOURCES}
    assert not [
        span
        for span in spans
        if span not in files and not re.search(rf"\b{re.escape(span)}\b", known)
    ]
