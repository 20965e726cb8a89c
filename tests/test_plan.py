"""Plans of FlashAttention-1: how heads are cut into ranges of query tiles, and the workspace; and
of masks on Hopper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa.gpu.config import LENGTHS
from cufa.gpu.device import Device
from cufa.gpu.params import PARAMS
from cufa.gpu.plan import Plan, make_key, make_keys, make_plan, ranges
from cufa.gpu.warmup import _call, _Features
from cufa.problem import Problem, make_problem

H200 = replace(Device.of_arch(90), sm_count=132)


def problem(seqlen: int, heads: int = 1, causal: bool = False, algorithm: str = "fa1") -> Problem:
    call = _call(64, "float16", causal, False, seqlen, None, _Features())
    return replace(make_problem(call._replace(algorithm=algorithm)), heads=heads, kv_heads=heads)


def rows_per_block(plan: Plan) -> int:
    return int(plan.steps[0].params.view(PARAMS)["rows_per_block"][0])


lengths = st.integers(1, 100_000)
some_heads = st.integers(1, 3000)


@given(seqlen=lengths, heads=some_heads, causal=st.booleans(), sm_count=st.integers(1, 200))
def test_ranges_cover_every_query_and_none_is_empty(seqlen, heads, causal, sm_count):
    plan = make_plan(problem(seqlen, heads, causal), replace(H200, sm_count=sm_count))
    blocks, rows = plan.steps[0].grid // heads, rows_per_block(plan)
    assert plan.steps[0].grid == blocks * heads
    assert rows % plan.steps[0].key.config.block_m == 0
    assert (blocks - 1) * rows < seqlen <= blocks * rows


@given(heads=some_heads, causal=st.booleans())
def test_long_sequences_give_every_multiprocessor_work(heads, causal):
    plan = make_plan(problem(1 << 17, heads, causal), H200)
    assert plan.steps[0].grid >= 0.9 * H200.sm_count


@given(seqlen=lengths, heads=some_heads)
def test_a_card_with_one_slot_gets_one_range_for_each_head(seqlen, heads):
    key = make_key(problem(seqlen), H200)
    key = key._replace(config=key.config._replace(blocks_per_sm=1))
    assert ranges(-(-seqlen // key.config.block_m), heads, key, replace(H200, sm_count=1)) == 1


@given(seqlen=lengths)
def test_the_workspace_grows_with_the_length_alone(seqlen):
    plan = make_plan(problem(seqlen), H200)
    head_dim, statistics = 64, 8
    rows = seqlen + plan.steps[0].key.config.block_m
    assert seqlen * head_dim < plan.workspace <= rows * (head_dim + statistics)


@pytest.mark.parametrize("algorithm", ["auto", "fa2"])
def test_fa2_needs_no_workspace(algorithm):
    assert make_plan(problem(1000, algorithm=algorithm), H200).workspace == 0


def masked(seqlen: int) -> Problem:
    return make_problem(_call(64, "float16", False, False, seqlen, None, _Features(mask=True)))


@given(seqlen=st.integers(1, 5000))
def test_the_workspace_of_a_mask_is_an_eighth_of_it_in_whole_tiles(seqlen):
    problem = masked(seqlen)
    plan = make_plan(problem, H200)
    tile = plan.steps[-1].key.config
    assert tile.block_n == 128
    tiles, blocks = -(-seqlen // tile.block_m), -(-problem.seqlen_k // tile.block_n)
    bits = tiles * tile.block_m * blocks * tile.block_n
    verdicts = tiles * 8 * -(-blocks // 8)
    assert 4 * plan.workspace == bits // 8 + verdicts


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_a_mask_of_whole_shape_is_looked_at_first_at_every_length_from_one_key_on(seqlen):
    kernels = [key.kernel for key in make_keys(masked(seqlen), H200)]
    assert kernels == ["mask_tiles", "fa3_fwd_sm90"]
