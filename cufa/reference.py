"""The oracle: the formula of attention and of its gradient in float64, written down once more.

Imports only NumPy and shares nothing with the rest of cufa. It holds whole score matrices, so it is
slow and takes O(seqlen**2) memory; it is there to compare with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> tuple[Array, Array]:
    """`cufa.attention` on NumPy arrays of any float dtype, computed from their values in float64.

    Parameters
    ----------
    q : array, shape (batch, heads, seqlen_q, head_dim)
    k : array, shape (batch, kv_heads, seqlen_k, head_dim)
    v : array, shape (batch, kv_heads, seqlen_k, head_dim_v)
        Leading axes may be missing; the axes of layout "bshd" are (batch, seqlen, heads, head_dim).
    causal, window, mask, bias, alibi_slopes, softcap, sink, dropout_p, dropout_seed, scale, layout
        As in `cufa.attention`.

    Returns
    -------
    out : float64 array, shape (batch, heads, seqlen_q, head_dim_v) in the layout of `q`
        A row that sees no key, or only scores of minus infinity, is zero.
    lse : float64 array, shape (batch, heads, seqlen_q)
        Natural log; minus infinity for a row that sees no key, the sink if there is one.
    """
    rank = np.ndim(q)
    s = scores(
        q,
        k,
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        scale=scale,
        layout=layout,
    )
    heads = s.shape[1]
    v = per_query_head(four_axes(v, layout), heads)
    logit = np.full((1, heads, 1), -np.inf)
    if sink is not None:
        logit = np.asarray(sink, np.float64).reshape(1, heads, 1)

    largest = np.maximum(s.max(axis=-1, initial=-np.inf), logit)
    empty = largest == -np.inf
    largest = np.where(empty, 0.0, largest)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN and infinite inputs propagate
        weights = np.exp(s - largest[..., None])
        total = weights.sum(axis=-1) + np.exp(logit - largest)
        lse = largest + np.log(total)
        if dropout_p:
            weights = weights * kept(dropout_seed, dropout_p, s.shape) / (1 - dropout_p)
        out = (weights / np.where(empty, 1.0, total)[..., None]) @ v

    out = out.swapaxes(1, 2) if layout == "bshd" and rank > 2 else out
    return out.reshape(out.shape[4 - rank :]), lse.reshape(lse.shape[4 - rank :])


class Gradients(NamedTuple):
    """Of a loss, by each input, each of the shape of its input; None for what was not given."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


def gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    bias: Any = None,
    sink: Any = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    **options: Any,
) -> Gradients:
    """What the inputs of `attention` do to a loss, from what its results do to it.

    Parameters
    ----------
    dout : array, shape of `out`
        The derivative of the loss by each element of `out`.
    dlse : array, shape of `lse`, default zeros
        The same for `lse`.
    q, k, v, bias, sink, softcap, dropout_p, dropout_seed, scale, layout, **options
        As in `attention`.

    Returns
    -------
    Gradients
        Float64. A row that sees no key, or only scores of minus infinity, contributes nothing,
        whatever its `dout` and `dlse`; with a sink its `dlse` goes there. The gradients of a key
        that no query sees are zero.

    Notes
    -----
    With ``P = exp(S - lse)``, ``D = rowsum(dO * O) - dlse`` and Z, which is ``1 / (1 - dropout_p)``
    for the weights that dropout keeps and 0 for others::

        dV = (P * Z)^T dO         dP = (dO V^T) * Z
        dS = P * (dP - D)         dsink = -sum(exp(sink - lse) * D)

    dS is also the bias's gradient; then ``1 - tanh(s / softcap)**2``, the cap's derivative, and
    ``dQ = scale * dS K``, ``dK = scale * dS^T Q``. dK and dV are summed over the query heads that
    share a key, dbias over the axes that a bias is repeated along.
    """
    score: dict[str, Any] = {"softcap": softcap, "scale": scale, "layout": layout}
    drop: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    out, lse = attention(q, k, v, bias=bias, sink=sink, **score, **drop, **options)
    s = scores(q, k, bias=bias, **score, **options)
    q4, k4, v4, out4, dout4 = (four_axes(a, layout) for a in (q, k, v, out, dout))
    heads, kv_heads = q4.shape[1], k4.shape[1]
    each_k, each_v = per_query_head(k4, heads), per_query_head(v4, heads)
    row = (*s.shape[:3], 1)
    lse4, dlse4 = (np.reshape(a, row) for a in (lse, np.zeros(row) if dlse is None else dlse))

    def summed(a: Array) -> Any:
        return a.reshape(a.shape[0], kv_heads, heads // max(kv_heads, 1), *a.shape[2:]).sum(axis=2)

    def in_shape_of(a: Array, given: Any) -> Array:
        turned = layout == "bshd" and np.ndim(given) > 2
        return (a.swapaxes(1, 2) if turned else a).reshape(np.shape(given))

    z = kept(dropout_seed, dropout_p, s.shape) / (1 - dropout_p) if dropout_p else np.ones(s.shape)
    empty = lse4 == -np.inf
    base, dout4, dlse4 = (np.where(empty, 0, a) for a in (lse4, dout4, dlse4))
    with np.errstate(invalid="ignore"):  # NaN and infinite inputs propagate
        p = np.exp(s - base)
        d = (dout4 * out4).sum(axis=-1, keepdims=True) - dlse4
        ds = p * (dout4 @ each_v.swapaxes(2, 3) * z - d)
        by_product = ds * (1 / np.sqrt(q4.shape[3]) if scale is None else float(scale))
        if softcap is not None:
            by_product *= 1 - np.tanh(scores(q, k, scale=scale, layout=layout) / softcap) ** 2
        dq = by_product @ each_k
        dk = summed(by_product.swapaxes(2, 3) @ q4)
        dv = summed((p * z).swapaxes(2, 3) @ dout4)

    dbias = dsink = None
    if bias is not None:
        shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
        repeated = tuple(axis for axis in range(4) if shape[axis] != s.shape[axis])
        dbias = ds.sum(axis=repeated).reshape(np.shape(bias))
    if sink is not None:
        logit = np.asarray(sink, np.float64).reshape(1, heads, 1, 1)
        dsink = -(np.exp(logit - base) * d).sum(axis=(0, 2, 3))
    return Gradients(in_shape_of(dq, q), in_shape_of(dk, k), in_shape_of(dv, v), dbias, dsink)


def scores(
    q: Any,
    k: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> Array:
    """What the softmax is taken of, (batch, heads, seqlen_q, seqlen_k); -inf for hidden keys."""
    q, k = four_axes(q, layout), four_axes(k, layout)
    heads, seqlen_q, head_dim = q.shape[1:]
    seqlen_k = k.shape[2]
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)

    with np.errstate(invalid="ignore"):  # NaN and infinite inputs propagate
        s = scale * (q @ per_query_head(k, heads).swapaxes(2, 3))
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)

    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes, np.float64)[..., None, None]  # (heads,) or (batch, heads)
        s = s - slopes * abs(i + seqlen_k - seqlen_q - j)
    if bias is not None:
        with np.errstate(invalid="ignore"):
            s = s + np.asarray(bias, np.float64)

    diagonal = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = (None if bound == -1 else bound for bound in window or (None, None))
    visible = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        visible &= j <= i + diagonal
    if left is not None:
        visible &= j >= i + diagonal - left
    if right is not None:
        visible &= j <= i + diagonal + right
    if mask is not None:
        visible = visible & np.asarray(mask)
    return np.where(visible, s, -np.inf)


def kept(seed: Any, p: float, shape: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Which weights dropout keeps, (batch, heads, seqlen_q, seqlen_k)."""
    places = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
    return dropout_words(seed, *places) >= min(round(p * 2**32), 2**32 - 1)


def dropout_words(seed: int, batch: Any, head: Any, row: Any, column: Any) -> NDArray[np.uint64]:
    """The random word, below 2**32, of each weight's position: `cufa.dropout` says which it is.

    Written for one position at a time, with no thought of which others share its counter.

    Parameters
    ----------
    seed : int
    batch, head, row, column : int or integer array
        Of shapes that broadcast.
    """
    places = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) for x in (column, row)))
    which = places[1] // np.uint64(8) % np.uint64(2) * np.uint64(2)
    which = which + places[0] // np.uint64(8) % np.uint64(2)
    pairs = [x // np.uint64(16) * np.uint64(8) + x % np.uint64(8) for x in places]
    others = [np.asarray(x).astype(np.uint64) for x in (head, batch)]
    words = philox4x32([*pairs, *others], [seed % 2**32, seed // 2**32])
    return np.choose(which.astype(np.intp), words)


def philox4x32(counter: Any, key: Any) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of each counter of four, as uint64."""
    r0, l0, r1, l1 = np.broadcast_arrays(*counter)
    k0, k1 = key
    word = np.uint64(2**32)
    for _ in range(10):
        product0, product1 = r0 * np.uint64(0xD2511F53), r1 * np.uint64(0xCD9E8D57)
        r0 = product1 // word ^ l0 ^ np.uint64(k0)
        r1 = product0 // word ^ l1 ^ np.uint64(k1)
        l0, l1 = product1 % word, product0 % word
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [r0, l0, r1, l1]


def four_axes(a: Any, layout: str) -> Array:
    """`a` in float64 with axes (batch, heads, seqlen, head_dim)."""
    array: Array = np.asarray(a, np.float64)
    if layout == "bshd" and array.ndim > 2:
        array = array.swapaxes(-2, -3)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def per_query_head(a: Array, heads: int) -> Array:
    """Keys or values repeated so that query head h finds its own at index h."""
    return a.repeat(heads // max(a.shape[1], 1), axis=1)
