"""Calls of `attention_backward` as facts: the checks, and what is to be computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from cufa.arrays import Arrays, Facts, array_facts, facts_of
from cufa.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from cufa.options import dtype_name, shown
from cufa.problem import (
    ArrayFacts,
    Operand,
    Problem,
    Shape,
    Signature,
    check_float,
    contiguous_operand,
    make_problem,
    operand_of,
    place_of,
    rows_aligned,
)

#: What a gradient can be taken of, in the order of `Gradients`.
NAMES = ("q", "k", "v", "bias", "sink")
#: Those that have a backward pass.
ALGORITHMS = ("auto", "fa2")


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
    #: dout and out start at multiples of 16 bytes; True on the CPU.
    aligned: bool
    #: Of the sink as the caller gave it, which kernels take in another.
    sink_dtype: str | None


@dataclass(frozen=True)
class BackwardProblem:
    """The gradients of attention as kernels see them, on the axes of `Problem`.

    `forward` is the call that they belong to; its `out` is the saved one, and its rows are
    `aligned` only if those of `dout` and of the results are too.
    """

    forward: Problem
    dout: Operand
    lse: Operand
    dlse: Operand | None
    #: Contiguous in the caller's layout.
    dq: Operand
    dk: Operand
    dv: Operand
    #: Of the gradient of the bias, contiguous; 0 along axes that the bias is repeated along. Then:
    #: whether it has any element.
    dbias_strides: Shape
    has_dbias: bool
    dbias_dtype: str | None
    dsink_dtype: str | None
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
    if not (
        isinstance(names, (tuple, list))
        and names
        and all(isinstance(name, str) and name in NAMES for name in names)
    ):
        raise ArgumentError(
            f"wrt is {shown(wrt)}; it must be a sequence of {', '.join(map(repr, NAMES))} (mask "
            "and alibi_slopes are constants), or None for all that are given"
        )
    for name in names:
        if name not in given:
            raise ArgumentError(f"wrt asks for the gradient of {name}, and no {name} is given")
    return tuple(name for name in NAMES if name in names)


def sign_backward(
    forward: Signature, saved: Saved, wrt: tuple[str, ...], deterministic: bool
) -> BackwardSignature:
    """The call as hashable facts."""
    return _backward_signature(
        forward,
        facts_of("dout", saved.dout),
        facts_of("out", saved.out),
        facts_of("lse", saved.lse),
        None if saved.dlse is None else facts_of("dlse", saved.dlse),
        wrt,
        deterministic,
    )


@lru_cache(maxsize=4096)
def _backward_signature(
    forward: Signature,
    dout: Facts,
    out: Facts,
    lse: Facts,
    dlse: Facts | None,
    wrt: tuple[str, ...],
    deterministic: bool,
) -> BackwardSignature:
    return BackwardSignature(
        forward,
        array_facts(dout),
        array_facts(out),
        array_facts(lse),
        None if dlse is None else array_facts(dlse),
        wrt,
        deterministic,
        dout[-1] and out[-1],
        None if forward.sink is None else dtype_name(forward.sink.dtype),
    )


def check_algorithm(algorithm: str) -> None:
    """Raise if there is no backward pass of that name."""
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"algorithm is {algorithm!r}, which has no gradients; pass 'auto' or 'fa2'"
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


@lru_cache(maxsize=4096)
def make_backward_problem(call: BackwardSignature) -> BackwardProblem:
    """Check a call, as `make_backward` does, and give its meaning for kernels.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
    """
    forward, given = make_backward(call), call.forward
    check_algorithm(forward.algorithm)
    layout, dtype = given.layout, forward.dtype
    dout, out = (operand_of(n, getattr(call, n), layout) for n in ("dout", "out"))
    dq, dk, dv = (contiguous_operand(a.shape, layout, dtype) for a in (given.q, given.k, given.v))
    aligned = forward.aligned and call.aligned
    return BackwardProblem(
        forward=replace(
            forward,
            out=out,
            aligned=aligned and all(map(rows_aligned, (dout, out, dq, dk, dv))),
        ),
        dout=dout,
        lse=operand_of("lse", call.lse, "bhsd"),
        dlse=None if call.dlse is None else operand_of("dlse", call.dlse, "bhsd"),
        dq=dq,
        dk=dk,
        dv=dv,
        dbias_strides=(0,) * 4 if given.bias is None else _packed_strides(given.bias.shape),
        has_dbias=given.bias is not None and 0 not in given.bias.shape,
        dbias_dtype=None if given.bias is None else dtype_name(given.bias.dtype),
        dsink_dtype=call.sink_dtype,
        wrt=call.wrt,
        deterministic=call.deterministic,
    )


def _packed_strides(shape: Shape) -> Shape:
    """Strides in elements of a contiguous array of four axes; 0 along those of one element."""
    strides, step = [], 1
    for n in reversed((1,) * (4 - len(shape)) + shape):
        strides.append(step if n > 1 else 0)
        step *= n
    return tuple(reversed(strides))
