"""Other implementations of attention: how to find each, what it takes, how to call it.

A peer reads the memory of our arrays through DLPack; JAX alone has a copy of its own, made before
anything is timed. GPU peers are called in CuPy's current stream, but for JAX, which has its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cufa
from cufa.arrays import namespace
from cufa.errors import UnsupportedError
from cufa.options import FLOAT_DTYPES
from cufa.tools.timing import Contender, host_extra_bytes, reason
from cufa.tools.workloads import Inputs, Workload

Bind = Callable[[str, Workload, Sequence[Inputs]], Contender]
_HALF = ("float16", "bfloat16")


class Peer(NamedTuple):
    """An implementation to stand beside.

    `open` imports it and returns what makes a contender of a name, a workload and copies of its
    inputs; it raises whatever an import raises.
    """

    name: str
    backend: str
    dtypes: tuple[str, ...]
    open: Callable[[], Bind]

    def contender(self, bind: Bind, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        """This peer on a workload.

        Raises
        ------
        UnsupportedError
            It does not take the workload. Other kinds of error come from the peer.
        """
        if work.dtype not in self.dtypes:
            raise UnsupportedError(f"takes {' or '.join(self.dtypes)}")
        return bind(self.name, work, inputs)


def open_all(peers: Iterable[Peer]) -> tuple[list[tuple[Peer, Bind]], dict[str, str]]:
    """The peers that can be used here, and for each of the others why not."""
    found, missing = [], {}
    for peer in peers:
        try:
            found.append((peer, peer.open()))
        except Exception as error:  # a broken installation raises anything
            missing[peer.name] = reason(error)
    return found, missing


def versions() -> dict[str, str]:
    """Of the libraries that the peers opened so far come from."""
    names = ("torch", "flash_attn", "jax")
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {name: version for name, version in found.items() if version}


def release() -> None:
    """Give memory back that torch keeps for its next call, so that others find it."""
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


# torch: `inputs` as its tensors


def _torch() -> Any:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise UnsupportedError("this torch has no CUDA")
    return torch


def _tensors(torch: Any, arrays: Iterable[Any]) -> list[Any]:
    """The same memory as torch's tensors; bfloat16 goes through DLPack as integers."""
    return [
        torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16)
        if a.dtype.name == "bfloat16"
        else torch.from_dlpack(a)
        for a in arrays
    ]


