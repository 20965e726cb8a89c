"""Where attention can be computed on this machine, and which kernels do it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Arrays, address_of, are_aligned, sign
from cufa.case import place
from cufa.cpu import ALGORITHMS as CPU_ALGORITHMS
from cufa.errors import BuildError, UnsupportedError
from cufa.gpu import cublas
from cufa.gpu.backward_plan import PLAIN_TILES
from cufa.gpu.config import MASK_TILES
from cufa.gpu.device import Device
from cufa.gpu.launch import backward_launches_of, launches_of
from cufa.gpu.plan import KernelKey
from cufa.gpu.survey import find_cards, import_cupy
from cufa.gradients import Saved, check_algorithm, plain_wrt, sign_backward
from cufa.problem import Signature, make_problem

CPU_KERNEL, CPU_BACKWARD = "cpu", "cpu_backward"
#: No kernel, but named where kernels are: on NumPy and on CuPy.
STANDARD = "standard"
#: Where a call launches nothing, as its results are empty.
NO_KERNEL = "no kernel"
#: Kernels that see no scores, launched before and after others, by these ones' algorithm.
AROUND = {MASK_TILES: "fa3", **dict.fromkeys(PLAIN_TILES, "fa2")}


class Backend(NamedTuple):
    """NumPy, or CuPy on its current device."""

    xp: Any
    #: None: the CPU.
    device: Device | None
    #: Why `STANDARD` cannot run here; None if it can.
    no_standard: str | None = None

    def kernels(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[str, ...]:
        """Names of the kernels that such a call launches, in order; "cpu" in NumPy, "standard" for
        that.

        The arrays are NumPy's, with the strides and the alignment that those on the device have.

        Raises
        ------
        UnsupportedError
            There are none.
        """
        algorithm = options.get("algorithm", "auto")
        if algorithm == "standard":
            if self.no_standard:
                raise UnsupportedError(self.no_standard)
            return (STANDARD,)
        if self.device is None:
            if algorithm not in CPU_ALGORITHMS:
                raise UnsupportedError(f"algorithm is {algorithm!r}, which has GPU kernels only")
            return (CPU_KERNEL,)
        call, arrays = _signed(q, k, v, options)
        return _names(launches_of(_KernelNames(self.device), call, arrays))

    def backward_kernels(
        self,
        dout: Any,
        dlse: Any,
        q: Any,
        k: Any,
        v: Any,
        *,
        wrt: Any = None,
        deterministic: bool = False,
        **options: Any,
    ) -> tuple[str, ...]:
        """The same of gradients by `cufa.attention_vjp`, whose output and lse are as it makes them.

        Raises
        ------
        UnsupportedError
            There are none.
        """
        check_algorithm(options.get("algorithm", "auto"))
        if self.device is None:
            return (CPU_BACKWARD,)
        forward, arrays = _signed(q, k, v, options)
        problem = make_problem(forward)
        out = _as_allocated(problem.out_shape, q.dtype)
        lse = _as_allocated(problem.lse_shape, np.dtype(problem.accumulator))
        saved = Saved(dout, out, lse, dlse)
        call = sign_backward(forward, saved, plain_wrt(wrt, arrays), deterministic)
        call = call._replace(aligned=address_of(dout) % 16 == 0)
        return _names(backward_launches_of(_KernelNames(self.device), call, arrays, saved))


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


class _KernelNames(NamedTuple):
    """Kernels by name alone, for one card."""

    card: Device

    def device(self, ordinal: int) -> Device:
        return self.card

    def kernel(self, key: KernelKey, ordinal: int) -> str:
        return key.kernel


def _names(launches: tuple[tuple[Any, Any], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in launches) or (NO_KERNEL,)


def _signed(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Signature, Arrays]:
    """A call as that on the device is; on the CPU alignment counts for nothing."""
    arrays = Arrays(q, k, v, **_arrays_among(options))
    call = sign(arrays, **{**_DEFAULTS, **_plain_among(options)})
    return call._replace(aligned=are_aligned(arrays)), arrays


def _as_allocated(shape: tuple[int, ...], dtype: Any) -> Any:
    """A contiguous array that starts where CuPy's do, at a multiple of 16 bytes."""
    elements = np.zeros((1, 1, 1, int(np.prod(shape))), dtype)
    return place(np, elements).array.reshape(shape)


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
