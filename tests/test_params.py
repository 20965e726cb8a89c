"""The parameters of kernels: Python and the kernels read the same bytes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa.gpu import build
from cufa.gpu.params import (
    BACKWARD_PARAMS,
    GRADIENT_POINTERS,
    PARAMS,
    POINTERS,
    Buffers,
    GradientBuffers,
    divisor,
)
from cufa.gpu.plan import section
from cufa.gpu.tensor_map import MAP_ALIGNMENT
from cufa.gpu.warmup import _call, _Features
from cufa.problem import Problem, make_problem

#: Bytes of what a struct's fields are declared as; pointers have 8.
SIZES = {"Strides": 24, "ScoreStrides": 32, "Divisor": 12, "TensorMap": 128}
SIZES |= {"i64": 8, "f64": 8, "u64": 8, "i32": 4, "u32": 4}
L2 = 32 << 20


def declared(struct: str) -> list[tuple[str, int]]:
    """Names and sizes of the fields that attn/params.cuh declares, without those of a base."""
    text = re.sub(r"//.*", "", (build.KERNELS / "attn/params.cuh").read_text())
    body = re.search(rf"struct {struct} (?:: \w+ )?\{{(.*?)\}};", text, re.DOTALL)
    assert body
    fields = []
    for line in body[1].split(";")[:-1]:
        first, *others = line.split(",")
        kind = first.split()[-2].removeprefix("ptx::")
        for name in (first.split()[-1], *others):
            pointer = "*" in name or kind.endswith("*")
            fields.append((name.strip(" \n*"), 8 if pointer else SIZES[kind]))
    return fields


@pytest.mark.parametrize(
    ("struct", "mirror"), [("Params", PARAMS), ("BackwardParams", BACKWARD_PARAMS)]
)
def test_a_struct_and_its_mirror_have_the_same_fields_in_the_same_order(struct, mirror):
    others = ("padding", "forward")
    mirrored = [(name, mirror[name].itemsize) for name in mirror.names if name not in others]
    assert mirrored == declared(struct)


def test_the_pointers_stand_together_behind_the_maps():
    places = [PARAMS.fields[name][1] for name in Buffers._fields]
    assert places == [POINTERS + 8 * n for n in range(len(places))]


def test_those_of_the_backward_pass_stand_together_behind_all_of_the_forward_pass():
    assert BACKWARD_PARAMS["forward"] is PARAMS
    assert BACKWARD_PARAMS.fields["forward"][1] == 0
    places = [BACKWARD_PARAMS.fields[name][1] for name in GradientBuffers._fields]
    assert places == [GRADIENT_POINTERS + 8 * n for n in range(len(places))]


def test_the_structs_keep_the_alignment_of_their_maps():
    assert PARAMS.itemsize % MAP_ALIGNMENT == 0
    assert BACKWARD_PARAMS.itemsize % MAP_ALIGNMENT == 0
    assert all(PARAMS.fields[f"{name}_map"][1] % MAP_ALIGNMENT == 0 for name in "qkv")


@given(value=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
def test_a_divisor_divides(value, n):
    _, multiplier, shift = divisor(value)
    assert n * multiplier >> shift == n // value
    assert multiplier < 1 << 32
    assert n * multiplier < 1 << 64


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of any number of heads and keys."""
    kv_heads, group = draw(st.integers(1, 200)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from(["float16", "float64"]))
    call = _call(draw(st.integers(1, 256)), dtype, False, False, 8, None, _Features())
    return replace(
        make_problem(call),
        batch=draw(st.integers(1, 100)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_k=draw(st.integers(0, 1 << 20)),
    )


def taken(problem: Problem, heads: int) -> int:
    """Bytes of the keys and values of so many query heads."""
    width = (problem.head_dim + problem.head_dim_v) * np.dtype(problem.dtype).itemsize
    return heads // problem.group * problem.seqlen_k * width


@given(problem=problems())
def test_the_keys_of_a_section_fit_the_cache_or_it_has_few_heads(problem):
    heads, found = problem.batch * problem.heads, section(problem)
    assert 0 < found <= heads
    assert found % problem.group == 0
    assert taken(problem, found) <= L2 or found - problem.group < 8


@given(problem=problems())
def test_no_section_of_twice_as_many_groups_would_do(problem):
    heads, found = problem.batch * problem.heads, section(problem)
    more = 2 * found + problem.group
    assert more > heads or taken(problem, more) > L2
    assert found >= min(heads, 8) / 2