def _torch_extra_bytes(torch: Any, call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    result = result[0] if isinstance(result, tuple) else result
    peak = torch.cuda.max_memory_allocated()
    return max(0, int(peak - before - result.numel() * result.element_size()))


def _in_our_stream(torch: Any, backend: Any = None) -> Callable[[], AbstractContextManager[None]]:
    """Contexts in which torch works in CuPy's current stream, with one backend if one is named."""

    @contextmanager
    def around() -> Iterator[None]:
        from cufa.tools import card

        stream = torch.cuda.ExternalStream(card.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            if backend is None:
                yield
            else:
                with torch.nn.attention.sdpa_kernel(backend):
                    yield

    return around


def _square_causal(work: Workload) -> None:
    if work.causal and work.seqlen_q != work.seqlen_k:
        raise UnsupportedError("its causal is top-left, which differs where lengths do")


def _sdpa(backend: str) -> Bind:
    torch = _torch()
    chosen = getattr(importlib.import_module("torch.nn.attention").SDPBackend, backend)

    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        _square_causal(work)
        options: dict[str, Any] = {"is_causal": work.causal}
        if work.heads != work.kv_heads:
            options["enable_gqa"] = True
        attention = torch.nn.functional.scaled_dot_product_attention
        return Contender(
            name,
            [partial(attention, *_tensors(torch, arrays[:3]), **options) for arrays in inputs],
            around=_in_our_stream(torch, chosen),
            extra_bytes=partial(_torch_extra_bytes, torch),
        )

    return bind


def _flash_attn(*modules: str) -> Bind:
    """The first of these modules that has a `flash_attn_func`; layout (batch, seqlen, heads, d)."""
    torch = _torch()
    function = _first_with("flash_attn_func", modules)

    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        calls = []
        for arrays in inputs:
            views = [t.transpose(1, 2) for t in _tensors(torch, arrays[:3])]
            calls.append(partial(function, *views, causal=work.causal))
        return Contender(
            name,
            calls,
            around=_in_our_stream(torch),
            extra_bytes=partial(_torch_extra_bytes, torch),
        )

    return bind


def _first_with(name: str, modules: Sequence[str]) -> Any:
    errors = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            errors.append(reason(error))
    raise ImportError("; ".join(errors))


def _jax(implementation: str) -> Bind:
    # It would take three quarters of the card's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = importlib.import_module("jax")
    if jax.default_backend() != "gpu":
        raise UnsupportedError("this JAX has no GPU")

    def own(a: Any) -> Any:
        """A copy in JAX's layout, (batch, seqlen, heads, head_dim)."""
        host = np.ascontiguousarray(a.get().swapaxes(1, 2))
        return jax.block_until_ready(jax.device_put(host))

    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        _square_causal(work)
        attention = jax.jit(
            partial(
                jax.nn.dot_product_attention,
                is_causal=work.causal,
                implementation=implementation,
            )
        )
        calls = [partial(attention, *map(own, arrays[:3])) for arrays in inputs]
        return Contender(
            name,
            calls,
            around=partial(jax.default_matmul_precision, "float32"),  # else it may be TF32
            finish=jax.block_until_ready,
        )

    return bind


# NumPy, as one writes attention without cufa


def _formula(formula: Callable[..., Any]) -> Bind:
    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        hidden = None
        if work.causal:
            shape = (work.seqlen_q, work.seqlen_k)
            hidden = np.triu(np.ones(shape, bool), 1 + work.seqlen_k - work.seqlen_q)

        def call(arrays: Inputs) -> Any:
            # Grouped heads read the same keys: one product serves them all, if nothing tells their
            # rows apart. BLAS takes no float16.
            q, k, v, bias = arrays
            wide = np.float32 if q.dtype.itemsize == 2 else q.dtype
            plain = bias is None and hidden is None
            if plain:
                q = q.reshape(work.batch, work.kv_heads, -1, work.head_dim)
            elif work.heads != work.kv_heads:
                k, v = (np.repeat(a, work.heads // work.kv_heads, 1) for a in (k, v))
            q, k, v = (a.astype(wide, copy=False) for a in (q, k, v))
            with np.errstate(invalid="ignore"):  # -inf - -inf, where no key is seen
                out = formula(q, k, v, bias, hidden).astype(arrays.q.dtype, copy=False)
            return out.reshape(work.batch, work.heads, work.seqlen_q, work.head_dim_v)

        return Contender(
            name, [partial(call, arrays) for arrays in inputs], extra_bytes=host_extra_bytes
        )

    return bind


def plain(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
    """Attention as a formula."""
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    if bias is not None:
        s = s + bias
    if hidden is not None:
        s = np.where(hidden, -np.inf, s)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def in_place(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
    """The same with one array of scores."""
    s = (q * q.dtype.type(q.shape[-1] ** -0.5)) @ k.swapaxes(-1, -2)
    if bias is not None:
        s += bias
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    total = s.sum(axis=-1, keepdims=True)
    return (s @ v) / total


#: Names that flash-attn 3 and 4 go by.
_FA3 = ("flash_attn_interface", "fa3_fwd_interface", "fa3_fwd")
_FA4 = ("flash_attn.cute", "flash_attn.cute.interface")
# fmt: off
PEERS = (
    #    name               backend  dtypes                open
    Peer("torch-flash",     "cupy",  _HALF,                partial(_sdpa, "FLASH_ATTENTION")),
    Peer("torch-efficient", "cupy",  (*_HALF, "float32"),  partial(_sdpa, "EFFICIENT_ATTENTION")),
    Peer("torch-cudnn",     "cupy",  _HALF,                partial(_sdpa, "CUDNN_ATTENTION")),
    Peer("torch-math",      "cupy",  FLOAT_DTYPES,         partial(_sdpa, "MATH")),
    Peer("flash-attn-2",    "cupy",  _HALF,                partial(_flash_attn, "flash_attn")),
    Peer("flash-attn-3",    "cupy",  _HALF,                partial(_flash_attn, *_FA3)),
    Peer("flash-attn-4",    "cupy",  _HALF,                partial(_flash_attn, *_FA4)),
    Peer("jax-cudnn",       "cupy",  _HALF,                partial(_jax, "cudnn")),
    Peer("jax-xla",         "cupy",  (*_HALF, "float32"),  partial(_jax, "xla")),
    Peer("plain",           "numpy", FLOAT_DTYPES,         partial(_formula, plain)),
    Peer("in-place",        "numpy", FLOAT_DTYPES,         partial(_formula, in_place)),
)
# fmt: on


def ours(
    algorithm: str,
    work: Workload,
    inputs: Sequence[Inputs],
    extra_bytes: Callable[[Callable[[], Any]], int],
) -> Contender:
    """cufa by one of its algorithms."""
    shape = (work.batch, work.heads, work.seqlen_q, work.head_dim_v)
    calls = [
        partial(
            cufa.attention,
            *arrays[:3],
            bias=arrays.bias,
            causal=work.causal,
            algorithm=algorithm,
            out=namespace(arrays.q).empty(shape, arrays.q.dtype) if work.out else None,
        )
        for arrays in inputs
    ]
    return Contender(f"cufa {algorithm}", calls, extra_bytes=extra_bytes)
