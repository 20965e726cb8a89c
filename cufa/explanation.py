"""`cufa.explain`: which kernel would serve a call of `attention`, and why not another."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from cufa import cpu, interop
from cufa.arrays import CPU, Arrays, ForeignArray, check_overlap, sign
from cufa.attention import attention
from cufa.errors import UnsupportedError
from cufa.gpu.config import Config
from cufa.gpu.device import OLDEST_ARCH, Device, get_device
from cufa.gpu.launch import after_conversions, conversions_of
from cufa.gpu.plan import make_plan
from cufa.gpu.registry import KERNEL_NAMES, KERNELS
from cufa.options import plain_integer
from cufa.problem import Problem, Signature, make_problem


class Refusal(NamedTuple):
    """A kernel that cannot serve a call, and why, as the end of a sentence about it."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What would serve a call of `attention`; `str` puts it in words.

    Parameters
    ----------
    backend : {"cpu", "gpu"}
    device : str
        The card, or the architecture that was asked about; "the CPU".
    kernel : str or None
        A kernel of the GPU, "cpu" for the NumPy backend, or "standard". One that only looks at the
        mask beforehand is not named. None: nothing runs, since the result is empty, or there is a
        refusal for every kernel.
    algorithm : str or None
        The kernel's.
    config : Config or None
        The tile that a kernel of the GPU works with.
    copied : tuple of str
        Arguments that are copied before the kernel starts: their rows are not contiguous, or they
        are slopes or sinks of another dtype than the sums.
    refusals : tuple of (kernel, reason)
        Kernels that cannot serve the call, in order of preference.
    """

    backend: str
    device: str
    kernel: str | None = None
    algorithm: str | None = None
    config: Config | None = None
    copied: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        if self.kernel is not None:
            lines = [f"{self.kernel} serves this call on {self.device}: {self.algorithm}"]
        elif self.refusals:
            lines = [f"nothing serves this call on {self.device}"]
        else:
            lines = [f"nothing runs on {self.device}: the result is empty"]
        if self.config is not None:
            tile = ", ".join(f"{name} {n}" for name, n in self.config._asdict().items())
            lines.append(f"  tile: {tile}")
        if self.copied:
            lines.append(f"  copied first: {', '.join(self.copied)}")
        lines += [f"  {kernel} {reason}" for kernel, reason in self.refusals]
        return "\n".join(lines)


def explain(q: Any, k: Any, v: Any, *, arch: int | None = None, **options: Any) -> Explanation:
    """Which kernel would serve ``attention(q, k, v, **options)``, and why others cannot.

    Computes nothing, allocates nothing and compiles nothing.

    Parameters
    ----------
    q, k, v : array
        As `attention` takes them: their values do not matter, their shapes, strides, dtype and
        addresses do.
    arch : int, default that of the device that holds the arrays
        Compute capability times 10. Given, the answer is that of such a card for arrays in memory
        as these are, NumPy's too; no GPU is needed.
    **options
        Those of `attention`, arrays among them.

    Returns
    -------
    Explanation
        A call that no kernel serves is no error here: it has `kernel` None and all reasons.

    Raises
    ------
    ArgumentError, DeviceError, DTypeError, ShapeError
        As `attention` does.
    TypeError
        `attention` has no such option.
    UnsupportedError
        A PyTorch tensor requires grad.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q = np.zeros((8, 1024, 64), np.float16)
    >>> cufa.explain(q, q, q).kernel
    'cpu'
    >>> print(cufa.explain(q, q, q, causal=True, arch=80))
    fa2_fwd serves this call on sm_80: fa2
      tile: block_m 128, block_n 64, threads 128, stages 1, blocks_per_sm 1
      fa3_fwd_sm90 needs sm_90, whose own instructions it has
    """
    given = inspect.signature(attention).bind(q, k, v, **options)
    given.apply_defaults()
    plain = dict(given.arguments)
    arrays = Arrays(**{name: plain.pop(name) for name in Arrays._fields})
    device = None if arch is None else Device.of_arch(plain_integer("arch", arch, OLDEST_ARCH))
    call: Signature | None
    try:
        call = sign(arrays, **plain)
    except ForeignArray:
        call = None
    if call is None:
        again = partial(explain, arch=arch, **plain)
        found: Explanation = interop.lend(again, arrays._asdict(), writes=None)
        return found
    problem = make_problem(call)
    if arrays.out is not None:
        check_overlap(arrays, call)
    if device is None and call.q.device == CPU:
        return _on_cpu(problem)
    return _on_gpu(call, arrays, device or get_device(call.q.device))


def _on_cpu(problem: Problem) -> Explanation:
    asked = problem.algorithm
    place = Explanation("cpu", "the CPU")
    if asked not in cpu.ALGORITHMS:
        return replace(place, refusals=(Refusal("cpu", f"has no algorithm {asked!r}"),))
    kernel = "standard" if asked == "standard" else "cpu"
    algorithm = "fa2" if asked == "auto" else asked
    return replace(place, kernel=kernel, algorithm=algorithm)


def _on_gpu(call: Signature, arrays: Arrays, device: Device) -> Explanation:
    place = Explanation("gpu", device.name)
    if call.algorithm == "standard":
        return replace(place, kernel="standard", algorithm="standard")
    copied = conversions_of(make_problem(call))
    place = replace(place, copied=tuple(copied))
    problem = make_problem(after_conversions(call, arrays, copied))
    refusals = [r for name in KERNEL_NAMES if (r := _refusal(name, problem, device))]
    try:
        steps = make_plan(problem, device).steps
    except UnsupportedError as error:
        able = [name for name in KERNEL_NAMES if name not in dict(refusals)]
        refusals += [Refusal(name, f"cannot either: {error}") for name in able[:1]]
        return replace(place, refusals=tuple(refusals))
    if not steps:
        return place
    key = steps[-1].key
    algorithm = next(spec.algorithm for spec in KERNELS if spec.name == key.kernel)
    return replace(
        place,
        kernel=key.kernel,
        algorithm=algorithm,
        config=key.config,
        refusals=tuple(refusals),
    )


def _refusal(kernel: str, problem: Problem, device: Device) -> Refusal | None:
    """Why none of a kernel's rows serves a problem; those for its dtype say it best."""
    rows = [spec for spec in KERNELS if spec.name == kernel]
    rows = [spec for spec in rows if problem.dtype in spec.dtypes] or rows
    reasons = [spec.refusal(problem, device) for spec in rows]
    if None in reasons:
        return None
    return Refusal(kernel, "; ".join(dict.fromkeys(filter(None, reasons))))
