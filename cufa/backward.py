"""The public calls for gradients: `attention_backward` and `attention_vjp`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cufa import cpu_backward
from cufa.arrays import CPU, Arrays, ForeignArray, sign
from cufa.attention import attention, cards
from cufa.gradients import (
    BackwardSignature,
    Gradients,
    Saved,
    check_algorithm,
    plain_wrt,
    sign_backward,
)
from cufa.options import ALGORITHMS, plain_choice, plain_options
from cufa.problem import Causal


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
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
    algorithm: str = "auto",
    wrt: Any = None,
    deterministic: bool = False,
) -> Gradients:
    """Gradients of a loss by the inputs of `attention`, from those by its results.

    Scores are computed again from `q`, `k` and `lse`: memory beyond the results is O(seqlen). On
    NumPy and CuPy arrays, and on arrays of other libraries.

    Parameters
    ----------
    dout : array, shape and dtype of `out`
        The derivative of the loss by each element of `out`. Any strides, as for all arrays here.
    q, k, v : array
    causal, window, mask, bias, alibi_slopes, softcap, sink, dropout_p, dropout_seed, scale, layout
        What `attention` was called with.
    out, lse : array
        What it returned, with `return_lse`. Where keys were attended to in parts that `merge` put
        together: a part's keys and values with the merged `out` and `lse` give that part's share of
        the gradients, and of `dq`, which is the sum of the shares.
    dlse : array, shape and dtype of `lse`, default None
        The derivative of the loss by each element of `lse`, if the loss uses it.
    algorithm : {"auto", "fa2"}, default "auto"
        Both are FlashAttention-2.
    wrt : sequence of {"q", "k", "v", "bias", "sink"}, default None
        Whose gradients are wanted; None means of all that are given. A large bias that is a
        constant is worth leaving out.
    deterministic : bool, default False
        Whether the result must be the same, bit for bit, from run to run on one machine. On the CPU
        it is, but for the gradient of a bias that is repeated along batches, heads or queries; its
        price is that such a call runs on one thread. On a GPU it is, but for `dq`, which blocks add
        up in any order; its price is that scores are computed once more.

    Returns
    -------
    Gradients
        A named tuple ``(dq, dk, dv, dbias, dsink)`` of contiguous arrays, each of the shape and
        dtype of its input; None where the input was not given or not in `wrt`. `dk` and `dv` are
        summed over the query heads that share a key/value head, `dbias` over the axes that a bias
        of size 1 there is broadcast along. `alibi_slopes` are constants, as is `mask`.

        A row that sees no key contributes nothing, whatever its `dout` and `dlse` hold. With a sink
        `dlse` goes to the sink, and `dout` counts as 0 if it is finite. A key that no query sees
        has gradient 0.

    Raises
    ------
    ArgumentError
        As in `attention`; `wrt` names what was not given, or what has no gradient.
    DeviceError, DTypeError, ShapeError
        As in `attention`; `dout`, `out`, `lse` or `dlse` do not belong to the problem.
    UnsupportedError
        An algorithm without gradients; no kernel serves the call; a PyTorch tensor requires grad.

    Notes
    -----
    With ``P = exp(S - lse)`` and ``D = rowsum(dO * O) - dlse``: ``dV = P^T dO``,
    ``dS = P * (dO V^T - D)``, ``dQ = scale * dS K``, ``dK = scale * dS^T Q``. Dropout, which is the
    same function of seed and position again, takes P in dV and dO V^T to 0 or divides them by
    ``1 - dropout_p``. Sums are in float32
    (float64 for float64 inputs). A gradient that its dtype cannot hold is infinite.

    Source: Dao, arXiv:2307.08691, Algorithm 2.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 100, 64), dtype=np.float32)
    >>> out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    >>> cufa.attention_backward(dout, q, k, v, out, lse, causal=True).dq.shape
    (8, 100, 64)
    """
    arrays = Arrays(q, k, v, mask, bias, alibi_slopes, sink)
    saved = Saved(dout, out, lse, dlse)
    names = plain_wrt(wrt, arrays)
    plain_choice("deterministic", deterministic, (False, True))
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "scale": scale,
        "layout": layout,
        "algorithm": algorithm,
    }
    call: BackwardSignature | None
    try:
        forward = sign(arrays, **options, return_lse=True)
        call = sign_backward(forward, saved, names, bool(deterministic))
    except ForeignArray:
        call = None
    if call is None:
        from cufa import interop

        again = partial(_wanted, wrt=names, deterministic=deterministic, **options)
        borrowed = {n: a for n, a in arrays._asdict().items() if n != "out"} | saved._asdict()
        found = interop.lend(again, borrowed, writes="")  # none of them, `out` neither
        return Gradients(**{f"d{name}": a for name, a in zip(names, found, strict=True)})
    if call.forward.q.device == CPU:
        return cpu_backward.run(call, arrays, saved, dropout_seed)
    gradients: Gradients = cards().run_backward(call, arrays, saved, dropout_seed)
    return gradients


def attention_vjp(
    q: Any, k: Any, v: Any, *, wrt: Any = None, deterministic: bool = False, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention, and the function that takes gradients back through it.

    Parameters
    ----------
    q, k, v : array
    **options
        Those of `attention`. With ``return_lse=True`` the first result is ``(out, lse)``.
    wrt, deterministic
        As in `attention_backward`.

    Returns
    -------
    out : array or tuple
        What `attention` returns.
    vjp : callable
        ``vjp(dout, dlse=None)`` is `attention_backward` of this call; it can be called many times.
        It holds on to the arrays given, to `out` and to `lse`, which must stay as they are until
        its last call; of `window`, numbers and the seed it keeps what they were.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, OutOfMemoryError, ShapeError, UnsupportedError
        As `attention` and `attention_backward` do; what can be known of the backward pass
        beforehand is raised before attention is computed, but that a GPU has no kernel for it.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> out, vjp = cufa.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv, dbias, dsink = vjp(np.ones_like(out))
    >>> dk.shape, dbias is None
    ((8, 100, 64), True)
    """
    given = Arrays(q, k, v, bias=options.get("bias"), sink=options.get("sink"))
    names = plain_wrt(wrt, given)
    plain_choice("deterministic", deterministic, (False, True))
    algorithm = plain_choice("algorithm", options.get("algorithm", "auto"), ALGORITHMS)
    check_algorithm(algorithm)
    asked = plain_choice("return_lse", options.pop("return_lse", False), (False, True))
    options = plain_options(options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    options.pop("out", None)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        return attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=names, deterministic=deterministic, **options
        )

    return ((out, lse) if asked else out), vjp


def _wanted(*, wrt: tuple[str, ...], **arguments: Any) -> tuple[Any, ...]:
    """The gradients in `wrt` alone."""
    gradients = attention_backward(wrt=wrt, **arguments)
    return tuple(getattr(gradients, f"d{name}") for name in wrt)
