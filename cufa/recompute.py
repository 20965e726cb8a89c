"""`checkpoint`: memory given back for time, in functions that return ``(out, vjp)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from cufa.errors import DTypeError

Given = ParamSpec("Given")
Back = ParamSpec("Back")
Out = TypeVar("Out")
Gradients = TypeVar("Gradients")


def checkpoint(
    fn: Callable[Given, tuple[Out, Callable[Back, Gradients]]],
) -> Callable[Given, tuple[Out, Callable[Back, Gradients]]]:
    """`fn`, recomputed in the backward pass: between the two it holds on to its arguments alone.

    Parameters
    ----------
    fn : callable
        ``fn(*args, **kwargs) -> (out, vjp)``, as are `cufa.attention_vjp` and
        `cufa.MultiHeadAttention.vjp`. Called again with the same arguments it must do the same:
        random numbers come from a seed among them, as those of dropout do.

    Returns
    -------
    callable
        Of the same form and with the same results. Its `vjp` calls `fn` again, for the `vjp` of
        that call, each time that it is called; arrays among the arguments must stay as they are
        until then.

    Raises
    ------
    DTypeError
        `fn` cannot be called, or, once it has been, did not return a pair ``(out, vjp)``.

    Notes
    -----
    Attention already recomputes its scores in its backward pass, and what `fn` is here runs as a
    whole: around attention that makes three times that scores are computed. Around one
    `cufa.MultiHeadAttention` use its own ``vjp(..., recompute=True)``, which recomputes nothing
    twice; docs/training.md counts the products.

    Source: Chen et al., arXiv:1604.06174 (the recomputation of a part, section 4.1).

    Examples
    --------
    >>> import numpy as np, cufa
    >>> def square(x):
    ...     return x * x, lambda dout: 2 * x * dout
    >>> out, vjp = cufa.checkpoint(square)(np.arange(3.0))
    >>> vjp(np.ones(3))
    array([0., 2., 4.])
    """
    if not callable(fn):
        raise DTypeError(f"fn is {fn!r}; it must be a function that returns (out, vjp)")

    @wraps(fn)
    def checkpointed(
        *args: Given.args, **kwargs: Given.kwargs
    ) -> tuple[Out, Callable[Back, Gradients]]:
        out = _pair(fn(*args, **kwargs))[0]

        def vjp(*douts: Back.args, **more: Back.kwargs) -> Gradients:
            return _pair(fn(*args, **kwargs))[1](*douts, **more)

        return out, vjp

    return checkpointed


def _pair(
    returned: tuple[Out, Callable[Back, Gradients]],
) -> tuple[Out, Callable[Back, Gradients]]:
    """What `fn` returned, if it is of the form that it must be."""
    given = f"a {type(returned).__name__}"
    if isinstance(returned, tuple):
        if len(returned) == 2 and callable(returned[1]):
            return returned
        given += f" ({', '.join(type(a).__name__ for a in returned)})"
    raise DTypeError(
        f"fn returned {given}; it must return a pair (out, vjp), its result and the function that "
        "takes gradients back"
    )
