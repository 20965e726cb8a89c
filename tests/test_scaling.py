"""The model of scaling, and that docs/scaling.md says what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa.distributed.scaling import (
    NETWORK,
    NVLINK,
    Shape,
    head_parallel_exchange,
    ring_efficiency,
    ring_step,
    shortest_hidden,
)
from cufa.tools.results import significant

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
RANKS = [(2, NVLINK), (8, NVLINK), (64, NETWORK), (1024, NETWORK)]
shapes = st.builds(
    Shape,
    seqlen=st.integers(10, 24).map(lambda n: 1 << n),
    heads=st.sampled_from([16, 32]),
    kv_heads=st.sampled_from([2, 16]),
    causal=st.booleans(),
)
machines = st.sampled_from([NVLINK, NETWORK])
sizes = st.integers(1, 10).map(lambda n: 1 << n)


def table():
    for ranks, machine in RANKS:
        for kv_heads in (16, 2):
            found = [
                shortest_hidden(machine, ranks, Shape(0, kv_heads=kv_heads, causal=causal), back)
                for back in (False, True)
                for causal in (False, True)
            ]
            cells = [f"{seqlen // 1024:,}k" for seqlen in found]
            yield f"| {ranks} | {machine.name} | 16 on {kv_heads} | {' | '.join(cells)} |"


def in_ms(seconds):
    return f"{significant(1e3 * seconds)} ms"


def steps():
    for ranks, machine in RANKS:
        for seqlen in (1 << 16, 1 << 20, 1 << 22):
            shape = Shape(seqlen, causal=True)
            work, transfer = (in_ms(t) for t in ring_step(machine, ranks, shape))
            exchange = head_parallel_exchange(machine, ranks, replace(shape, causal=False))
            cells = (
                f"{seqlen // 1024:,}k",
                work,
                transfer,
                f"{ring_efficiency(machine, ranks, shape):.0%}",
                in_ms(exchange),
            )
            yield f"| {ranks} | {machine.name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("lines", [table, steps])
def test_the_page_has_the_numbers_of_the_model(lines):
    assert "\n".join(lines()) in PAGE.read_text(encoding="utf-8")


@given(machine=machines, ranks=sizes, shape=shapes, backward=st.booleans())
def test_transfers_are_hidden_from_some_length_on(machine, ranks, shape, backward):
    shortest = shortest_hidden(machine, ranks, shape, backward)
    at = replace(shape, seqlen=shortest)
    assert ring_step(machine, ranks, at, backward).is_hidden
    assert ring_step(machine, ranks, replace(at, seqlen=2 * shortest), backward).is_hidden
    if shortest > 1024 * ranks:
        shorter = replace(at, seqlen=shortest - 1024 * ranks)
        assert not ring_step(machine, ranks, shorter, backward).is_hidden


@given(machine=machines, ranks=sizes, shape=shapes, backward=st.booleans())
def test_no_number_of_ranks_is_better_than_ideal(machine, ranks, shape, backward):
    assert 0 < ring_efficiency(machine, ranks, shape, backward) <= 1 + 1e-9


@given(ranks=sizes, shape=shapes, backward=st.booleans())
def test_a_slower_link_is_no_better(ranks, shape, backward):
    fast, slow = (ring_efficiency(m, ranks, shape, backward) for m in (NVLINK, NETWORK))
    assert slow <= fast
    assert head_parallel_exchange(NVLINK, ranks, shape) <= head_parallel_exchange(
        NETWORK, ranks, shape
    )
