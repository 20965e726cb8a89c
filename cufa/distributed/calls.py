"""The arguments of a call that several ranks make together: the checks, and what they add up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cufa.arrays import Arrays, is_cupy, namespace, sign
from cufa.attention import attention
from cufa.distributed.communicator import Communicator, Facts
from cufa.distributed.sequence import SPLITS, Chunk, chunks_of
from cufa.errors import DeviceError, UnsupportedError
from cufa.gradients import Saved, check_algorithm, make_backward, sign_backward
from cufa.long import alibi
from cufa.options import dtype_name, plain_choice, shown
from cufa.problem import ArrayFacts, Problem, Signature, make_problem

#: Options of `cufa.attention` that `sign` takes, and that all ranks must give alike.
_OPTIONS = ("causal", "window", "softcap", "scale", "layout", "algorithm")


class Call(NamedTuple):
    """A call as each rank knows it once all have agreed."""

    #: What this rank was given.
    signature: Signature
    #: Of this rank's rows, and of the whole sequence.
    own: Problem
    whole: Problem
    #: Of each rank, where its queries and its keys belong in the whole sequence.
    queries: tuple[tuple[Chunk, ...], ...]
    keys: tuple[tuple[Chunk, ...], ...]

    @property
    def layout(self) -> str:
        return self.signature.layout

    def options(self, *names: str) -> dict[str, Any]:
        """Plain options of `attention`: softcap, scale, algorithm, and those named."""
        return {n: getattr(self.signature, n) for n in ("softcap", "scale", "algorithm", *names)}


def agree_on(
    comm: Communicator,
    name: str,
    arrays: Arrays,
    options: Mapping[str, Any],
    split: Any,
    others: Mapping[str, Any],
    saved: Saved | None = None,
    deterministic: Any = False,
) -> Call:
    """Check the arguments on every rank, and that they fit together.

    `options` are those of `sign`, `others` what the caller gave beyond what the call takes, `saved`
    and `deterministic` those of a backward pass.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, RankError, ShapeError, TypeError, UnsupportedError
        On every rank, if it is so on one.
    """
    signed: list[Signature] = []

    def find() -> Facts:
        _refuse(name, others)
        call = sign(arrays, **options)
        check_library(comm, "q", arrays.q)
        make_problem(call)
        if saved is not None:
            check_algorithm(call.algorithm)
            plain_choice("deterministic", deterministic, (False, True))
            make_backward(sign_backward(call, saved, ("q",), False))
        signed.append(call)
        dlse = None if saved is None or saved.dlse is None else "an array"
        return _facts(call, plain_choice("split", split, SPLITS), dlse)

    lengths = comm.agree(name, find)
    call = signed[0]
    seqlens_q, seqlens_k = ([facts[which] for facts in lengths] for which in ("q", "k"))
    whole = call._replace(
        q=_lengthened(call.q, sum(seqlens_q), call.layout),
        k=_lengthened(call.k, sum(seqlens_k), call.layout),
        v=_lengthened(call.v, sum(seqlens_k), call.layout),
    )
    problem = make_problem(whole)
    alibi.check(problem)
    return Call(
        signature=call,
        own=make_problem(call),
        whole=problem,
        queries=chunks_of(split, seqlens_q, "q"),
        keys=chunks_of(split, seqlens_k, "k"),
    )


def check_library(comm: Communicator, name: str, a: Any) -> None:
    """Raise unless the communicator carries arrays of this one's library.

    Raises
    ------
    DeviceError
    """
    library = "cupy" if is_cupy(a) else "numpy"
    if library != comm.library:
        raise DeviceError(
            f"{name} is an array of {library}; this communicator carries those of {comm.library}"
        )


def options_of(
    causal: Any, window: Any, softcap: Any, scale: Any, layout: Any, algorithm: Any
) -> dict[str, Any]:
    """The options of a call, as `sign` takes them."""
    values = (causal, window, softcap, scale, layout, algorithm)
    return {**dict(zip(_OPTIONS, values, strict=True)), "return_lse": True}


def rows_in(chunks: tuple[Chunk, ...]) -> int:
    """Rows of a rank."""
    return sum(chunk.length for chunk in chunks)


def axis_of(layout: str, ndim: int) -> int:
    """The axis of the sequence, from the end."""
    return -3 if layout == "bshd" and ndim > 2 else -2


def by_heads(a: Any, layout: str) -> Any:
    """A view with the axes (..., heads, seqlen, columns), of which the heads are there always."""
    if a.ndim == 2:
        return a[None]
    return a.swapaxes(-2, -3) if layout == "bshd" else a


def as_given(a: Any, like: Any, layout: str) -> Any:
    """`by_heads` backwards: contiguous, with the axes of `like`."""
    if like.ndim == 2:
        a = a[0]
    elif layout == "bshd":
        a = a.swapaxes(-2, -3)
    return namespace(a).ascontiguousarray(a)


def _refuse(name: str, others: Mapping[str, Any]) -> None:
    for option, value in others.items():
        if option not in (attention.__kwdefaults__ or {}):
            raise TypeError(f"{name} has no option {option}")
        if value is not None:
            raise UnsupportedError(
                f"{option} is {shown(value)}; {name} has no {option}, which cufa.attention has"
            )


def _facts(call: Signature, split: str, dlse: str | None) -> Facts:
    problem = make_problem(call)
    sizes = ("batch", "heads", "kv_heads", "head_dim", "head_dim_v")
    options = {option: getattr(call, option) for option in _OPTIONS}
    options |= {"window": call.window and list(call.window)}  # as JSON gives it back
    sink = None if call.sink is None else dtype_name(call.sink.dtype)
    slopes = None if call.alibi_slopes is None else list(call.alibi_slopes.shape)
    return Facts(
        sizes={"number of axes": len(call.q.shape), **{n: getattr(problem, n) for n in sizes}}
        | {"shape of alibi_slopes": slopes},
        dtypes={"dtype of q": problem.dtype, "dtype of sink": sink},
        options={**options, "split": split, "dlse": dlse},
        own={"q": problem.seqlen_q, "k": problem.seqlen_k},
    )


def _lengthened(a: ArrayFacts, seqlen: int, layout: str) -> ArrayFacts:
    """Of the array of all ranks' rows, that nobody holds."""
    shape = list(a.shape)
    shape[axis_of(layout, len(shape))] = seqlen
    return a._replace(shape=tuple(shape), strides=(0,) * len(shape))
