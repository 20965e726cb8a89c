"""`python -m cufa bench` on a card: what its peers compute, its clock, its stream, its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cufa.bounds import exact
from cufa.errors import UnsupportedError
from cufa.gradient_bounds import exact_gradients
from cufa.testing import assert_within_rounding, to_numpy
from cufa.tools import bench, peers, rigs
from cufa.tools.peers import PEERS
from cufa.tools.timing import Contender
from cufa.tools.workloads import Inputs, Workload, draw, workload

pytestmark = pytest.mark.gpu

ON_CARD = [
    workload(96, 64, dtype=dtype, causal=causal, batch=2, heads=4, kv_heads=kv_heads)
    for dtype, kv_heads in (("float16", 4), ("bfloat16", 2), ("float32", 4))
    for causal in (False, True)
]


by_peers = pytest.mark.parametrize(
    "peer", [p for p in PEERS if p.backend == "cupy"], ids=lambda p: p.name
)


def result_of(cupy: Any, peer: peers.Peer, work: Workload) -> tuple[Inputs, Any]:
    """Inputs, and what a peer makes of them; skips where it is not here, or refuses."""
    _, missing = peers.open_all([peer])
    if missing:
        pytest.skip(missing[peer.name])
    with rigs.make_rig("cupy").stream():
        (arrays,) = draw(cupy, work)
        try:
            contender = peer.contender(peer.open(), work, [arrays])
            with contender.around():
                return arrays, contender.calls[0]()
        except (UnsupportedError, RuntimeError, ValueError) as error:
            pytest.skip(f"refuses: {error}")


# Other people's kernels may round more often than ours; another layout would be far off.


@by_peers
@pytest.mark.parametrize("work", ON_CARD, ids=str)
def test_a_peer_computes_the_same_attention(cupy, peer, work):
    arrays, out = result_of(cupy, peer, work)
    wanted = exact(*map(to_numpy, arrays[:3]), causal=work.causal)
    assert (abs(as_numpy(out, work.heads) - wanted.out) <= 8 * wanted.out_bound.max()).all()


@pytest.mark.parametrize("direction", ["backward", "both"])
@by_peers
@pytest.mark.parametrize("work", ON_CARD[1::2], ids=str)
def test_a_peer_computes_the_same_gradients(cupy, peer, work, direction):
    arrays, gradients = result_of(cupy, peer, replace(work, direction=direction))
    q, k, v, dout = (to_numpy(a) for a in arrays if a is not None)
    want, bounds, _ = exact_gradients(dout, q, k, v, causal=work.causal)
    for got, gradient, bound in zip(gradients, want[:3], bounds[:3], strict=True):
        off = abs(as_numpy(got, gradient.shape[1]) - gradient)
        assert (off <= 8 * bound.max()).all()


def as_numpy(out: Any, heads: int) -> Any:
    """A peer's result in host memory and our layout."""
    host = out.float().cpu().numpy() if hasattr(out, "cpu") else np.asarray(out, np.float32)
    return host if host.shape[1] == heads else host.swapaxes(1, 2)


def test_cufa_is_timed_on_a_card(cupy):
    rig = rigs.make_rig("cupy")
    work = workload(512, 64, dtype="float16", batch=1)
    with rig.stream():
        result = bench.measure(rig, work, ["fa2"], [], 2)
        (arrays,) = draw(cupy, work)
        out = peers.ours("fa2", work, [arrays], rig.extra_bytes).calls[0]()
    assert result.figures["cufa fa2"].median_ms > 0
    assert_within_rounding(to_numpy(out), exact(*map(to_numpy, arrays[:3])))


def test_work_in_the_stream_of_a_rig_is_done_when_it_is_left(cupy, busy):
    with rigs.make_rig("cupy").stream():
        busy()
        done = cupy.cuda.get_current_stream().record()
        assert not done.done
    assert done.done


def test_extra_memory_on_a_card_is_what_a_call_holds_beyond_its_result(cupy):
    def call() -> Any:
        scratch = cupy.zeros(1 << 20, "u1")
        return scratch[: 1 << 10].copy()

    assert rigs.make_rig("cupy").extra_bytes(call) == 1 << 20


def test_a_call_that_waits_for_the_card_does_not_hang_a_burst(cupy):
    rig = rigs.make_rig("cupy")
    with rig.stream():
        calls = [lambda: cupy.cuda.get_current_stream().synchronize()]
        assert rig.clock.burst(Contender("waits", calls), 1).ms >= 0
