"""Looks for a problem that attention solves wrongly, and makes it as small as it can.

Hypothesis draws the problems and shrinks; nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.strategies import booleans, just, sampled_from

import cufa
from cufa.bounds import Error, exact, worst_error
from cufa.errors import ArgumentError, UnsupportedError
from cufa.gradient_bounds import worst_gradient_error
from cufa.options import ALGORITHMS
from cufa.testing import (
    CONTIGUOUS,
    FLOATS,
    Case,
    assert_gradients_within_rounding,
    assert_within_rounding,
    cases,
    memories,
)
from cufa.tools.backends import Backend
from cufa.tools.workloads import DIRECTIONS

Attention = Callable[..., tuple[Any, Any]]
#: Runs a case in a library of arrays, and says how far the answer is off; raises if it is wrong.
Check = Callable[[Any], Error]
#: Of dropout: seldom, as it takes the time of all the rest.
_RATES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.5, 0.9)
#: Inputs whose gradients are not wanted: often none, or so many that one kernel is left.
_CONSTANTS: tuple[tuple[str, ...], ...] = (
    *[()] * 4,
    ("q",),
    ("k",),
    ("v",),
    ("k", "v"),
    ("bias",),
    ("sink",),
    ("q", "bias", "sink"),
    ("k", "v", "bias", "sink"),
    ("q", "k", "v"),
    ("q", "k", "v", "sink"),
    ("q", "k", "v", "bias"),
)
#: Algorithms that serve whatever is drawn, and its gradients, on any device.
_EVERYWHERE = ("auto", "fa2")
#: Of a search that only time limits.
UNLIMITED = 1 << 40


class Failure(NamedTuple):
    """A problem whose answer was wrong or none."""

    case: Case
    backend: Backend
    #: What the call launched, or was to launch.
    kernels: tuple[str, ...]
    #: "forward" or "backward": whether attention itself was wrong, or its gradients.
    direction: str
    error: Exception
    #: Why the problem may be larger than it need be, or may pass when tried again; None: it cannot.
    doubt: str | None = None


class Observer(Protocol):
    """Is told how a search goes."""

    def right(self, kernels: Sequence[str], dtype: str, error: Error) -> None:
        """A call by these kernels was right; not told any more after the first that was wrong."""

    def wrong(self) -> None:
        """A call was wrong, the first or one of those that shrink it."""


@dataclass(frozen=True)
class Wish:
    """What to draw and when to stop."""

    seed: int
    max_examples: int = UNLIMITED
    #: From the start of the search; shrinking takes as long as it takes.
    seconds: float | None = None
    dtypes: Sequence[str] = FLOATS
    algorithms: Sequence[str] = ALGORITHMS
    #: Kernels to hold, in calls that launch others beside; None: all.
    kernels: Collection[str] | None = None
    #: One of `DIRECTIONS`.
    direction: str = DIRECTIONS[-1]
    #: Draw any head dims and features for a GPU too, where most then need a kernel of their own.
    wide: bool = False


def search(
    backends: Sequence[Backend],
    wish: Wish,
    observer: Observer,
    attention: Attention = cufa.attention,
    attention_vjp: Attention = cufa.attention_vjp,
) -> Failure | None:
    """Draw problems and hold each to the oracle on every backend, until one fails.

    Parameters
    ----------
    backends : sequence of Backend
    wish : Wish
    observer : Observer
    attention, attention_vjp : callable
        What is to be held in the place of cufa's.

    Returns
    -------
    Failure or None
        The smallest problem found that fails.

    Raises
    ------
    ArgumentError
        None of the problems drawn is for a kernel wished for.
    """
    trial = _Trial(attention, attention_vjp, backends, wish, observer)

    drawn = cases(
        dtypes=wish.dtypes,
        algorithm=sampled_from(wish.algorithms),
        dropout_p=sampled_from(_RATES),
        dout_memory=just(CONTIGUOUS) | memories(),
        constants=sampled_from(_CONSTANTS),
        deterministic=booleans(),
    )

    @hypothesis.seed(wish.seed)
    @hypothesis.settings(
        max_examples=wish.max_examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),
    )
    @hypothesis.given(case=drawn)
    def hold(case: Case) -> None:
        trial(case)

    try:
        hold()
    except _Stop:
        pass
    except Unsatisfiable:
        kernels = f"kernel is {', '.join(sorted(wish.kernels))}; " if wish.kernels else ""
        raise ArgumentError(
            f"{kernels}nothing here serves any problem of {', '.join(wish.dtypes)} by "
            f"{', '.join(wish.algorithms)} that was drawn: allow others, or more examples"
        ) from None
    except Flaky:
        trial.doubt("it does not fail every time")
    except Exception:
        if trial.failure is None:  # not of attention: the oracle's, or the strategy's
            raise
    return trial.failure


class _Stop(BaseException):
    """Ends a search at once; hypothesis lets it through."""


class _Trial:
    """Holds one case after another, and remembers the last that failed."""

    def __init__(
        self,
        attention: Attention,
        attention_vjp: Attention,
        backends: Sequence[Backend],
        wish: Wish,
        observer: Observer,
    ) -> None:
        self.failure: Failure | None = None
        self._attention, self._attention_vjp = attention, attention_vjp
        self._backends, self._wish, self._observer = backends, wish, observer
        self._end = None if wish.seconds is None else time.monotonic() + wish.seconds
        self._bend = not wish.wide and any(backend.device for backend in backends)
        makers = {"forward": self._forward, "backward": self._backward}
        self._makers = {n: m for n, m in makers.items() if wish.direction in (n, "both")}

    def __call__(self, case: Case) -> None:
        if self.failure is None and self._end is not None and time.monotonic() > self._end:
            raise _Stop
        case = case.few_kernels() if self._bend else case
        any_held = False
        for direction, make in self._makers.items():
            arrays, options = _arguments(case, direction)
            kernels = [(b, _kernels(b, direction, arrays, options)) for b in self._backends]
            held = [(b, names, asked) for b, names in kernels if (asked := self._asked(names))]
            any_held |= bool(held)
            check = make(case) if held else None
            for backend, names, asked in held:
                assert check is not None
                error = self._hold(case, backend, names, direction, check)
                if self.failure is None:
                    self._observer.right(asked, case.dtype, error)
        hypothesis.assume(any_held)

    def _asked(self, kernels: Sequence[str]) -> list[str]:
        """Those of a call that are wished for."""
        wanted = self._wish.kernels
        return [name for name in kernels if wanted is None or name in wanted]

    def _forward(self, case: Case) -> Check:
        expected = exact(*case.arrays(np), **case.options(np))

        def check(xp: Any) -> Error:
            result = self._attention(*case.arrays(xp), return_lse=True, **case.options(xp))
            assert_within_rounding(result, expected)
            return worst_error(result, expected)

        return check

    def _backward(self, case: Case) -> Check:
        expected = case.exact_gradients()

        def check(xp: Any) -> Error:
            options = {**case.options(xp), **case.backward_options()}
            _, vjp = self._attention_vjp(*case.arrays(xp), **options)
            result = vjp(*case.back(xp))
            assert_gradients_within_rounding(result, expected)
            return worst_gradient_error(result, expected)

        return check

    def _hold(
        self, case: Case, backend: Backend, kernels: Sequence[str], direction: str, check: Check
    ) -> Error:
        try:
            return check(backend.xp)
        except Exception as error:
            self.failure = Failure(case, backend, tuple(kernels), direction, error)
            self._observer.wrong()
            if _breaks_the_device(error):
                self.doubt(
                    "the driver reports it and may take no more work, so it was not made small"
                )
                raise _Stop from None
            raise

    def doubt(self, reason: str) -> None:
        """Say what the failure lacks."""
        assert self.failure is not None
        self.failure = self.failure._replace(doubt=reason)


def _arguments(case: Case, direction: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of `Backend.kernels` or `Backend.backward_kernels`."""
    arrays, options = case.arrays(np), case.options(np)
    if direction == "forward":
        return arrays, options
    return (*case.back(np), *arrays), options | case.backward_options()


def _kernels(
    backend: Backend, direction: str, arrays: Sequence[Any], options: dict[str, Any]
) -> tuple[str, ...]:
    """What a call launches; nothing if its algorithm is not there, or has no gradients."""
    asked = backend.kernels if direction == "forward" else backend.backward_kernels
    try:
        return asked(*arrays, **options)
    except UnsupportedError:
        if options.get("algorithm", "auto") in _EVERYWHERE:
            raise
        return ()


def _breaks_the_device(error: Exception) -> bool:
    """Whether CUDA reports it: after an illegal address, for one, it refuses whatever follows."""
    return type(error).__module__.startswith("cupy_backends.cuda")
