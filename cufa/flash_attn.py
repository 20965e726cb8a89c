"""Names that users of flash-attn know, over `cufa.attention`."""

from __future__ import annotations

import math
import re
from typing import Any

from cufa.attention import attention
from cufa.errors import ArgumentError, CufaError
from cufa.options import plain_number

#: What `attention` has under another name, `mask` as what does its work here.
_NAMES = {
    "bias": "attn_bias",
    "mask": "attn_bias",
    "scale": "softmax_scale",
    "window": "window_size",
}
#: Where its errors name an argument: as what they are about, and in the way out.
_NAMED = re.compile(
    rf"(^|\band (?=\w+(?: is on |= ))|\bpass (?=\w+\.detach))({'|'.join(_NAMES)})\b"
)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    attn_bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    dropout_seed: int | None = None,
) -> Any:
    """`cufa.attention` under flash-attn's argument names; `attn_bias`, `return_lse` and
    `dropout_seed` are ours.

    Note the layout, (batch, heads, seqlen, head_dim): flash-attn's own function takes
    (batch, seqlen, heads, head_dim); for such arrays call ``cufa.attention(..., layout="bshd")``.

    Parameters
    ----------
    q : array, shape (batch, heads, seqlen_q, head_dim)
    k : array, shape (batch, kv_heads, seqlen_k, head_dim)
    v : array, shape (batch, kv_heads, seqlen_k, head_dim_v)
    attn_bias : float array, broadcastable to (batch, heads, seqlen_q, seqlen_k), default None
    softmax_scale : float, default ``1 / sqrt(head_dim)``
    causal : bool, default False
        Bottom-right: query i sees keys ``j <= i + seqlen_k - seqlen_q``.
    window_size : pair (left, right), default (-1, -1)
        Inclusive; -1 is unbounded.
    softcap : float, default 0.0
        0 is no cap.
    alibi_slopes : float array, shape (heads,) or (batch, heads), default None
    dropout_p : float, default 0.0
        As in `cufa.attention`: at least 0, below 1, and 0.0 outside of training.
    return_lse : bool, default False
    dropout_seed : int, default None
        Dropout needs one; flash-attn has a hidden one, PyTorch's.

    Returns
    -------
    out : array, shape (batch, heads, seqlen_q, head_dim_v)
    lse : array, shape (batch, heads, seqlen_q), only with `return_lse`

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
        As `cufa.attention`.
    """
    softcap = plain_number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ArgumentError(
            f"softcap is {softcap}; it must be positive and finite, or 0 for no cap"
        )
    try:
        return attention(
            q,
            k,
            v,
            bias=attn_bias,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap or None,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            return_lse=return_lse,
        )
    except CufaError as error:
        error.args = (_NAMED.sub(lambda found: found[1] + _NAMES[found[2]], str(error)),)
        raise
