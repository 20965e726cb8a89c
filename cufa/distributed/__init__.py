"""Attention of several ranks together: over GPUs by NCCL, over processors by MPI.

>>> from cufa import distributed
>>> with distributed.connect() as comm:  # doctest: +SKIP
...     out = distributed.ring_attention(comm, q, k, v, causal=True)

Imported by itself; `import cufa` does not import it. docs/scaling.md says which call to choose, and
how ranks are started.
"""

from __future__ import annotations

from cufa.distributed.communicator import Communicator
from cufa.distributed.connection import connect
from cufa.distributed.head_parallel import (
    head_parallel_attention,
    head_parallel_attention_backward,
)
from cufa.distributed.ring import ring_attention, ring_attention_backward
from cufa.distributed.sequence import zigzag_join, zigzag_split
from cufa.distributed.tensor_parallel import TensorParallelAttention

__all__ = [
    "Communicator",
    "TensorParallelAttention",
    "connect",
    "head_parallel_attention",
    "head_parallel_attention_backward",
    "ring_attention",
    "ring_attention_backward",
    "zigzag_join",
    "zigzag_split",
]
