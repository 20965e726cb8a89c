"""How long a step of attention over ranks takes, from what cards and links can do: a model.

It knows rates, bytes and latencies, and nothing of how well kernels do with short blocks. Its
numbers are in docs/scaling.md, beside those that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Machine:
    """A card, and the slowest link of the ring.

    Parameters
    ----------
    name : str
    forward, backward : float
        FLOP/s of attention and of its gradients.
    bandwidth : float
        Bytes/s from one rank to the next.
    latency : float, default 9e-5
        Seconds that a transfer of no bytes takes.
    elementwise : float, default 2.1e11
        Elements/s of an expression over arrays in the card's memory, in one pass.
    """

    name: str
    forward: float
    backward: float
    bandwidth: float
    latency: float = 9e-5
    elementwise: float = 2.1e11


#: cufa on an H200, bfloat16, head dim 128, as measured on one card. Latency and NVLink's bandwidth
#: are those of NCCL's transfers of 67, 268 and 537 MB between two cards of one host, beside
#: attention; `elementwise` is that of CuPy. The network's bandwidth is an assumption: a 400 Gbit/s
#: adapter for each card (InfiniBand NDR).
NVLINK = Machine("NVLink", 800e12, 360e12, 330e9)
NETWORK = Machine("network", 800e12, 360e12, 50e9)


@dataclass(frozen=True)
class Shape:
    """Attention of one sequence; all lengths are of the whole."""

    seqlen: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    causal: bool = False
    itemsize: int = 2
    batch: int = 1


class Times(NamedTuple):
    """Seconds of one step of the ring on one rank."""

    compute: float
    transfer: float

    @property
    def is_hidden(self) -> bool:
        """Whether the transfer is over before the work beside it."""
        return self.transfer <= self.compute


def ring_step(machine: Machine, ranks: int, shape: Shape, backward: bool = False) -> Times:
    """A step of `ring_attention` in the middle of the ring; with `causal`, of a zigzag split.

    Forward a key and its value travel; backward they do so again, and behind them, if there are
    more than two ranks, the sums of their gradients in float32. Of a causal problem a rank sees
    half of each block of another.
    """
    rows = shape.seqlen / ranks
    pairs = shape.batch * shape.heads * rows * rows * (0.5 if shape.causal else 1)
    # Two products of 2 * head_dim operations for each pair forward, five backward.
    compute = pairs * shape.head_dim * (10 if backward else 4)
    compute /= machine.backward if backward else machine.forward
    transfer = _transfer(machine, ranks, shape, shape.itemsize)
    if backward and ranks > 2:
        transfer += _transfer(machine, ranks, shape, 4)
    return Times(compute, transfer)


def shortest_hidden(machine: Machine, ranks: int, shape: Shape, backward: bool = False) -> int:
    """The least `seqlen`, in steps of 1024 for each rank, at which transfers hide behind work."""
    rows = 1024
    while not ring_step(machine, ranks, replace(shape, seqlen=rows * ranks), backward).is_hidden:
        rows += 1024
    return rows * ranks


def ring_efficiency(machine: Machine, ranks: int, shape: Shape, backward: bool = False) -> float:
    """Parallel efficiency: time of one card, over `ranks` times that of all ranks together."""
    step = ring_step(machine, ranks, shape, backward)
    # The first step is of the rank's own block, beside the first transfer; in the last nothing
    # moves.
    total = max(step) * (ranks - 1) + step.compute
    if ranks > 1:
        # Results of each step are put together with those before, and rounded at the end.
        numbers = _of_rows(shape, ranks, shape.heads)
        if backward:
            # The sums go home; those of two ranks are single parts.
            itemsize = shape.itemsize if ranks == 2 else 4
            total += _transfer(machine, ranks, shape, itemsize)
            numbers += 2 * _of_rows(shape, ranks, shape.kv_heads)
        total += ranks * numbers / machine.elementwise
    return ranks * step.compute / total


def head_parallel_exchange(machine: Machine, ranks: int, shape: Shape) -> float:
    """Seconds that the exchanges of `head_parallel_attention` take forward; nothing hides them."""
    numbers = 2 * _of_rows(shape, ranks, shape.heads + shape.kv_heads)
    moved = numbers * shape.itemsize * (ranks - 1) / ranks
    return 2 * machine.latency + moved / machine.bandwidth


def _of_rows(shape: Shape, ranks: int, heads: int) -> float:
    """Elements of an array of a rank's rows of so many heads."""
    return shape.batch * heads * shape.seqlen / ranks * shape.head_dim


def _transfer(machine: Machine, ranks: int, shape: Shape, itemsize: int) -> float:
    """Seconds for two arrays like a block of keys, with elements of so many bytes."""
    moved = 2 * _of_rows(shape, ranks, shape.kv_heads) * itemsize
    return machine.latency + moved / machine.bandwidth
