"""Attention and its gradients as one writes them in NumPy without cufa, to be timed beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from cufa.errors import UnsupportedError
from cufa.tools.timing import Contender, host_extra_bytes
from cufa.tools.workloads import Inputs, Workload


def bind(kind: str) -> Callable[[str, Workload, Sequence[Inputs]], Contender]:
    """What makes a contender of a name, a workload and its inputs; `kind` is "plain", or "in-place"
    for one array of scores."""
    make = _Plain if kind == "plain" else _InPlace

    def contender(name: str, work: Workload, inputs: Sequence[Inputs]) -> Contender:
        calls = [make(work, arrays).call() for arrays in inputs]
        return Contender(name, calls, extra_bytes=host_extra_bytes)

    return contender


class _Plain:
    """The formula, an array for each of its steps."""

    def __init__(self, work: Workload, arrays: Inputs) -> None:
        self.work, self.arrays = work, arrays
        self.hidden = None
        if work.causal:
            shape = (work.seqlen_q, work.seqlen_k)
            self.hidden = np.triu(np.ones(shape, bool), 1 + work.seqlen_k - work.seqlen_q)

    def call(self) -> Callable[[], Any]:
        """What is to be timed."""
        direction = self.work.direction
        if direction == "forward":
            return self.forward
        if direction == "both":
            return lambda: self.backward(self.weights(*self.operands()))
        weights = cache(lambda: self.weights(*self.operands()))  # in the first call, not timed
        return lambda: self.backward(weights())

    def operands(self) -> tuple[Any, Any, Any]:
        """q, k and v in a dtype that BLAS takes, with as many heads each.

        Grouped heads read the same keys: one product serves them all, if nothing tells their rows
        apart.
        """
        w, (q, k, v, bias, _) = self.work, self.arrays
        wide = np.float32 if q.dtype.itemsize == 2 else q.dtype
        if bias is None and self.hidden is None:
            q = q.reshape(w.batch, w.kv_heads, -1, w.head_dim)
        elif w.heads != w.kv_heads:
            k, v = (np.repeat(a, w.heads // w.kv_heads, 1) for a in (k, v))
        q, k, v = (a.astype(wide, copy=False) for a in (q, k, v))
        return q, k, v

    def forward(self) -> Any:
        w = self.work
        out = self.attend(*self.operands()).astype(self.arrays.q.dtype, copy=False)
        return out.reshape(w.batch, w.heads, w.seqlen_q, w.head_dim_v)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return self.weights(q, k, v) @ v

    def weights(self, q: Any, k: Any, v: Any) -> Any:
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        if self.arrays.bias is not None:
            s = s + self.arrays.bias
        if self.hidden is not None:
            s = np.where(self.hidden, -np.inf, s)
        with np.errstate(invalid="ignore"):  # -inf - -inf, where no key is seen
            p = np.exp(s - s.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True)

    def backward(self, p: Any) -> Any:
        """From the weights, which a framework keeps."""
        w, (q, k, v) = self.work, self.operands()
        dout = self.arrays.dout.astype(q.dtype, copy=False).reshape(*q.shape[:3], w.head_dim_v)
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
        ds = ds * q.dtype.type(w.head_dim**-0.5)
        dq, dk, dv = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
        shapes = (a.shape for a in self.arrays[:3])
        return tuple(map(self.summed, (dq, dk, dv), shapes))

    def summed(self, gradient: Any, shape: tuple[int, ...]) -> Any:
        """Over heads that share a key, in the dtype and shape of its input."""
        heads = gradient.shape[1]
        if heads > shape[1]:
            each = gradient.reshape(shape[0], shape[1], heads // shape[1], *shape[2:])
            gradient = each.sum(axis=2)
        return gradient.reshape(shape).astype(self.arrays.q.dtype, copy=False)


class _InPlace(_Plain):
    """The same with one array of scores."""

    def call(self) -> Callable[[], Any]:
        if self.work.direction != "forward":
            raise UnsupportedError("has no gradients")
        return self.forward

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        s = (q * q.dtype.type(q.shape[-1] ** -0.5)) @ k.swapaxes(-1, -2)
        if self.arrays.bias is not None:
            s += self.arrays.bias
        if self.hidden is not None:
            np.copyto(s, -np.inf, where=self.hidden)
        with np.errstate(invalid="ignore"):
            s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        total = s.sum(axis=-1, keepdims=True)
        return (s @ v) / total
