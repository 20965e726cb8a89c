"""Calls of `attention_backward` as facts: the checks, and what is to be computed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cufa.arrays import Arrays, describe
from cufa.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from cufa.options import dtype_name
from cufa.problem import ArrayFacts, Problem, Signature, check_float, make_problem, place_of

#: What a gradient can be taken of, in the order of `Gradients`.
NAMES = ("q", "k", "v", "bias", "sink")


class Gradients(NamedTuple):
    """The derivative of a loss by each input: its shape and dtype, contiguous; None if not wanted.

    What is None: the gradient of a `bias` or `sink` that was not given, and of what `wrt` leaves
    out.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None


class Saved(NamedTuple):
    """What a backward pass takes beside the arrays of the forward pass, as the caller gave it."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any = None


class BackwardSignature(NamedTuple):
    """One call of `attention_backward` as facts and options."""

    forward: Signature
    dout: ArrayFacts
    out: ArrayFacts
    lse: ArrayFacts
    dlse: ArrayFacts | None
    #: Those of `NAMES` whose gradient is wanted.
    wrt: tuple[str, ...]
    deterministic: bool


def plain_wrt(wrt: Any, arrays: Arrays) -> tuple[str, ...]:
    """Whose gradients are wanted: those named, else of all that were given.

    Raises
    ------
    ArgumentError
        A name that has no gradient, or one of an array that was not given.
    """
    given = tuple(name for name in NAMES if getattr(arrays, name) is not None)
    if wrt is None:
        return given
    names = (wrt,) if isinstance(wrt, str) else wrt
    if not (isinstance(names, (tuple, list)) and names and all(n in NAMES for n in names)):
        raise ArgumentError(
            f"wrt is {wrt!r}; it must be a sequence of {', '.join(map(repr, NAMES))} (mask and "
            "alibi_slopes are constants), or None for all that are given"
        )
    for name in names:
        if name not in given:
            raise ArgumentError(f"wrt asks for the gradient of {name}, and no {name} is given")
    return tuple(name for name in NAMES if name in names)


def sign_backward(
    forward: Signature, saved: Saved, wrt: tuple[str, ...], deterministic: bool
) -> BackwardSignature:
    """The call as hashable facts."""
    return BackwardSignature(
        forward,
        describe("dout", saved.dout),
        describe("out", saved.out),
        describe("lse", saved.lse),
        None if saved.dlse is None else describe("dlse", saved.dlse),
        wrt,
        deterministic,
    )


@lru_cache(maxsize=4096)
def make_backward(call: BackwardSignature) -> Problem:
    """Check a call and give the problem whose gradients it asks for.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
    """
    problem = make_problem(call.forward)
    q = call.forward.q
    given = {"dout": call.dout, "out": call.out, "lse": call.lse, "dlse": call.dlse}
    for name, facts in given.items():
        if facts is None:
            continue
        if facts.device != q.device:
            raise DeviceError(
                f"q is on {place_of(q.device)} and {name} is on {place_of(facts.device)}; all "
                "arrays must be on one device (cupy.asarray and cupy.asnumpy move them)"
            )
        check_float(name, facts)
        of_rows = name.endswith("lse")
        shape = problem.lse_shape if of_rows else problem.out_shape
        if facts.shape != shape:
            raise ShapeError(
                f"{name} has shape {facts.shape}; for q of shape {q.shape}, v of shape "
                f"{call.forward.v.shape} and layout {call.forward.layout!r} it must be {shape}"
            )
        dtype = problem.accumulator if of_rows else problem.dtype
        if dtype_name(facts.dtype) != dtype:
            raise DTypeError(
                f"{name} is {dtype_name(facts.dtype)}; for q of {problem.dtype} it must be {dtype}"
                + (", as attention returns it" if name in ("out", "lse") else "")
            )
    return problem
