"""What the tools measure on: NumPy on the host, or CuPy on a card."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.errors import DeviceError
from cufa.tools.timing import Clock, HostClock, host_extra_bytes

BACKENDS = ("cupy", "numpy")


@dataclass(frozen=True)
class Rig:
    """A library of arrays with its clock.

    Parameters
    ----------
    backend : {"cupy", "numpy"}
    xp : module
    clock : Clock
    extra_bytes : callable
        Runs a call of cufa and returns the most memory that it held, less its result.
    facts : dict
        What a report says of the machine.
    cache_bytes : int, default 0
        Inputs are rotated until they exceed this cache twice.
    stream : callable
        Makes the context that all work is to be in; the work is done when it is left.
    release : callable
        Gives freed memory back, so that other libraries find it.
    finish : callable
        Returns when all work is done.
    """

    backend: str
    xp: Any
    clock: Clock
    extra_bytes: Callable[[Callable[[], Any]], int]
    facts: dict[str, Any]
    cache_bytes: int = 0
    stream: Callable[[], AbstractContextManager[Any]] = nullcontext
    release: Callable[[], Any] = lambda: None
    finish: Callable[[], Any] = lambda: None


def make_rig(backend: str | None = None, sustained: float = 0.0) -> Rig:
    """The rig of a backend; by default the card if there is one. `sustained` is its clock's.

    Raises
    ------
    DeviceError
        CuPy is asked for, and finds no card.
    """
    why = None if backend == "numpy" else obstacle()
    if backend == "cupy" and why:
        raise DeviceError(
            f"backend is 'cupy', and there is no GPU to run on ({why}); "
            "'numpy' measures the CPU backend"
        )
    if backend == "numpy" or why:
        facts = {
            "processor": platform.processor() or platform.machine(),
            "processors": os.cpu_count(),
            "NumPy": np.__version__,
        }
        return Rig("numpy", np, HostClock(sustained), host_extra_bytes, facts)
    from cufa.tools import card

    stream = card.new_stream()
    with stream:
        clock = card.CudaClock(sustained)
    return Rig(
        "cupy",
        card.xp,
        clock,
        card.extra_bytes,
        card.facts(),
        cache_bytes=card.l2_bytes(),
        stream=lambda: card.working_in(stream),
        release=card.release,
        finish=card.finish,
    )


def obstacle() -> str | None:
    """Why CuPy cannot be used; None if it can."""
    try:
        from cufa.tools import card

        card.facts()
    except Exception as error:  # no CuPy, no driver, no card: each has an error of its own
        return str(error) or type(error).__name__
    return None
