"""FlashAttention for NumPy and CuPy: no PyTorch, no CUDA toolkit, no build step.

>>> import cufa
>>> out = cufa.attention(q, k, v, causal=True)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from cufa.attention import attention, merge
from cufa.backward import attention_backward, attention_vjp
from cufa.dropout import dropout_mask
from cufa.errors import (
    ArgumentError,
    BuildError,
    CufaError,
    DeviceError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from cufa.flash_attn import flash_attn_func
from cufa.gradients import Gradients
from cufa.layers import LayerGradients, MultiHeadAttention
from cufa.recompute import checkpoint

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BuildError",
    "CufaError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "Gradients",
    "LayerGradients",
    "LongPlan",
    "LongSequenceAttention",
    "MultiHeadAttention",
    "OutOfMemoryError",
    "ShapeError",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_vjp",
    "checkpoint",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "get_best_config",
    "load_tuning",
    "merge",
    "warmup",
]

#: Public names that live in the GPU folder or import it, or much else: imported when first asked
#: for, so that `import cufa` is quick.
_LAZY = {
    "Explanation": "cufa.explanation",
    "LongPlan": "cufa.long.sequence",
    "LongSequenceAttention": "cufa.long.sequence",
    "explain": "cufa.explanation",
    "get_best_config": "cufa.gpu.config",
    "load_tuning": "cufa.gpu.tuning",
    "warmup": "cufa.gpu.warmup",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cufa' has no attribute {name!r}")
