"""`cufa.warmup`: compiles kernels ahead of their first use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from cufa.errors import ArgumentError, DeviceError
from cufa.gpu import build
from cufa.gpu.device import Device, get_device
from cufa.gpu.plan import KernelKey, make_key
from cufa.problem import FLOAT_DTYPES, ArrayFacts, Signature, make_problem


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
    arch: int | None = None,
) -> int:
    """Compile kernels into the disk cache, so that the first call of each takes milliseconds.

    Every combination of the first four arguments is compiled, each with all the features named by
    the others.

    Parameters
    ----------
    head_dim : int or several, default (64, 128)
    dtype : str or several, default ("float16", "bfloat16")
    causal, return_lse : bool or several, default (False, True) and False
    window, mask, alibi_slopes, softcap, sink : bool, default False
        Whether calls will pass this argument.
    bias : str, default None
        Dtype of the bias that calls will pass.
    arch : int, default that of the current device
        Compute capability times 10. Given, no GPU is needed.

    Returns
    -------
    int
        Number of distinct kernels, now all in the cache.

    Raises
    ------
    ArgumentError
        A dtype that does not exist.
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
    device = _current_device() if arch is None else Device.of_arch(arch)
    features: dict[str, str | None] = {
        "mask": "bool" if mask else None,
        "bias": bias,
        "alibi_slopes": "float32" if alibi_slopes else None,
        "sink": "float32" if sink else None,
    }
    choices = product(*map(_several, (head_dim, dtype, causal, return_lse)))
    keys = {_key(device, d, name, c, lse, window, softcap, features) for d, name, c, lse in choices}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build.ensure_cached, keys))
    return len(keys)


def _several(x: Any) -> list[Any]:
    return [x] if isinstance(x, (str, int)) else list(x)


def _current_device() -> Device:
    try:
        from cupy.cuda import runtime

        return get_device(runtime.getDevice())
    except Exception as error:
        raise DeviceError(
            f"no GPU to compile for ({error}); pass arch=, such as 90 for sm_90"
        ) from error


def _key(
    device: Device,
    head_dim: int,
    dtype: str,
    causal: bool,
    return_lse: bool,
    window: bool,
    softcap: bool,
    features: dict[str, str | None],
) -> KernelKey:
    heads, seqlen = 1, 128

    def facts(shape: tuple[int, ...], name: str | None) -> ArrayFacts | None:
        if name is None:
            return None
        a = np.empty(shape, _numpy_dtype(name))
        return ArrayFacts(a.shape, a.strides, a.dtype, 0)

    q = facts((heads, seqlen, head_dim), dtype)
    assert q is not None
    call = Signature(
        q=q,
        k=q,
        v=q,
        mask=facts((seqlen, seqlen), features["mask"]),
        bias=facts((seqlen, seqlen), features["bias"]),
        alibi_slopes=facts((heads,), features["alibi_slopes"]),
        sink=facts((heads,), features["sink"]),
        out=None,
        causal=causal,
        window=(seqlen, None if causal else seqlen) if window else None,
        softcap=1.0 if softcap else None,
        scale=None,
        layout="bhsd",
        return_lse=return_lse,
        algorithm="auto",
        aligned=True,
    )
    return make_key(make_problem(call), device)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name not in (*FLOAT_DTYPES, "bool"):
        raise ArgumentError(f"dtype is {name!r}; it must be one of {', '.join(FLOAT_DTYPES)}")
    scalar: Any = name
    if name == "bfloat16":
        from ml_dtypes import bfloat16 as scalar
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype
