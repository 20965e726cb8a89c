"""The kernels that exist, in order of preference, and what each can do."""

from __future__ import annotations

from dataclasses import dataclass

from cufa.errors import UnsupportedError
from cufa.gpu.device import Device
from cufa.gpu.tensor_map import STRIDE_LIMIT
from cufa.gradients import BackwardProblem
from cufa.options import FLOAT_DTYPES, ITEMSIZE
from cufa.problem import Operand, Problem

#: tile/copy_async.cuh: a few rows together stay below 2**31.
_MAX_ROW_STRIDE = 1 << 24


@dataclass(frozen=True)
class KernelSpec:
    """Some of what one `.cu` file serves.

    `name` is the file's and the function's name; `min_arch` the oldest architecture; `aligned` asks
    for rows of q, k, v and out that start at multiples of 16 bytes, and, without `tma`, are not too
    far apart.

    A kernel of `one_arch` has instructions of `min_arch` alone, and is compiled for no other. One
    with `tma` loads q, k and v by tensor maps, and asks for strides that these can have. One that
    is `persistent` fills the card with blocks once, and each takes query tiles as they come, by
    tickets. One with `mask_tiles` wants to know first what a mask leaves of each tile, which
    ``mask_tiles.cu`` finds.
    """

    name: str
    algorithm: str
    dtypes: tuple[str, ...]
    max_head_dim: int
    min_arch: int
    aligned: bool
    one_arch: bool = False
    tma: bool = False
    persistent: bool = False
    mask_tiles: bool = False

    def refusal(self, problem: Problem, device: Device) -> str | None:
        """Why this kernel does not serve a problem; None if it does."""
        if problem.algorithm not in ("auto", self.algorithm):
            return f"is algorithm {self.algorithm!r}"
        limit = self.limit(problem.dtype, max(problem.head_dim, problem.head_dim_v), device)
        if limit is not None:
            return limit
        if self.aligned and not problem.aligned:
            return "needs rows of q, k, v and out that start at multiples of 16 bytes"
        operands = {"q": problem.q, "k": problem.k, "v": problem.v}
        mask = problem.mask if self.mask_tiles else None
        if mask is not None and mask.strides[3] == 0 and problem.seqlen_k > 1:
            return "takes no mask that is repeated along the keys"
        if self.tma:
            faults = (_fault_for_tma(name, a) for name, a in operands.items())
            return next((f"loads by TMA, {fault}" for fault in faults if fault), None)
        if self.aligned and any(abs(a.strides[2]) >= _MAX_ROW_STRIDE for a in operands.values()):
            return f"needs rows of q, k and v less than {_MAX_ROW_STRIDE} elements apart"
        return None

    def limit(self, dtype: str, head_dim: int, device: Device) -> str | None:
        """What this dtype, head dim or card exceeds, whatever else is asked; None if nothing."""
        if self.one_arch and device.arch != self.min_arch:
            return f"needs sm_{self.min_arch}, whose own instructions it has"
        if device.arch < self.min_arch:
            return f"needs sm_{self.min_arch} or later"
        if dtype not in self.dtypes:
            return f"takes {' or '.join(self.dtypes)}"
        if head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}"
        return None


def _fault_for_tma(name: str, a: Operand) -> str | None:
    """What of an operand no tensor map can describe; None if nothing."""
    if 0 in a.shape:
        return f"which takes no array without elements, as {name} is"
    steps = [s for s, n in zip(a.strides[:3], a.shape[:3], strict=True) if n > 1]
    if min(steps, default=1) < 0:
        return f"which takes no negative stride, as {name} has"
    if 0 in steps:
        return f"which takes no stride of 0, as {name} has where it repeats along an axis"
    if max(steps, default=0) * ITEMSIZE[a.dtype] >= STRIDE_LIMIT:
        return f"which takes strides below 2**40 bytes, and {name} has a longer one"
    return None


_16_BITS, _WIDER, _UP_TO_FLOAT = FLOAT_DTYPES[:2], FLOAT_DTYPES[2:], FLOAT_DTYPES[:3]

# fmt: off
KERNELS = (
    #          name            algorithm  dtypes      dim<= arch>= aligned one_arch tma   persistent
    KernelSpec("fa3_fwd_sm90", "fa3",     _16_BITS,     256,    90, True,   True,    True, True,
               mask_tiles=True),
    KernelSpec("fa2_fwd",      "fa2",     _16_BITS,     256,    80, True),
    KernelSpec("fa2_fwd",      "fa2",     _WIDER,       128,    80, True),
    KernelSpec("fa2_fwd_simt", "fa2",     FLOAT_DTYPES, 256,    70, False),
    KernelSpec("fa1_fwd",      "fa1",     _16_BITS,     128,    80, True),
    KernelSpec("fa1_fwd_simt", "fa1",     _UP_TO_FLOAT, 256,    70, False),
    KernelSpec("fa1_fwd_simt", "fa1",     ("float64",), 128,    70, False),
)

