"""How long a step of attention over ranks takes, from what cards and links can do: a model.

It knows rates, bytes and latencies, and nothing of how well kernels do with short blocks. Its
numbers are in docs/scaling.md.
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
    latency : float, default 2e-5
        Seconds that a message of no bytes takes.
    """

    name: str
    forward: float
    backward: float
    bandwidth: float
    latency: float = 2e-5


#: cufa on an H200, bfloat16, head dim 128, as measured on one card; NVLink as copies between two
#: cards of one host were measured, each way; the network is an assumption: a 400 Gbit/s adapter
#: for each card (InfiniBand NDR).
NVLINK = Machine("NVLink", 800e12, 360e12, 357e9)
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
    """A step of `ring_attention` after the first; with `causal`, of a zigzag split.

    Forward a key and its value travel; backward they do so again, and their gradients in float32
    follow. Of a causal problem a rank sees half of each block of another.
    """
    rows = shape.seqlen / ranks
    pairs = shape.batch * shape.heads * rows * rows * (0.5 if shape.causal else 1)
    # Two products of 2 * head_dim operations for each pair forward, five backward.
    compute = pairs * shape.head_dim * (10 if backward else 4)
    compute /= machine.backward if backward else machine.forward
    numbers = 2 * shape.batch * shape.kv_heads * rows * shape.head_dim
    moved = numbers * (shape.itemsize + 4 if backward else shape.itemsize)
    return Times(compute, (2 if backward else 1) * machine.latency + moved / machine.bandwidth)


def shortest_hidden(machine: Machine, ranks: int, shape: Shape, backward: bool = False) -> int:
    """The least `seqlen`, in steps of 1024 for each rank, at which transfers hide behind work."""
    rows = 1024
    while not ring_step(machine, ranks, replace(shape, seqlen=rows * ranks), backward).is_hidden:
        rows += 1024
    return rows * ranks


def ring_efficiency(machine: Machine, ranks: int, shape: Shape, backward: bool = False) -> float:
    """Time of one card for the whole, over the time of all ranks together."""
    step = ring_step(machine, ranks, shape, backward)
    # The first step is of the rank's own block, beside the first transfer; in the last nothing
    # moves, but backward the sums go home.
    exposed = max(step) * (ranks - 1) + step.compute + (step.transfer if backward else 0)
    return ranks * step.compute / exposed


def head_parallel_exchange(machine: Machine, ranks: int, shape: Shape) -> float:
    """Seconds that the exchanges of `head_parallel_attention` take forward; nothing hides them."""
    rows = shape.seqlen / ranks
    numbers = shape.batch * rows * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    moved = numbers * shape.itemsize * (ranks - 1) / ranks
    return 2 * machine.latency + moved / machine.bandwidth
