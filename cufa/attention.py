"""The public calls: `attention` and `merge`."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from cufa import cpu
from cufa.arrays import CPU, Arrays, ForeignArray, describe, namespace, sign
from cufa.merging import merged_weights, weighted_sum
from cufa.options import LAYOUTS, plain_choice
from cufa.problem import ArrayFacts, Causal, Signature, check_merge


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
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
    return_lse: bool = False,
    algorithm: str = "auto",
    out: Any = None,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k.T) @ v``, without forming the score matrix.

    NumPy arrays run on the CPU, CuPy arrays on the GPU that holds them, in CuPy's current stream;
    the result is of the same library. Arrays of other libraries (JAX, PyTorch, Numba, ...) that
    have DLPack or the CUDA array interface run where they are, without a copy; the result is of the
    library of `q` if that can import DLPack, else CuPy's or NumPy's. Memory beyond the result is
    O(seqlen), but for ``algorithm="standard"``, and for a mask with a row for each query on Hopper
    GPUs, which takes an eighth to half of its own size again.

    The score of query i and key j is ``s = scale * q[i] @ k[j]``; then
    ``softcap * tanh(s / softcap)``; then ``- slope * |i + seqlen_k - seqlen_q - j|`` and
    ``+ bias``; then masks; then softmax over the keys; then dropout.

    Parameters
    ----------
    q : array, shape (batch, heads, seqlen_q, head_dim)
        float16, bfloat16 (of `ml_dtypes`), float32 or float64. Leading axes may be missing:
        (heads, seqlen_q, head_dim) and (seqlen_q, head_dim) work too. Any strides, also zero and
        negative; an input whose last axis is not contiguous is copied first on the GPU.
    k : array, shape (batch, kv_heads, seqlen_k, head_dim)
    v : array, shape (batch, kv_heads, seqlen_k, head_dim_v)
        Same dtype, device and number of axes as `q`. `kv_heads` divides `heads`: query head h reads
        key/value head ``h // (heads // kv_heads)``.
    causal : bool or "top_left", default False
        True: query i sees keys ``j <= i + seqlen_k - seqlen_q``, so the last query sees every key
        (bottom-right). With seqlen_q > seqlen_k the first ``seqlen_q - seqlen_k`` rows see no key.
        "top_left": query i sees keys ``j <= i`` (PyTorch's rule).
    window : pair (left, right), default None
        Query i sees keys from ``i + d - left`` to ``i + d + right``, both included, where ``d`` is
        ``seqlen_k - seqlen_q``, or 0 for ``causal="top_left"``. None or -1 leaves a side open;
        0 is a bound. `causal` lowers `right` to 0.
    mask : bool array, broadcastable to (batch, heads, seqlen_q, seqlen_k), default None
        True where a key takes part. "fa3" skips blocks of keys that it hides.
    bias : float array, broadcastable to (batch, heads, seqlen_q, seqlen_k), default None
        Added to the scores, in natural-log units. Any of the four dtypes.
    alibi_slopes : float array, shape (heads,) or (batch, heads), default None
        What a score loses for each place that its key is away from the last that causal leaves,
        positive in the usual recipe. Any of the four dtypes. (1,) where `q` has no axis of heads.
    softcap : float > 0, default None
        Bounds the scores smoothly: they become ``softcap * tanh(s / softcap)``, before ALiBi, bias
        and masks.
    sink : float array, shape (heads,), default None
        A score for each query head, neither scaled nor capped, that takes part in the softmax's
        denominator and in lse, but has no value: weight that goes nowhere. Any of the four dtypes.
        (1,) where `q` has no axis of heads.
    dropout_p : float, default 0.0
        Probability, below 1, that a weight is dropped. After the softmax, weights are divided by
        ``1 - dropout_p`` where `cufa.dropout_mask` of this seed and probability, and of shape
        (batch, heads, seqlen_q, seqlen_k), is True, and are 0 elsewhere. `lse` is as without
        dropout. It drops whenever it is not 0: pass 0.0 outside of training.
    dropout_seed : int, default None
        Dropout needs one: at least 0, below 2**64. The same seed drops the same weights,
        so take another for each call, and the same one again to repeat a call.
    scale : float, default ``1 / sqrt(head_dim)``
    layout : {"bhsd", "bshd"}, default "bhsd"
        "bshd": the axes of `q`, `k`, `v` and the result are (batch, seqlen, heads, head_dim).
    return_lse : bool, default False
        Whether to return `lse` too, which `merge` takes.
    algorithm : {"auto", "fa1", "fa2", "fa3", "standard"}, default "auto"
        How the result is computed: by FlashAttention-1 (on a GPU only), -2 or -3 (on Hopper GPUs
        only, in 16 bits), or, "standard", with all scores at once, in memory
        O(seqlen_q * seqlen_k), by matrix products (on the GPU of cuBLAS) and array expressions: the
        baseline. "auto" means FlashAttention-3 where its kernel serves the call, else -2; it may
        come to mean more, but never "standard". `cufa.explain` says what serves a call.
    out : array, default None
        Where to put the result: its shape and dtype, last axis contiguous, sharing no memory with
        an input. Of any library whose arrays can be written, so not JAX's.

    Returns
    -------
    out : array, shape (batch, heads, seqlen_q, head_dim_v) in the layout of `q`, dtype of `q`
        A row that sees no key is zero.
    lse : array, shape (batch, heads, seqlen_q), only with `return_lse`
        Natural log of the sum of the exponentials of a row's scores (and of its sink), float32, or
        float64 for float64 inputs. Minus infinity for a row that sees no key (with a sink, the
        sink). Leading axes are missing where they are missing in `q`; the shape does not depend on
        `layout`.

    Raises
    ------
    ShapeError
        The arrays do not fit together; the message names the first axis that differs.
    DTypeError
        An array of integers, two dtypes, a mask that is not boolean, an object that is no array or
        no number, a JAX tracer.
    ArgumentError
        An option outside its choices or range, an `out` that is read-only or overlaps an input.
    BuildError
        On the GPU: NVRTC is missing, or the driver does not load the kernel; for "standard",
        cuBLAS is missing.
    DeviceError
        Arrays on different devices, NumPy mixed with CuPy; an array of another library on a device
        that is neither the CPU nor a CUDA GPU.
    OutOfMemoryError
        The scores that "standard" holds do not fit into memory.
    UnsupportedError
        No kernel of this algorithm serves this dtype, head_dim and memory on this GPU; "fa1" or
        "fa3" on NumPy arrays; a PyTorch tensor requires grad.

    Notes
    -----
    Scores and sums are accumulated in float32 (float64 for float64 inputs); float32 products are
    true float32. NaN and infinity in keys and values that take part propagate as in the formula.
    Keys and values that a mask, window or causal rule hides must be finite, since 0 * NaN is NaN.
    The result is the same, bit for bit, from run to run.

    Sources: Vaswani et al. 2017, eq. 1 (the formula); Dao, arXiv:2307.08691, Algorithm 1 ("fa2");
    Dao et al., arXiv:2205.14135, Algorithm 1 ("fa1"); Shah et al., arXiv:2407.08608 ("fa3"); Press
    et al., arXiv:2108.12409 (ALiBi); Gemma 2, arXiv:2408.00118, section 2 (softcap); Xiao et al.,
    arXiv:2309.17453 (attention sinks; one learned number for each head, as here, is gpt-oss's
    form).

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 100, 64), dtype=np.float32)
    >>> cufa.attention(q, k, v, causal=True).shape
    (2, 4, 100, 64)
    """
    arrays = Arrays(q, k, v, mask, bias, alibi_slopes, sink, out)
    call: Signature | None
    try:
        call = sign(
            arrays,
            causal,
            window,
            softcap,
            scale,
            layout,
            return_lse,
            algorithm,
            dropout_p,
            dropout_seed,
        )
    except ForeignArray:
        call = None
    if call is None:  # out of the except clause, of which errors in here are no consequence
        from cufa import interop

        on_own = partial(
            attention,
            causal=causal,
            window=window,
            softcap=softcap,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            algorithm=algorithm,
        )
        return interop.lend(on_own, arrays._asdict())
    if call.q.device == CPU:
        return cpu.run(call, arrays, dropout_seed)
    return cards().run(call, arrays, dropout_seed)


