"""What the numbers of one attention looked like: ranges, what is not finite, error in float64.

>>> from cufa import numerics
>>> out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
>>> print(numerics.report(q, k, v, out=out, lse=lse, causal=True))

NaN and infinity are counted in whole arrays, all else is computed for a random sample of query
rows: both where the arrays are, so that of CuPy's only the sampled rows' results come to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cufa import interop
from cufa.arrays import CPU, Arrays, describe, is_foreign, namespace, parts_of, sign
from cufa.errors import DeviceError, DTypeError, ShapeError
from cufa.options import dtype_name, plain_integer, shown
from cufa.problem import Causal, Problem, Window, make_problem
from cufa.rows import Row, exact_rows

Array = NDArray[np.float64]
#: Elements whose NaN are counted at once: 16 MB in float32.
_COUNTED = 1 << 22


@dataclass(frozen=True)
class Range:
    """The least and the largest of some finite numbers; NaN if there are none."""

    least: float
    largest: float

    @property
    def magnitude(self) -> float:
        """The largest absolute value."""
        return max(abs(self.least), abs(self.largest))


@dataclass(frozen=True)
class Counts:
    """Elements of a whole array that are not finite."""

    nan: int
    inf: int
    minus_inf: int


@dataclass(frozen=True)
class Error:
    """The largest differences from float64 in the sampled rows; infinite where NaN is amiss."""

    absolute: float
    #: To the largest exact value of the row.
    relative: float
    #: To what rounding excuses, see `cufa.bounds.exact`. Above 1 something is wrong.
    of_bound: float
    #: Batch, head and query where `of_bound` is largest.
    at: Row


@dataclass(frozen=True)
class Report:
    """What `report` found; ranges and errors are those of the sampled rows."""

    #: (batch, heads, seqlen_q, seqlen_k).
    shape: tuple[int, int, int, int]
    dtype: str
    #: How many rows were sampled.
    rows: int
    #: Of the softmax's arguments: scaled, capped, with ALiBi and bias; of visible keys only.
    scores: Range
    #: Of the exact lse.
    lse: Range
    #: ``exp(entropy)`` of a row's weights: 1 if one key has all weight, n for n equal keys.
    effective_keys: Range
    #: Rows that see no key.
    rows_without_keys: int
    #: By name, of q, k and v, and of out and lse if they were given.
    not_finite: dict[str, Counts]
    #: None if `out` was not given.
    out_error: Error | None
    #: None if `lse` was not given.
    lse_error: Error | None

    @property
    def within_rounding(self) -> bool:
        """Whether rounding explains the errors that were measured."""
        return all(e is None or e.of_bound <= 1 for e in (self.out_error, self.lse_error))

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, tuples and dictionaries, for a log."""
        return asdict(self)

    def __str__(self) -> str:
        total = math.prod(self.shape[:3])
        lines = [
            f"attention of {self.dtype}, (batch, heads, seqlen_q, seqlen_k) = {self.shape}",
            f"  {self.rows} of {total} rows, in float64:",
            f"    scores             {_text(self.scores)}",
            f"    lse                {_text(self.lse)}",
            f"    effective keys     {_text(self.effective_keys)}",
            f"    rows without keys  {self.rows_without_keys}",
        ]
        for name, error in (("out", self.out_error), ("lse", self.lse_error)):
            if error is not None:
                lines.append(
                    f"    error of {name}       {error.absolute:.2g} absolute, "
                    f"{error.relative:.2g} relative, {error.of_bound:.2g} of what rounding excuses"
                )
                if error.of_bound > 1:
                    lines.append(f"      WRONG, worst at (batch, head, query) = {error.at}")
        bad = {name: count for name, count in self.not_finite.items() if any(astuple(count))}
        lines.append(
            f"  not finite, in whole {', '.join(self.not_finite)}:{'' if bad else ' none'}"
        )
        lines += [
            f"    {name:<18} {count.nan} NaN, {count.inf} inf, {count.minus_inf} -inf"
            for name, count in bad.items()
        ]
        return "\n".join(lines)


def _text(span: Range) -> str:
    return f"{span.least:.4g} to {span.largest:.4g}"


def report(
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any = None,
    lse: Any = None,
    causal: Causal = False,
    window: Window = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    rows: int = 64,
    seed: int = 0,
) -> Report:
    """Look at the numbers of one call of `cufa.attention`, and at its result if given.

    Parameters
    ----------
    q, k, v, causal, window, mask, bias, alibi_slopes, softcap, sink, scale, layout
        As in `cufa.attention`; arrays of other libraries too.
    out : array, shape (batch, heads, seqlen_q, head_dim_v) in `layout`, default None
        What attention returned, or another implementation: its error is measured.
    lse : array, shape (batch, heads, seqlen_q), default None
        The same for lse.
    rows : int, default 64
        How many query rows to compute in float64, drawn without replacement from all batches and
        heads, each with the same chance.
    seed : int, default 0
        The same seed draws the same rows.

    Returns
    -------
    Report

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
        As `cufa.attention`; an `out` or `lse` of another shape, dtype or device than it returns.

    Notes
    -----
    Time is O(rows * seqlen_k * (head_dim + head_dim_v)), a row reading the keys that `causal` and
    `window` leave, and one reading of every array; memory is a few copies of one head's keys and
    values in float64. On a GPU, the call waits for the result.
    """
    rows, seed = plain_integer("rows", rows, 1), plain_integer("seed", seed, 0)
    arrays = Arrays(q, k, v, mask, bias, alibi_slopes, sink)
    named = arrays._asdict() | {"out": out, "lse": lse}
    if any(map(is_foreign, named.values())):
        on_own = partial(
            report,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            layout=layout,
            rows=rows,
            seed=seed,
        )
        of_foreign: Report = interop.lend(on_own, named, writes=None)
        return of_foreign
    call = sign(arrays, causal, window, softcap, scale, layout, False, "auto")
    problem, device = make_problem(call), call.q.device
    _check_result("out", out, problem.out_shape, problem.dtype, device)
    _check_result("lse", lse, problem.lse_shape, problem.accumulator, device)

    xp = namespace(q)
    with nullcontext() if device == CPU else xp.cuda.Device(device):
        looked_at = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        not_finite = {name: _counts(xp, a) for name, a in looked_at.items() if a is not None}
        sample = _sample(problem, rows, seed)
        found = exact_rows(xp, problem, arrays._replace(out=out), lse, layout, sample)
        lse_of = (a[:, None] for a in (found.given_lse, found.lse, found.lse_bound))
        out_of = found.given_out, found.out, found.out_bound
        return Report(
            shape=(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k),
            dtype=problem.dtype,
            rows=len(sample),
            scores=_range(np.concatenate([found.score_min, found.score_max])),
            lse=_range(found.lse),
            effective_keys=_range(found.effective_keys),
            rows_without_keys=int((found.seen == 0).sum()),
            not_finite=not_finite,
            out_error=None if out is None or not sample else _error(sample, *out_of),
            lse_error=None if lse is None or not sample else _error(sample, *lse_of),
        )


