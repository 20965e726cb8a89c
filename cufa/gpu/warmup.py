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
from cufa.gpu.config import lengths
from cufa.gpu.device import OLDEST_ARCH, Device, get_device
from cufa.gpu.plan import make_keys
from cufa.options import CAUSAL, numpy_dtype, plain_choice, plain_dtype, plain_integer
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
    choices = product(
        [plain_integer("head_dim", d, 1) for d in _several(head_dim)],
        [plain_dtype("dtype", name) for name in _several(dtype)],
        [plain_choice("causal", c, CAUSAL) for c in _several(causal)],
        [plain_choice("return_lse", lse, (False, True)) for lse in _several(return_lse)],
        lengths(),
        _WINDOWS if window else [None],
    )
    problems = (make_problem(_call(*choice, features)) for choice in choices)
    keys = {key for problem in problems for key in make_keys(problem, device)}
    report = progress or (lambda ready, total: None)
    report(0, len(keys))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for ready, _ in enumerate(pool.map(build.ensure_cached, keys), 1):
            report(ready, len(keys))
    return len(keys)


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

    def facts(shape: tuple[int, ...], name: str) -> ArrayFacts:
        a = np.empty(shape, numpy_dtype(name))
        return ArrayFacts(a.shape, a.strides, a.dtype, 0)

    q = facts((heads, seqlen, head_dim), dtype)
    return Signature(
        q=q,
        k=q,
        v=q,
        mask=facts((seqlen, seqlen), "bool") if features.mask else None,
        bias=facts((seqlen, seqlen), features.bias) if features.bias else None,
        alibi_slopes=facts((heads,), "float32") if features.alibi_slopes else None,
        sink=facts((heads,), "float32") if features.sink else None,
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
