"""Where attention can be computed on this machine, and which kernel does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, sign
from cufa.cpu import ALGORITHMS as CPU_ALGORITHMS
from cufa.errors import BuildError, UnsupportedError
from cufa.gpu import cublas
from cufa.gpu.device import Device
from cufa.gpu.launch import after_conversions, conversions_of
from cufa.gpu.registry import BACKWARD_KERNELS, first, select
from cufa.gpu.survey import find_cards, import_cupy
from cufa.gradients import check_algorithm
from cufa.problem import Problem, make_problem

CPU_KERNEL, CPU_BACKWARD = "cpu", "cpu_backward"
#: No kernel, but named where kernels are: on NumPy and on CuPy.
STANDARD = "standard"


class Backend(NamedTuple):
    """NumPy, or CuPy on its current device."""

    xp: Any
    #: None: the CPU.
    device: Device | None
    #: Why `STANDARD` cannot run here; None if it can.
    no_standard: str | None = None

    def kernel(self, q: Any, k: Any, v: Any, **options: Any) -> str:
        """Name of the kernel that serves such a call; "cpu" in NumPy, "standard" for that.

        The arrays are NumPy's, with the strides and the alignment that those on the device have.

        Raises
        ------
        UnsupportedError
            There is none.
        """
        algorithm = options.get("algorithm", "auto")
        if algorithm == "standard":
            if self.no_standard:
                raise UnsupportedError(self.no_standard)
            return STANDARD
        if self.device is None:
            if algorithm not in CPU_ALGORITHMS:
                raise UnsupportedError(f"algorithm is {algorithm!r}, which has GPU kernels only")
            return CPU_KERNEL
        return select(_problem(q, k, v, options), self.device).name

    def backward_kernel(self, q: Any, k: Any, v: Any, **options: Any) -> str:
        """The same of the kernel that computes most of the gradients of such a call.

        Raises
        ------
        UnsupportedError
            There is none.
        """
        check_algorithm(options.get("algorithm", "auto"))
        if self.device is None:
            return CPU_BACKWARD
        kernels = BACKWARD_KERNELS["keys"]
        return first(kernels, "backward", _problem(q, k, v, options), self.device).name


def find_backends() -> list[Backend]:
    """NumPy, and CuPy if there is a card."""
    backends = [Backend(np, None)]
    if cards := find_cards():
        cupy: Any = import_cupy()
        device = cards[cupy.cuda.Device().id].device
        backends.append(Backend(cupy, device, _missing_cublas()))
    return backends


def _missing_cublas() -> str | None:
    try:
        cublas.load()
    except BuildError as error:
        return str(error)
    return None


def _problem(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Problem:
    """That a call comes down to once its arrays are copied, as far as they must be."""
    arrays = Arrays(q, k, v, **_arrays_among(options))
    call = sign(arrays, **{**_DEFAULTS, **_plain_among(options)})
    conversions = conversions_of(make_problem(call))
    return make_problem(after_conversions(call, arrays, conversions))


_DEFAULTS = {
    "causal": False,
    "window": None,
    "softcap": None,
    "scale": None,
    "layout": "bhsd",
    "return_lse": True,
    "algorithm": "auto",
}


def _arrays_among(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in Arrays._fields}


def _plain_among(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in Arrays._fields}