class Monitor:
    """Reports on every n-th call only: for a long job, one for each layer that is to be watched.

    Call it like `report`, once each step. A call that does not report adds one to a number.

    Parameters
    ----------
    every : int, default 100
        The first call reports, then every so many calls.
    callback : function, default None
        Gets the number of the call, from 0, and the `Report`. None prints both.
    rows : int, default 64
        As in `report`. Each report draws other rows.

    Raises
    ------
    ArgumentError, DTypeError
        `every` or `rows` is no integer, or below 1; `callback` is no function.

    Examples
    --------
    >>> watch = numerics.Monitor(every=1000, callback=lambda step, r: log.append(r.as_dict()))
    >>> for q, k, v in batches:
    ...     out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    ...     watch(q, k, v, out=out, lse=lse, causal=True)
    """

    def __init__(
        self,
        every: int = 100,
        callback: Callable[[int, Report], object] | None = None,
        *,
        rows: int = 64,
    ) -> None:
        self.every = plain_integer("every", every, 1)
        self.rows = plain_integer("rows", rows, 1)
        if not (callback is None or callable(callback)):
            raise DTypeError(
                f"callback is {shown(callback)}, a {type(callback).__name__}; it must be a "
                "function of the call's number and its Report, or None"
            )
        self._callback = _print if callback is None else callback
        #: Calls so far.
        self.calls = 0

    def __call__(self, q: Any, k: Any, v: Any, **arguments: Any) -> Report | None:
        """The report if one was due; the arguments are those of `report`."""
        step = self.calls
        self.calls += 1
        if step % self.every:
            return None
        found = report(q, k, v, rows=self.rows, seed=step, **arguments)
        self._callback(step, found)
        return found


def _print(step: int, found: Report) -> None:
    print(f"call {step}: {found}")


def _check_result(name: str, a: Any, shape: tuple[int, ...], dtype: str, device: int) -> None:
    if a is None:
        return
    facts = describe(name, a)
    if facts.device != device:
        raise DeviceError(f"{name} is not on the device of q; move it with cupy.asarray or asnumpy")
    if facts.shape != shape:
        raise ShapeError(f"{name} has shape {facts.shape}; for these inputs it must be {shape}")
    if dtype_name(facts.dtype) != dtype:
        raise DTypeError(
            f"{name} is {dtype_name(facts.dtype)}; for these inputs it must be {dtype}, as "
            "attention returns it"
        )


def _counts(xp: Any, a: Any) -> Counts:
    """Counted in parts, so that no copy of the whole is made."""
    total = xp.zeros(3, "int64")
    for part in parts_of(a, _COUNTED):
        if part.dtype.itemsize == 2:
            part = part.astype("float32")
        tests = (xp.isnan(part), part == np.inf, part == -np.inf)
        total += xp.stack([test.sum() for test in tests])
    return Counts(*map(int, total))


def _sample(problem: Problem, rows: int, seed: int) -> list[Row]:
    """Distinct rows, each with the same chance, in order."""
    shape = (problem.batch, problem.heads, problem.seqlen_q)
    total = math.prod(shape)
    chosen = np.random.default_rng(seed).choice(total, min(rows, total), replace=False)
    axes = np.unravel_index(np.sort(chosen), shape) if total else ([], [], [])
    return [(int(b), int(h), int(i)) for b, h, i in zip(*axes, strict=True)]


def _range(values: Array) -> Range:
    values = values[np.isfinite(values)]
    return Range(float(values.min()), float(values.max())) if values.size else Range(np.nan, np.nan)


def _error(sample: list[Row], given: Array, want: Array, bound: Array) -> Error:
    """Of arrays with an axis of rows and one of elements."""
    same = (given == want) | (np.isnan(given) & np.isnan(want))
    largest = np.where(np.isfinite(want), abs(want), 0).max(1, keepdims=True)
    with np.errstate(all="ignore"):
        apart = np.where(same, 0, abs(given - want))
        apart = np.where(np.isnan(apart), np.inf, apart)
        relative, of_bound = (np.where(same, 0, apart / size) for size in (largest, bound))
    of_bound = np.where(np.isnan(of_bound), np.inf, of_bound)
    worst = int(of_bound.max(1).argmax())
    return Error(float(apart.max()), float(relative.max()), float(of_bound.max()), sample[worst])
