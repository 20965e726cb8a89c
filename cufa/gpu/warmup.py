"""`cufa.warmup`: compiles kernels ahead of their first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cufa.errors import DeviceError
from cufa.gpu import build
from cufa.gpu.backward_plan import make_backward_plan
from cufa.gpu.config import lengths
from cufa.gpu.device import OLDEST_ARCH, Device, get_device
from cufa.gpu.plan import KernelKey, make_keys
from cufa.gradients import NAMES, BackwardSignature, make_backward_problem
from cufa.options import CAUSAL, dtype_name, numpy_dtype, plain_choice, plain_dtype, plain_integer
from cufa.problem import ArrayFacts, Signature, make_problem


def warmup(
    *,
    head_dim: int | Iterable[int] = (64, 128),
    dtype: str | Iterable[str] = ("float16", "bfloat16"),
    causal: bool | Iterable[bool] = (False, True),
    return_lse: bool | Iterable[bool] = False,
    window: bool = False,
    mask: bool = False,
    bias: str | None = None,
    alibi_slopes: bool = False,
    softcap: bool = False,
    sink: bool = False,
    dropout: bool = False,
    gradients: bool = False,
    arch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile kernels into the disk cache, so that the first call of each takes milliseconds.

    Every combination of the first four arguments is compiled, each with all the features named by
    the others, and for every length: where long sequences take another tile, that too.

    Parameters
    ----------
    head_dim : int or several, default (64, 128)
    dtype : str or several, default ("float16", "bfloat16")
    causal, return_lse : bool or several, default (False, True) and False
    window, mask, alibi_slopes, softcap, sink, dropout : bool, default False
        Whether calls will pass this argument (dropout: `dropout_p`).
    bias : str, default None
        Dtype of the bias that calls will pass.
    gradients : bool, default False
        Whether calls will be of `cufa.attention_vjp`, with gradients of all that is passed: kernels
        for its backward pass too, not those of ``deterministic=True``, and lse counts as returned.
    arch : int, default that of the current device
        Compute capability times 10. Given, no GPU is needed.
    progress : callable, default None
        Called with how many kernels are in the cache and how many there will be, first with 0.

    Returns
    -------
    int
        Number of distinct kernels, now all in the cache. For masks on Hopper the one that looks at
        the mask first is among them.

    Raises
    ------
    ArgumentError
        A dtype that does not exist, an architecture below 70.
    BuildError
        NVRTC is missing.
    DeviceError
        No `arch` is given and there is no GPU.
    UnsupportedError
        No kernel serves a combination.

    Notes
    -----
    The folder is CUFA_CACHE_DIR, or ``cufa`` in the user's cache folder.
    """
    device = _current_device() if arch is None else _device(arch)
    bias = None if bias is None else plain_dtype("bias", bias)
    features = _Features(mask, alibi_slopes, softcap, sink, bias, dropout)
    plain_choice("window", window, (False, True))
    for name, value in features._asdict().items():
        if name != "bias":
            plain_choice(name, value, (False, True))
    gradients = plain_choice("gradients", gradients, (False, True))
    choices = product(
        [plain_integer("head_dim", d, 1) for d in _several(head_dim)],
        [plain_dtype("dtype", name) for name in _several(dtype)],
        [plain_choice("causal", c, CAUSAL) for c in _several(causal)],
        [
            bool(plain_choice("return_lse", lse, (False, True)) or gradients)
            for lse in _several(return_lse)
        ],
        lengths(),
        _WINDOWS if window else [None],
    )
    calls = [_call(*choice, features) for choice in choices]
    keys = {key for call in calls for key in make_keys(make_problem(call), device)}
    if gradients:
        keys |= {key for call in calls for key in _backward_keys(call, device)}
    report = progress or (lambda ready, total: None)
    report(0, len(keys))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for ready, _ in enumerate(pool.map(build.ensure_cached, keys), 1):
            report(ready, len(keys))
    return len(keys)


def _backward_keys(forward: Signature, device: Device) -> list[KernelKey]:
    """The units of the backward pass of a call, with all gradients."""
    heads, seqlen, _ = forward.q.shape
    wide = "float64" if forward.q.dtype == np.float64 else "float32"
    given = [name for name in NAMES if getattr(forward, name) is not None]
    call = BackwardSignature(
        forward,
        dout=forward.q,
        out=forward.q,
        lse=_facts((heads, seqlen), wide),
        dlse=None,
        wrt=tuple(given),
        deterministic=False,
        aligned=True,
        sink_dtype=None if forward.sink is None else dtype_name(forward.sink.dtype),
    )
    plan = make_backward_plan(make_backward_problem(call), device)
    return [step.key for step in plan.steps]


#: Bounded on the left, on the right, on both sides: a kernel for each.
_WINDOWS = [(9, None), (None, 9), (9, 9)]


class _Features(NamedTuple):
    mask: bool = False
    alibi_slopes: bool = False
    softcap: bool = False
    sink: bool = False
    bias: str | None = None
    dropout: bool = False


def _several(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple, set, frozenset, range)) else [x]


def _device(arch: Any) -> Device:
    return Device.of_arch(plain_integer("arch", arch, OLDEST_ARCH))


def _current_device() -> Device:
    try:
        from cupy.cuda import runtime

        return get_device(runtime.getDevice())
    except Exception as error:
        raise DeviceError(
            f"no GPU to compile for ({error}); pass arch=, such as 90 for sm_90"
        ) from error


def _call(
    head_dim: int,
    dtype: str,
    causal: bool | str,
    return_lse: bool,
    seqlen: int,
    window: tuple[int | None, int | None] | None,
    features: _Features,
) -> Signature:
    """A call that needs the kernel for sequences about that long."""
    heads = 1
    q = _facts((heads, seqlen, head_dim), dtype)
    return Signature(
        q=q,
        k=q,
        v=q,
        mask=_facts((seqlen, seqlen), "bool") if features.mask else None,
        bias=_facts((seqlen, seqlen), features.bias) if features.bias else None,
        alibi_slopes=_facts((heads,), "float32") if features.alibi_slopes else None,
        sink=_facts((heads,), "float32") if features.sink else None,
        out=None,
        causal=causal,
        window=window,
        softcap=1.0 if features.softcap else None,
        scale=None,
        layout="bhsd",
        return_lse=return_lse,
        algorithm="auto",
        aligned=True,
        dropout_p=0.5 if features.dropout else 0.0,
    )


def _facts(shape: tuple[int, ...], dtype: str) -> ArrayFacts:
    """Of a contiguous array."""
    a = np.empty(shape, numpy_dtype(dtype))
    return ArrayFacts(a.shape, a.strides, a.dtype, 0)
