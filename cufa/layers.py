"""`MultiHeadAttention`: projections around attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import describe
from cufa.attention import attention
from cufa.backward import attention_backward, attention_vjp
from cufa.errors import ShapeError
from cufa.gradients import Gradients, check_algorithm
from cufa.layer_checks import (
    Params,
    check_attention,
    check_belongs,
    check_heads,
    check_inputs,
    check_library,
    check_options,
    check_params,
    check_rotary,
    plain_generator,
)
from cufa.linear import bias_gradient, input_gradient, linear, weight_gradient
from cufa.options import (
    numpy_dtype,
    plain_choice,
    plain_dtype,
    plain_integer,
    plain_number,
    plain_options,
)
from cufa.problem import Signature, check_float
from cufa.rotary import Turns, rotate, turns

_BOOL = (False, True)


class LayerGradients(NamedTuple):
    """The derivative of a loss by each input of a layer; None for what was not given."""

    #: A dict like the parameters, in their order.
    dparams: dict[str, Any]
    dx: Any
    dcontext: Any = None
    dbias: Any = None
    dsink: Any = None


class MultiHeadAttention:
    """Multi-head attention, ``concat(head_1, ..., head_h) @ wo``, on NumPy or CuPy arrays.

    With ``context = x`` for self-attention, head h is the attention of ``x @ wq[:, of h]`` over
    ``context @ wk[:, of h]`` with values ``context @ wv[:, of h]``. A layer is sizes and no
    arrays; its parameters are a dict that `init` makes, every call takes, and `vjp` gives the
    gradient of.

    Parameters
    ----------
    embed_dim : int
        Width of `x` and of the result.
    heads : int
    kv_heads : int, default `heads`
        Divides `heads`: query heads share key/value heads as in `cufa.attention`.
    head_dim : int, default ``embed_dim / heads``
    context_dim : int, default `embed_dim`
        Width of what keys and values are made of. If it is another than `embed_dim`, every call
        needs a `context`.
    projection_bias : bool, default False
        Whether each of the four projections adds a vector of parameters.
    rotary : bool, default False
        Whether queries and keys are turned by their positions (RoFormer). Element i of a head is
        paired with ``i + head_dim / 2``, as in Llama's weights, and at position n turned by
        ``n * rotary_base**(-2 * i / head_dim)``. Needs an even `head_dim`.
    rotary_base : float, default 10000.0

    Attributes
    ----------
    shapes : dict of tuples
        Shapes of the parameters: ``wq`` (embed_dim, heads * head_dim), ``wk`` and ``wv``
        (context_dim, kv_heads * head_dim), ``wo`` (heads * head_dim, embed_dim); with
        `projection_bias`, after each matrix, ``bq``, ``bk``, ``bv`` and ``bo``, as long as it is
        wide.

    Raises
    ------
    ArgumentError, DTypeError
        A size that is no integer of at least 1, or sizes that do not fit together.

    Notes
    -----
    Products are `matmul` of the arrays' library: BLAS, or cuBLAS, of float16 and bfloat16 with sums
    in float32 that are rounded once. Heads are views of the products, split and joined without a
    copy. float16, bfloat16, float32 and float64; parameters and inputs of one dtype, on one device.

    Sources: Vaswani et al., arXiv:1706.03762, section 3.2.2; Su et al., arXiv:2104.09864 (rotary).

    Examples
    --------
    >>> import numpy as np, cufa
    >>> layer = cufa.MultiHeadAttention(64, heads=4, kv_heads=2, rotary=True)
    >>> params = layer.init(np.random.default_rng(0))
    >>> x = np.random.default_rng(1).standard_normal((2, 100, 64), dtype=np.float32)
    >>> y, vjp = layer.vjp(params, x, causal=True)
    >>> dparams, dx, *_ = vjp(np.ones_like(y))
    >>> dparams["wk"].shape, dx.shape
    ((64, 32), (2, 100, 64))
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        projection_bias: bool = False,
        rotary: bool = False,
        rotary_base: float = 10000.0,
    ) -> None:
        self.embed_dim = plain_integer("embed_dim", embed_dim, 1)
        self.heads = plain_integer("heads", heads, 1)
        self.kv_heads = plain_integer("kv_heads", heads if kv_heads is None else kv_heads, 1)
        self.context_dim = plain_integer(
            "context_dim", embed_dim if context_dim is None else context_dim, 1
        )
        check_heads(self.embed_dim, self.heads, self.kv_heads, head_dim)
        self.head_dim = plain_integer(
            "head_dim", self.embed_dim // self.heads if head_dim is None else head_dim, 1
        )
        self.projection_bias = bool(plain_choice("projection_bias", projection_bias, _BOOL))
        self.rotary = bool(plain_choice("rotary", rotary, _BOOL))
        self.rotary_base = plain_number("rotary_base", rotary_base)
        if self.rotary:
            check_rotary(self.head_dim, self.rotary_base)
        wide, kv_wide = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "q": (self.embed_dim, wide),
            "k": (self.context_dim, kv_wide),
            "v": (self.context_dim, kv_wide),
            "o": (wide, self.embed_dim),
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in matrices.items():
            self.shapes[f"w{name}"] = shape
            if self.projection_bias:
                self.shapes[f"b{name}"] = shape[1:]

    def __repr__(self) -> str:
        facts = ", ".join(f"{n}={value!r}" for n, value in vars(self).items() if n != "shapes")
        return f"MultiHeadAttention({facts})"

    def init(self, rng: Any, dtype: Any = "float32", xp: Any = np) -> dict[str, Any]:
        """Parameters to start training from.

        Parameters
        ----------
        rng : numpy.random.Generator, or a seed for one
            The same numbers are drawn for NumPy and CuPy.
        dtype : dtype, default float32
        xp : module, default numpy
            numpy or cupy.

        Returns
        -------
        dict of arrays
            Matrices of normal numbers with variance 1 / (rows of the matrix), so that a product
            is as large as its input; vectors of zeros. In the order of `shapes`.

        Raises
        ------
        ArgumentError, DTypeError
            No generator or seed, a dtype that layers do not take, another library.
        """
        check_library(xp)
        rng, dtype = plain_generator(rng), numpy_dtype(plain_dtype("dtype", dtype))
        params = {}
        for name, shape in self.shapes.items():
            drawn = rng.normal(0, shape[0] ** -0.5, shape) if len(shape) > 1 else np.zeros(shape)
            params[name] = xp.asarray(drawn.astype(dtype))
        return params

    def __call__(
        self, params: Params, x: Any, context: Any = None, *, offset: int = 0, **options: Any
    ) -> Any:
        """The layer's result, without gradients.

        Parameters
        ----------
        params : dict of arrays
            Of `shapes`.
        x : array, shape (batch, seqlen, embed_dim) or (seqlen, embed_dim)
        context : array, shape (batch, seqlen_k, context_dim), default None
            What keys and values are made of (cross-attention); None: `x`. Without batch if `x` is.
        offset : int, default 0
            Rotary position of the first row of `x`. Rows of a `context` count from 0, so that
            ``layer(params, x[:, n:], x, offset=n, causal=True)`` is ``layer(params, x,
            causal=True)[:, n:]``. Positions are below 2**53.
        **options
            Those of `cufa.attention`: causal, window, mask, bias, dropout_p, ..., but not `layout`,
            `return_lse` and `out`.

        Returns
        -------
        y : array, shape and dtype of `x`

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
            What is given does not fit together; the message names it. Nothing has been computed
            then, but where a GPU has no kernel for the attention, or "standard" no memory.
        BuildError
            On a GPU, cuBLAS is missing.
        TypeError
            Attention has no such option.
        """
        self.check_call(params, x, context, offset, options)
        q, k, v = self._project(params, x, context, offset)
        return self.join(params, attention(q, k, v, layout="bshd", **options))

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
        recompute : bool, default False
            Whether queries, keys and values are dropped and computed again in the backward pass
            from `x` and `context`. What attention returned is kept, so that it is not run again.
        deterministic : bool, default False
            As in `cufa.attention_backward`.

        Returns
        -------
        y : array, shape and dtype of `x`
        vjp : callable
            ``vjp(dy)`` gives the `LayerGradients` ``(dparams, dx, dcontext, dbias, dsink)``; it can
            be called many times. It holds on to `params`, `x`, `context` and the options, which
            must stay as they are until its last call, to attention's out and lse and, without
            `recompute`, to queries, keys and values.

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError, TypeError, UnsupportedError
            As a call of the layer, and what can be known of the backward pass beforehand.
        """
        plain_choice("recompute", recompute, _BOOL)
        plain_choice("deterministic", deterministic, _BOOL)
        call = self.check_call(params, x, context, offset, options, return_lse=True)
        check_algorithm(call.algorithm)
        offset = plain_integer("offset", offset, 0)
        options = plain_options(options) | {"layout": "bshd", "deterministic": deterministic}
        # No name for q, k and v: what holds on to them is `pull`, or nothing.
        (out, lse), pull = attention_vjp(
            *self._project(params, x, context, offset), return_lse=True, **options
        )
        if recompute:

            def pull(dout: Any) -> Gradients:
                q, k, v = self._project(params, x, context, offset)
                return attention_backward(dout, q, k, v, out, lse, **options)

        def vjp(dy: Any) -> LayerGradients:
            of_join, dout = self.join_backward(dy, params, out)
            dq, dk, dv, dbias, dsink = pull(dout)
            of_heads, dx, dcontext = self.project_backward(
                dq, dk, dv, params, x, context, offset=offset
            )
            found = {**of_heads, **of_join}
            dparams = {name: found[name] for name in params}  # as loops over both expect
            return LayerGradients(dparams, dx, dcontext, dbias, dsink)

        return self.join(params, out), vjp

    def project(
        self, params: Params, x: Any, context: Any = None, *, offset: int = 0
    ) -> tuple[Any, Any, Any]:
        """Queries, keys and values: the layer up to attention.

        With `join` it makes a layer of another attention, over a cache of keys say: the layer is
        ``join(params, cufa.attention(*project(params, x), layout="bshd"))``.

        Returns
        -------
        q : array, shape (batch, seqlen, heads, head_dim)
        k, v : array, shape (batch, seqlen_k, kv_heads, head_dim)
            Layout "bshd"; without batch if `x` is. Rotary positions are in `q` and `k`.

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError
        """
        check_inputs(self.shapes, params, x, context, offset)
        return self._project(params, x, context, offset)

    def _project(self, params: Params, x: Any, context: Any, offset: int) -> tuple[Any, Any, Any]:
        """`project`, of what has been checked."""
        source = x if context is None else context
        q = self._heads(params, "q", x, self.heads)
        k = self._heads(params, "k", source, self.kv_heads)
        v = self._heads(params, "v", source, self.kv_heads)
        if self.rotary:
            of_q, of_k = self._turns(x, context, offset)
            q, k = rotate(q, of_q), rotate(k, of_k)
        return q, k, v

    def project_backward(
        self,
        dq: Any,
        dk: Any,
        dv: Any,
        params: Params,
        x: Any,
        context: Any = None,
        *,
        offset: int = 0,
    ) -> tuple[dict[str, Any], Any, Any]:
        """Gradients of a loss by the inputs of `project`, from those by its results.

        Returns
        -------
        dparams : dict of arrays
            Of the parameters of `project`.
        dx : array, shape of `x`
        dcontext : array, shape of `context`; None without one

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError
        """
        source = check_inputs(self.shapes, params, x, context, offset)
        check_belongs("dq", dq, (*x.shape[:-1], self.heads, self.head_dim), "x", x)
        for name, a in (("dk", dk), ("dv", dv)):
            check_belongs(name, a, (*source.shape[:-1], self.kv_heads, self.head_dim), "x", x)
        if self.rotary:
            of_q, of_k = self._turns(x, context, offset)
            dq, dk = rotate(dq, of_q.back()), rotate(dk, of_k.back())
        dq, dk, dv = _joined(dq), _joined(dk), _joined(dv)
        wq, wk, wv = params["wq"], params["wk"], params["wv"]
        dparams = {
            **self._of_parameters("q", x, dq),
            **self._of_parameters("k", source, dk),
            **self._of_parameters("v", source, dv),
        }
        if context is None:
            return dparams, input_gradient((dq, dk, dv), (wq, wk, wv)), None
        return dparams, input_gradient((dq,), (wq,)), input_gradient((dk, dv), (wk, wv))

    def join(self, params: Params, out: Any) -> Any:
        """The heads' outputs side by side, times ``wo``: the layer from attention on.

        Parameters
        ----------
        params : dict of arrays
        out : array, shape (batch, seqlen, heads, head_dim) or (seqlen, heads, head_dim)

        Returns
        -------
        y : array, shape (batch, seqlen, embed_dim)

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError
        """
        self._check_out(params, out)
        return linear(_joined(out), params["wo"], params.get("bo"))

    def join_backward(self, dy: Any, params: Params, out: Any) -> tuple[dict[str, Any], Any]:
        """Gradients of a loss by the inputs of `join`, from those by its result.

        Returns
        -------
        dparams : dict of arrays
            Of the parameters of `join`.
        dout : array, shape of `out`

        Raises
        ------
        ArgumentError, DeviceError, DTypeError, ShapeError
        """
        self._check_out(params, out)
        check_belongs("dy", dy, (*out.shape[:-2], self.embed_dim), "out", out)
        dparams = self._of_parameters("o", _joined(out), dy)
        return dparams, input_gradient((dy,), (params["wo"],)).reshape(out.shape)

    def _heads(self, params: Params, name: str, source: Any, heads: int) -> Any:
        """A projection, split into heads: (..., seqlen, heads, head_dim), a view of the product."""
        product = linear(source, params[f"w{name}"], params.get(f"b{name}"))
        return product.reshape(*source.shape[:-1], heads, self.head_dim)

    def _of_parameters(self, name: str, source: Any, dy: Any) -> dict[str, Any]:
        """Gradients by the parameters of a projection of `source`."""
        found = {f"w{name}": weight_gradient(dy, source)}
        if self.projection_bias:
            found[f"b{name}"] = bias_gradient(dy)
        return found

    def _turns(self, x: Any, context: Any, offset: int) -> tuple[Turns, Turns]:
        """Of queries and of keys."""
        of_q = turns(x, x.shape[-2], self.head_dim, self.rotary_base, offset)
        if context is None:
            return of_q, of_q
        return of_q, turns(x, context.shape[-2], self.head_dim, self.rotary_base, 0)

    def check_call(
        self,
        params: Params,
        x: Any,
        context: Any,
        offset: Any,
        options: dict[str, Any],
        return_lse: bool = False,
    ) -> Signature:
        """Raise what any step of a call would, before the first."""
        check_options(options)
        source = check_inputs(self.shapes, params, x, context, offset)
        of_q = (*x.shape[:-1], self.heads, self.head_dim)
        of_kv = (*source.shape[:-1], self.kv_heads, self.head_dim)
        return check_attention(x, of_q, of_kv, return_lse, **options)

    def _check_out(self, params: Params, out: Any) -> None:
        check_float("out", describe("out", out))
        if out.ndim not in (3, 4) or out.shape[-2:] != (self.heads, self.head_dim):
            raise ShapeError(
                f"out has shape {out.shape}; it must be (batch, seqlen, {self.heads}, "
                f"{self.head_dim}), or without batch"
            )
        check_params(params, self.shapes, "out", out)


def _joined(a: Any) -> Any:
    """The heads of each row side by side, (..., heads * head_dim); a view if `a` is contiguous."""
    return a.reshape(*a.shape[:-2], a.shape[-2] * a.shape[-1])
