"""One call of `cufa.LongSequenceAttention`: its checks, its arrays, and where it is computed."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from cufa.arrays import (
    CPU,
    Arrays,
    describe,
    four_axes,
    host_empty,
    namespace,
    share_elements,
    sign,
)
from cufa.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from cufa.long import alibi
from cufa.long.plan import Sizes
from cufa.long.saved_blocks import SavedBlocks, digest
from cufa.long.sweep import InPlace, Stage
from cufa.options import plain_integer, plain_probability, shown
from cufa.problem import Problem, Signature, check_apart, make_problem, place_of

#: Of a signature, what tells one problem from another beside shapes and dtypes.
_OPTIONS = ("causal", "window", "softcap", "scale", "layout")


def plain_block_size(block_size: Any) -> tuple[int, int]:
    """Query rows and keys of a block, as plain integers."""
    if isinstance(block_size, (tuple, list)):
        if len(block_size) != 2:
            raise ArgumentError(
                f"block_size is {shown(block_size)}; it must be one number, or two: of query rows "
                "and of keys"
            )
        rows, keys = block_size
    else:
        rows = keys = block_size
    return plain_integer("block_size", rows, 1), plain_integer("block_size", keys, 1)


def checked(
    given: Arrays,
    dropout_p: Any,
    *,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    layout: Any,
    return_lse: Any = True,
) -> tuple[Signature, Problem]:
    """A call as facts, and its meaning.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
    """
    if plain_probability("dropout_p", dropout_p):
        raise UnsupportedError(
            f"dropout_p is {dropout_p}; LongSequenceAttention has no dropout, since each of its "
            "calls counts queries and keys from 0"
        )
    call = sign(given, causal, window, softcap, scale, layout, return_lse, "auto")
    problem = make_problem(call)
    alibi.check(problem)
    return call, problem


def check_writeable(name: str, a: Any) -> None:
    flags = getattr(a, "flags", None)
    if not getattr(flags, "writeable", True):  # CuPy's arrays have no such flag
        raise ArgumentError(f"{name} is read-only; pass an array that can be written")


def check_target(name: str, target: Any, like: Any, others: dict[str, Any]) -> None:
    """Raise if a gradient of `like` cannot go to `target`, which is none of the `others`.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
    """
    facts, wanted = describe(name, target), describe(name, like)
    if facts.device != wanted.device:
        raise DeviceError(
            f"q is on {place_of(wanted.device)} and {name} is on {place_of(facts.device)}; all "
            "arrays must be in one place"
        )
    if facts.shape != wanted.shape:
        raise ShapeError(f"{name} has shape {facts.shape}; it must be {wanted.shape}")
    if facts.dtype != wanted.dtype:
        raise DTypeError(f"{name} is {facts.dtype}; it must be {wanted.dtype}")
    check_apart(name, facts)
    check_writeable(name, target)
    for other, a in others.items():
        if a is not None and share_elements(target, a):
            raise ArgumentError(f"{name} shares memory with {other}; pass an array of its own")


def views_of(problem: Problem, given: Arrays, layout: str) -> dict[str, Any]:
    """The inputs by name: axes (batch, heads, seqlen, ...), ALiBi slopes (batch, heads), sink
    (heads,); None for what was not given."""
    xp = namespace(given.q)
    of_heads = (problem.batch, problem.heads)
    shapes = {
        "mask": (*of_heads, problem.seqlen_q, problem.seqlen_k),
        "bias": (*of_heads, problem.seqlen_q, problem.seqlen_k),
        "alibi_slopes": of_heads,
        "sink": of_heads[1:],
    }
    found: dict[str, Any] = {n: four_axes(getattr(given, n), layout) for n in ("q", "k", "v")}
    for name, shape in shapes.items():
        a = getattr(given, name)
        found[name] = None if a is None else xp.broadcast_to(a, shape)
    return found


def by_row(lse: Any) -> Any:
    """A view of an array of the shape of lse, axes (batch, heads, seqlen)."""
    return lse[(None,) * (3 - lse.ndim)]


class Place:
    """Where the arrays of a call are, and where to compute.

    Raises
    ------
    DeviceError
        `device` is where they cannot be computed.
    """

    def __init__(self, call: Signature, q: Any, device: str) -> None:
        self._on_card, self._q = call.q.device != CPU, q
        if self._on_card and device == "cpu":
            raise DeviceError(
                f"device is 'cpu' and q is on {place_of(call.q.device)}; cupy.asnumpy moves it"
            )
        self._streaming = None if self._on_card or device == "cpu" else _streaming()
        if device == "gpu" and not (self._on_card or self._streaming):
            raise DeviceError("device is 'gpu' and CuPy finds none; 'auto' would take the CPU")

    @property
    def name(self) -> str:
        """Where it is computed."""
        return "gpu" if self._on_card or self._streaming else "cpu"

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device of the arrays CuPy's current one."""
        return self._q.device if self._on_card else nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Room for a result, beside the arrays."""
        return namespace(self._q).empty(shape, dtype) if self._on_card else host_empty(shape, dtype)

    def stage(self) -> Stage:
        """For one sweep."""
        if self._streaming is None:
            return InPlace(namespace(self._q))
        stage: Stage = self._streaming.Streamed()
        return stage


@cache
def _streaming() -> Any:
    """`cufa.gpu.streaming`, which imports CuPy; None if there is no card."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where there is no driver
        try:
            from cufa.gpu import streaming
        except (ImportError, AttributeError):  # the latter where ml_dtypes is missing
            return None
    return streaming if streaming.count_cards() else None


def saved_blocks(
    folder: Any,
    what: str,
    place: Place,
    call: Signature,
    sizes: Sizes,
    inputs: dict[str, Any],
) -> SavedBlocks | None:
    """The blocks of a call that are finished already; None without a folder."""
    if folder is None:
        return None
    inputs = {name: a for name, a in inputs.items() if a is not None}
    identity: dict[str, Any] = {
        "computed": what,
        "on": place.name,
        **{f"shape of {name}": a.shape for name, a in inputs.items()},
        **{f"dtype of {name}": a.dtype.name for name, a in inputs.items()},
        **{name: getattr(call, name) for name in _OPTIONS},
        "block sizes (heads, queries, keys)": sizes,
        "digest of inputs": digest(inputs),
    }
    return SavedBlocks(folder, identity)
