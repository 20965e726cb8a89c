"""Where attention can be computed on this machine, and which kernel does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, are_aligned, sign
from cufa.gpu.device import Device
from cufa.gpu.registry import select
from cufa.gpu.survey import find_cards, import_cupy
from cufa.problem import make_problem

CPU_KERNEL = "cpu"


class Backend(NamedTuple):
    """NumPy, or CuPy on its current device."""

    xp: Any
    #: None: the CPU.
    device: Device | None

    def kernel(self, q: Any, k: Any, v: Any, **options: Any) -> str:
        """Name of the kernel that serves such a call; "cpu" in NumPy.

        The arrays are NumPy's, with the strides and the alignment that those on the device have.

        Raises
        ------
        UnsupportedError
            There is none.
        """
        if self.device is None:
            return CPU_KERNEL
        arrays = Arrays(*(_with_contiguous_rows(a) for a in (q, k, v)), **_arrays_among(options))
        call = sign(arrays, **{**_DEFAULTS, **_plain_among(options)})
        return select(make_problem(call._replace(aligned=are_aligned(arrays))), self.device).name


def find_backends() -> list[Backend]:
    """NumPy, and CuPy if there is a card."""
    backends = [Backend(np, None)]
    if cards := find_cards():
        cupy: Any = import_cupy()
        backends.append(Backend(cupy, cards[cupy.cuda.Device().id].device))
    return backends


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


def _with_contiguous_rows(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the GPU's launcher makes of an input before it chooses the kernel."""
    contiguous = a.shape[-1] == 1 or a.size == 0 or a.strides[-1] == a.itemsize
    return a if contiguous else np.ascontiguousarray(a)