#: Kernels of the backward pass, by what their blocks own: tiles of keys (dK, dV, and what these add
#: to dQ), of queries (dQ alone) or of the bias (dbias).
BACKWARD_KERNELS = {
    "keys": (
        KernelSpec("fa2_bwd",            "fa2", _16_BITS,     256, 80, True),
        KernelSpec("fa2_bwd_tf32",       "fa2", ("float32",), 224, 80, True),
        KernelSpec("fa2_bwd_simt",       "fa2", FLOAT_DTYPES, 256, 70, False),
    ),
    "queries": (
        KernelSpec("fa2_bwd_dq",         "fa2", _16_BITS,     256, 80, True),
        KernelSpec("fa2_bwd_dq_simt",    "fa2", FLOAT_DTYPES, 256, 70, False),
    ),
    "bias": (
        KernelSpec("fa2_bwd_dbias_simt", "fa2", FLOAT_DTYPES, 256, 70, False),
    ),
}
# fmt: on

#: The kernels' names, in the same order; a kernel may have several rows.
KERNEL_NAMES = tuple(dict.fromkeys(spec.name for spec in KERNELS))
#: Of the backward pass, all parts; the first ones own keys.
BACKWARD_SPECS = tuple(spec for specs in BACKWARD_KERNELS.values() for spec in specs)
BACKWARD_KERNEL_NAMES = tuple(dict.fromkeys(spec.name for spec in BACKWARD_SPECS))


def target(kernel: str, arch: int) -> str:
    """What a kernel is compiled for on an architecture, such as "sm_80" or "sm_90a"."""
    alone = any(spec.one_arch for spec in (*KERNELS, *BACKWARD_SPECS) if spec.name == kernel)
    return f"sm_{arch}a" if alone else f"sm_{arch}"


def select_for(
    dtype: str,
    head_dim: int,
    device: Device,
    kernel: str | None = None,
    direction: str = "forward",
) -> KernelSpec:
    """The first kernel that serves aligned arrays of a dtype and head dim, whatever else is asked.

    Parameters
    ----------
    dtype : str
    head_dim : int
        The larger of head_dim and head_dim_v.
    device : Device
    kernel : str, default any
        The one kernel that may.
    direction : {"forward", "backward"}, default "forward"
        Backward: of the kernels whose blocks own keys, unless one is named.

    Raises
    ------
    UnsupportedError
        None does; the message gives each kernel's limit.
    """
    limits = []
    for spec in KERNELS if direction == "forward" else BACKWARD_SPECS:
        if kernel not in (None, spec.name):
            continue
        limit = spec.limit(dtype, head_dim, device)
        if limit is None:
            return spec
        limits.append(f"{spec.name} {limit}")
    raise UnsupportedError("; ".join(limits))


def select(problem: Problem, device: Device) -> KernelSpec:
    """The first kernel that serves a problem.

    Raises
    ------
    UnsupportedError
        None does; the message gives each kernel's reason.
    """
    return first(KERNELS, "forward", problem, device)


def select_backward(part: str, problem: BackwardProblem, device: Device) -> KernelSpec:
    """The first kernel that serves a part of a backward pass, a key of `BACKWARD_KERNELS`.

    Raises
    ------
    UnsupportedError
        None does; the message gives each kernel's reason.
    """
    specs = BACKWARD_KERNELS[part]
    if abs(problem.dout.strides[2]) >= _MAX_ROW_STRIDE:
        specs = tuple(spec for spec in specs if not spec.aligned)
    return first(specs, "backward", problem.forward, device)


def first(
    specs: tuple[KernelSpec, ...], direction: str, problem: Problem, device: Device
) -> KernelSpec:
    """The first of some kernels that serves a problem.

    Raises
    ------
    UnsupportedError
        None does; the message gives each kernel's reason.
    """
    refusals = []
    for spec in specs:
        reason = spec.refusal(problem, device)
        if reason is None:
            return spec
        refusals.append(f"  {spec.name} {reason}")
    head_dim = problem.head_dim
    if problem.head_dim_v != head_dim:
        head_dim_text = f"head_dim {head_dim}, head_dim_v {problem.head_dim_v}"
    else:
        head_dim_text = f"head_dim {head_dim}"
    raise UnsupportedError(
        f"no {direction} kernel for {problem.dtype}, {head_dim_text} on {device.name}:\n"
        + "\n".join(refusals)
        + "\nNumPy inputs run on the CPU backend, which has none of these limits."
    )
