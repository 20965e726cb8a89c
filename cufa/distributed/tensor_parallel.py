"""A `MultiHeadAttention` whose heads are divided among ranks.

Source: Shoeybi et al., arXiv:1909.08053 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.arrays import namespace
from cufa.distributed.calls import check_library
from cufa.distributed.communicator import Communicator, Facts
from cufa.errors import ArgumentError, ShapeError, UnsupportedError
from cufa.gradients import check_algorithm
from cufa.layer_checks import Params, check_params
from cufa.layers import LayerGradients, MultiHeadAttention
from cufa.options import dtype_name, plain_choice, shown

#: Options of attention that are refused.
_WHOLE = ("bias", "dropout_p")
#: Those that have something for each head, and the axis of the heads.
_BY_HEAD = {"sink": -1, "alibi_slopes": -1, "mask": -3}


class TensorParallelAttention:
    """Multi-head attention of several ranks, each of which has some heads and all rows.

    A rank projects to its own heads, computes their attention and its part of the output; one sum
    over all ranks, of the size of `x`, makes the result. The backward pass has one such sum too,
    of the gradient of `x`, and another with a context.

    Parameters
    ----------
    comm : Communicator
        Of `cufa.distributed.connect`. Its size divides `kv_heads`.
    embed_dim, heads, **sizes
        As in `cufa.MultiHeadAttention`.

    Attributes
    ----------
    whole, own : MultiHeadAttention
        The layer, and the one of this rank's heads, whose `shapes` its parameters have.

    Raises
    ------
    ArgumentError, DTypeError
        As `cufa.MultiHeadAttention`, and ranks that do not divide the heads.

    Examples
    --------
    >>> layer = TensorParallelAttention(comm, 64, heads=4)  # doctest: +SKIP
    >>> params = layer.split(layer.whole.init(0))  # of a seed that is the same on all ranks
    >>> y, vjp = layer.vjp(params, x, causal=True)
    """

    def __init__(self, comm: Communicator, embed_dim: int, heads: int, **sizes: Any) -> None:
        self._comm = comm
        self.whole = whole = MultiHeadAttention(embed_dim, heads, **sizes)
        if whole.kv_heads % comm.size:
            raise ArgumentError(
                f"heads is {whole.heads} and kv_heads is {whole.kv_heads}; {comm.size} ranks must "
                "divide both"
            )
        self.own = MultiHeadAttention(
            embed_dim,
            whole.heads // comm.size,
            **{**sizes, "kv_heads": whole.kv_heads // comm.size, "head_dim": whole.head_dim},
        )

    def split(self, params: Params) -> dict[str, Any]:
        """This rank's part of the whole layer's parameters: columns of ``wq``, ``wk``, ``wv`` and
        their vectors, rows of ``wo``; ``bo``, of which there is one, on every rank.

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError
        """
        check_params(params, self.whole.shapes, "params['wq']", params["wq"])
        own = {}
        for name, shape in self.own.shapes.items():
            own[name] = params[name]
            for axis, length in enumerate(shape):
                if length != self.whole.shapes[name][axis]:
                    own[name] = _cut(own[name], axis, self._part(length))
        return {name: own[name].copy() for name in params}

    def __call__(
        self, params: Params, x: Any, context: Any = None, *, offset: int = 0, **options: Any
    ) -> Any:
        """The layer's result, the same on each rank.

        Parameters
        ----------
        params : dict of arrays
            This rank's, of `split`.
        x, context, offset : as in `MultiHeadAttention`, the same on each rank
        **options
            Those of `cufa.attention` that a layer takes, but for bias and dropout. What a mask,
            `alibi_slopes` or a `sink` has for each head it has for all heads of the whole.

        Returns
        -------
        y : array, shape and dtype of `x`

        Raises
        ------
        ArgumentError, BuildError, DeviceError, DTypeError, ShapeError, TypeError
            As a layer does, on each rank; or ranks differ.
        RankError, RankTimeoutError
            Another rank failed or is late.
        UnsupportedError
            As a layer does; bias and dropout.
        """
        own = self._agree("TensorParallelAttention", (params, x, context, offset), options)
        with self._comm.together("TensorParallelAttention"):
            y = self.own(self._with_one_bias(params), x, context, offset=offset, **own)
            return self._sum(y)

    def vjp(
        self,
        params: Params,
        x: Any,
        context: Any = None,
        *,
        offset: int = 0,
        recompute: bool = False,
        deterministic: bool = False,
        **options: Any,
    ) -> tuple[Any, Callable[[Any], LayerGradients]]:
        """The layer's result, and the function that takes gradients back through it.

        Parameters
        ----------
        params, x, context, offset, **options
            As in a call of the layer.
        recompute, deterministic
            As in `MultiHeadAttention.vjp`.

        Returns
        -------
        y : array, shape and dtype of `x`
        vjp : callable
            ``vjp(dy)``, of a `dy` that is the same on each rank, gives `LayerGradients`: of this
            rank's parameters, and of `x`, `context` and `sink` the same on each rank. Every rank
            must call it.

        Raises
        ------
        ArgumentError, BuildError, DeviceError, DTypeError, RankError, RankTimeoutError, ShapeError
        TypeError, UnsupportedError
            As a call of the layer.
        """
        name = "TensorParallelAttention.vjp"
        backward = {"recompute": recompute, "deterministic": deterministic}
        own = self._agree(name, (params, x, context, offset), options, **backward)
        with self._comm.together(name):
            shared = self._with_one_bias(params)
            y, pull = self.own.vjp(shared, x, context, offset=offset, **own)
            y = self._sum(y)

        def vjp(dy: Any) -> LayerGradients:
            with self._comm.together(name):
                found = pull(dy)
                dcontext = None if context is None else self._sum(found.dcontext)
                dsink = None if found.dsink is None else self._all_heads(found.dsink)
                return found._replace(dx=self._sum(found.dx), dcontext=dcontext, dsink=dsink)

        return y, vjp

    def _agree(
        self,
        name: str,
        call: tuple[Params, Any, Any, Any],
        options: dict[str, Any],
        **backward: Any,
    ) -> dict[str, Any]:
        """Options of this rank's layer, once all ranks have agreed; `call` is all else that it is
        called with, `backward` what concerns the backward pass."""
        found: list[dict[str, Any]] = []

        def find() -> Facts:
            found.append(self._own_options(options))
            signature = self.own.check_call(*call, found[0])
            for option, value in backward.items():
                plain_choice(option, value, (False, True))
            if backward:
                check_algorithm(signature.algorithm)
            check_library(self._comm, "x", call[1])
            return self._facts(call, options, dtype_name(signature.q.dtype))

        self._comm.agree(name, find)
        return {**found[0], **backward}

    def _facts(
        self, call: tuple[Params, Any, Any, Any], options: dict[str, Any], dtype: str
    ) -> Facts:
        _, x, context, offset = call
        given = {"x": x, "context": context, **options}
        shapes = {f"shape of {n}": list(a.shape) for n, a in given.items() if hasattr(a, "shape")}
        plain = {n: str(value) for n, value in options.items() if not hasattr(value, "shape")}
        return Facts(
            sizes={"the layer": repr(self.whole), **shapes},
            dtypes={"dtype of x": dtype},
            options={**plain, "offset": int(offset)},
            own={},
        )

    def _own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Of what has a number for each head, the part of this rank."""
        for option in _WHOLE:
            if options.get(option):
                raise UnsupportedError(
                    f"{option} is {shown(options[option])}; heads that are divided among ranks "
                    f"have no {option}"
                )
        own = dict(options)
        for name, axis in _BY_HEAD.items():
            a: Any = own.get(name)
            if getattr(a, "ndim", 0) < abs(axis) or (name == "mask" and a.shape[axis] == 1):
                continue
            if a.shape[axis] != self.whole.heads:
                raise ShapeError(
                    f"{name} has shape {a.shape}; it must be of the {self.whole.heads} heads of "
                    "the whole layer"
                )
            own[name] = _cut(a, axis, self._part(self.own.heads))
        return own

    def _part(self, length: int) -> slice:
        """This rank's part of an axis that is divided among ranks."""
        return slice(self._comm.rank * length, (self._comm.rank + 1) * length)

    def _with_one_bias(self, params: Params) -> Params:
        """Parameters of which the sum over ranks has ``bo`` once."""
        if self._comm.rank == 0 or "bo" not in params:
            return params
        return {**params, "bo": namespace(params["bo"]).zeros_like(params["bo"])}

    def _sum(self, a: Any) -> Any:
        """Over all ranks, in the accumulator's dtype, rounded to that of `a`."""
        total = namespace(a).ascontiguousarray(a.astype(_wide(a)))
        self._comm.all_reduce(total).wait()
        with np.errstate(over="ignore"):  # what the dtype cannot hold is infinite
            return total.astype(a.dtype)

    def _all_heads(self, a: Any) -> Any:
        """The numbers of all heads from those of each rank's."""
        every = namespace(a).zeros(self.whole.heads, _wide(a))
        every[self._part(self.own.heads)] = a.astype(every.dtype)
        return self._sum(every).astype(a.dtype)


def _cut(a: Any, axis: int, part: slice) -> Any:
    """A view of a part of one axis."""
    return a.swapaxes(0, axis)[part].swapaxes(0, axis)


def _wide(a: Any) -> str:
    return "float64" if dtype_name(a.dtype) == "float64" else "float32"