@cache
def cards() -> Any:
    """`cufa.gpu.cards`, which imports CuPy: not before a CuPy array has come in."""
    from cufa.gpu import cards

    return cards


def merge(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bhsd"
) -> tuple[Any, Any]:
    """Attention over the keys of two calls together, from the results of each.

    With ``lse = logaddexp(lse_a, lse_b)`` the result is
    ``out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``. A sink must have been given to one of
    the two only.

    Parameters
    ----------
    out_a, out_b : array, shape (..., seqlen_q, head_dim_v) in `layout`
        Outputs of `attention` with the same queries on disjoint keys.
    lse_a, lse_b : array, shape (..., heads, seqlen_q) in either layout
        The lse of each call: float32, or float64 if the outputs are float64.
    layout : {"bhsd", "bshd"}, default "bhsd"

    Returns
    -------
    out : array, shape, dtype and library of `out_a`
    lse : array, shape and dtype of `lse_a`
        A row that saw no key in either call has output 0 and lse minus infinity.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
        The four arrays do not fit together.
    UnsupportedError
        One of them is a PyTorch tensor that requires grad.

    Notes
    -----
    Sources: Ye et al., arXiv:2501.01005 (merging attention states, FlashInfer); Dao,
    arXiv:2307.08691 (the same between the blocks of one kernel). Computed from the difference to
    the larger lse, so that no exponential overflows.

    Computed in the dtype of lse. CuPy, which computes it on a GPU, takes for zero what is below the
    smallest normal number there (1.2e-38 in float32): a weight, its product with an output, the
    result. `cufa.bounds.merged` is the error that all this excuses.
    """
    plain_choice("layout", layout, LAYOUTS)
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    facts: list[ArrayFacts] | None
    try:
        facts = [describe(name, a) for name, a in arrays.items()]
    except ForeignArray:
        facts = None
    if facts is None:
        from cufa import interop

        merged: tuple[Any, Any] = interop.lend(partial(merge, layout=layout), arrays)
        return merged
    check_merge(facts, layout)
    with np.errstate(all="ignore"):  # log(0), and NaN that came with the results
        lse, *weights = merged_weights(lse_a, lse_b)
        weight_a, weight_b = (w[..., None] for w in weights)
        if layout == "bshd" and out_a.ndim > 2:
            weight_a, weight_b = weight_a.swapaxes(-2, -3), weight_b.swapaxes(-2, -3)
        out = namespace(out_a).empty(out_a.shape, out_a.dtype)
        weighted_sum(out_a, weight_a, out_b, weight_b, out)
    return out, lse
