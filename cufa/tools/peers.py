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
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import cufa
from cufa.arrays import namespace
from cufa.errors import UnsupportedError
from cufa.options import FLOAT_DTYPES
from cufa.tools import formulas
from cufa.tools.timing import Contender, reason
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
    results = result if isinstance(result, tuple) else (result,)
    size = sum(t.numel() * t.element_size() for t in results)
    return max(0, int(torch.cuda.max_memory_allocated() - before - size))


def _torch_calls(
    torch: Any,
    work: Workload,
    inputs: Sequence[Inputs],
    attention: Callable[..., Any],
    turn: bool = False,
) -> list[Callable[[], Any]]:
    """Calls of a function of q, k and v, or of its gradients by them; `turn`: whether it is in the
    layout (batch, seqlen, heads, head_dim)."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        result = attention(q, k, v)
        return result[0] if isinstance(result, tuple) else result  # some return lse beside it

    def call_on(arrays: Inputs) -> Callable[[], Any]:
        given = [arrays.q, arrays.k, arrays.v]
        if work.direction != "forward":
            given.append(arrays.dout)
        tensors = _tensors(torch, given)
        if turn:
            tensors = [t.transpose(1, 2) for t in tensors]
        if work.direction == "forward":
            return partial(forward, *tensors)
        *leaves, dout = tensors
        for leaf in leaves:
            leaf.requires_grad_()
        if work.direction == "both":
            return lambda: torch.autograd.grad(forward(*leaves), leaves, dout)
        out = cache(partial(forward, *leaves))  # computed in the first call, which is not timed
        return lambda: torch.autograd.grad(out(), leaves, dout, retain_graph=True)

    return [call_on(arrays) for arrays in inputs]


def _in_our_stream(
    torch: Any, work: Workload, backend: Any = None
) -> Callable[[], AbstractContextManager[None]]:
    """Contexts in which torch works in CuPy's current stream, with one backend if one is named."""

    @contextmanager
    def around() -> Iterator[None]:
        from cufa.tools import card

        stream = torch.cuda.ExternalStream(card.current_stream())
        inference = torch.inference_mode(work.direction == "forward")
        with inference, torch.cuda.stream(stream):
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
            _torch_calls(torch, work, inputs, partial(attention, **options)),
            around=_in_our_stream(torch, work, chosen),
            extra_bytes=partial(_torch_extra_bytes, torch),
        )

    return bind


def _flash_attn(*modules: str) -> Bind:
    """The first of these modules that has a `flash_attn_func`; layout (batch, seqlen, heads, d)."""
    torch = _torch()
    function = _first_with("flash_attn_func", modules)

    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        return Contender(
            name,
            _torch_calls(torch, work, inputs, partial(function, causal=work.causal), turn=True),
            around=_in_our_stream(torch, work),
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

    def own_all(arrays: Inputs) -> list[Any]:
        given = (arrays.q, arrays.k, arrays.v, arrays.dout)
        return [own(a) for a in given if a is not None]

    def bind(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        _square_causal(work)
        attention = partial(
            jax.nn.dot_product_attention, is_causal=work.causal, implementation=implementation
        )
        return Contender(
            name,
            [_jax_call(jax, work, attention, *own_all(arrays)) for arrays in inputs],
            around=partial(jax.default_matmul_precision, "float32"),  # else it may be TF32
            finish=jax.block_until_ready,
        )

    return bind


def _jax_call(
    jax: Any, work: Workload, attention: Callable[..., Any], *arrays: Any
) -> Callable[[], Any]:
    """A call of a function of q, k and v, or of its gradients by them: then dout comes last."""
    q, k, v, *back = arrays
    if work.direction == "forward":
        return partial(jax.jit(attention), q, k, v)
    if work.direction == "both":
        return partial(jax.jit(lambda *qkv: jax.vjp(attention, *qkv)[1](*back)), q, k, v)
    # Computed in the first call, which is not timed.
    pull = cache(lambda: jax.jit(partial(jax.vjp, attention))(q, k, v)[1])
    pulled = jax.jit(lambda pull: pull(*back))
    return lambda: pulled(pull())


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
    Peer("plain",           "numpy", FLOAT_DTYPES,         partial(formulas.bind, "plain")),
    Peer("in-place",        "numpy", FLOAT_DTYPES,         partial(formulas.bind, "in-place")),
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
    options: dict[str, Any] = {"causal": work.causal, "algorithm": algorithm}

    def call_on(arrays: Inputs) -> Callable[[], Any]:
        if work.direction == "forward":
            out = namespace(arrays.q).empty(shape, arrays.q.dtype) if work.out else None
            return partial(cufa.attention, *arrays[:3], bias=arrays.bias, out=out, **options)
        vjp = partial(
            cufa.attention_vjp, *arrays[:3], bias=arrays.bias, wrt=("q", "k", "v"), **options
        )
        if work.direction == "both":
            return lambda: vjp()[1](arrays.dout)
        back = cache(lambda: vjp()[1])  # attention itself in the first call, which is not timed
        return lambda: back()(arrays.dout)

    calls = [call_on(arrays) for arrays in inputs]
    return Contender(f"cufa {algorithm}", calls, extra_bytes=extra_bytes)
