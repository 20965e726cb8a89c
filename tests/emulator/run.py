"""Runs a compiled unit once on NumPy arrays and says where in the kernel something is wrong."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator import build


class Order(IntEnum):
    """Which of the threads that can go on does; mirrored in host/block.h."""

    FIRST = 0
    LAST = 1
    RANDOM = 2


class Access(IntEnum):
    """What a kernel may do with an array; mirrored in host/launch.h."""

    READ = 0
    #: Every element is stored exactly once.
    WRITE_ONCE = 1
    #: Added to atomically, and nothing else.
    ADD = 2
    #: Scratch memory. An element belongs to the thread that first stores it: only that one touches
    #: it, and does not load before.
    THREAD_OWN = 3


class Kind(Enum):
    """Of a report; mirrored in host/report.h, which says what each means."""

    BOUNDS = 1
    RACE = 2
    UNWRITTEN = 3
    IN_FLIGHT = 4
    OUTPUT = 5
    DEADLOCK = 6
    DIVERGENCE = 7
    PROTOCOL = 8
    UNDEFINED = 9


class KernelError(Exception):
    """A kernel did what it must not."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(f"{kind.name.lower()}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Schedule:
    """In which order threads run and bulk loads land; `seed` is for RANDOM."""

    order: Order = Order.FIRST
    seed: int = 0


FIRST_COME = Schedule()


@dataclass(frozen=True)
class Counts:
    """What a run did."""

    #: Rows of a matrix that ldmatrix or stmatrix found in a busy group of banks.
    bank_conflicts: int
    #: How often each instruction was executed: once for a warp or warpgroup where it is theirs.
    executed: Mapping[str, int]


class _Array(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("rank", ctypes.c_int32),
        ("item_bytes", ctypes.c_int32),
        ("access", ctypes.c_int32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int32 * 3),
        ("threads", ctypes.c_int32),
        ("blocks_per_sm", ctypes.c_int32),
        ("shared_bytes", ctypes.c_uint32),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_int32),
        ("checked", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_int64),
        ("arrays", ctypes.c_void_p),
        ("n_arrays", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("pc", ctypes.c_void_p),
        ("bank_conflicts", ctypes.c_int64),
    ]


def run(
    library: Path,
    params: NDArray[Any],
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    arrays: Mapping[str, tuple[NDArray[Any], Access]],
    schedule: Schedule = FIRST_COME,
    checked: bool = True,
    blocks_per_sm: int = 1,
) -> Counts:
    """Run all blocks of a launch, one after another.

    Parameters
    ----------
    library : Path
        What `build.library` returned.
    params : array
        The bytes of the kernel's one argument, pointers filled in.
    grid : tuple of up to three int
    threads, shared_bytes : int
        Of a block.
    arrays : mapping from name to (array, Access)
        All that the kernel may touch, as strided views.
    schedule : Schedule
    checked : bool
        False for a unit compiled without the hooks: nothing is known of its loads and stores.
    blocks_per_sm : int
        How many share a multiprocessor's registers.

    Raises
    ------
    KernelError
        With the place in the kernel's source.
    """
    limits = {"threads": (threads, 1024), "axes of grid": (len(grid), 3)}
    for name, (given, most) in limits.items():
        if not 1 <= given <= most:
            raise ValueError(f"{name} is {given}; 1 to {most} are allowed")
    if min(grid) < 1 or max(grid[1:], default=1) > 65535:
        raise ValueError(f"grid is {grid}; at least 1, and at most 65535 in y and z, is allowed")
    unit = load(library)
    rows = (_Array * len(arrays))(*(_describe(n, a, access) for n, (a, access) in arrays.items()))
    aligned = _aligned_copy(params)
    launch = _Launch(
        (ctypes.c_int32 * 3)(*grid, *(1,) * (3 - len(grid))),
        threads,
        blocks_per_sm,
        shared_bytes,
        schedule.order,
        schedule.seed,
        checked,
        aligned.ctypes.data,
        aligned.nbytes,
        ctypes.addressof(rows),
        len(rows),
    )
    with _one_at_a_time:
        report = unit.emulate(ctypes.byref(launch)).decode()
        counts = unit.emulated_counts().decode()
    if launch.kind:
        text = re.sub(r"@(0x[0-9a-f]+)", lambda m: f"at {_line(library, int(m[1], 16))}", report)
        raise KernelError(Kind(launch.kind), f"{text}\n{_lines(library, launch.pc)}")
    lines = (line.rpartition(" ") for line in counts.splitlines())
    executed = {instruction: int(count) for instruction, _, count in lines}
    return Counts(launch.bank_conflicts, defaultdict(int, executed))


_one_at_a_time = threading.Lock()


@cache
def load(library: Path) -> ctypes.CDLL:
    """A compiled unit in this process."""
    unit = ctypes.CDLL(str(library))
    unit.emulate.restype = ctypes.c_char_p
    unit.emulated_counts.restype = ctypes.c_char_p
    return unit


def _aligned_copy(params: NDArray[Any]) -> NDArray[np.uint8]:
    """The parameters where the ABI wants them: at a multiple of 64, for tensor maps."""
    raw = np.frombuffer(params.tobytes(), np.uint8)
    room = np.empty(raw.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + raw.size] = raw
    return room[start : start + raw.size]


def _describe(name: str, a: NDArray[Any], access: Access) -> _Array:
    first, extent, axes = a.ctypes.data, a.itemsize if a.size else 0, []
    for stride, n in zip(a.strides, a.shape, strict=True):
        if n > 1 and stride and a.size:
            if len(axes) == 5:
                raise ValueError(f"{name} has more than 5 axes of more than one element")
            first += min(0, stride * (n - 1))
            extent += abs(stride) * (n - 1)
            axes.append((abs(stride), n))
    axes.sort(reverse=True)
    row = _Array(name.encode(), first, extent)
    row.rank, row.item_bytes, row.access = len(axes), a.itemsize, access
    for i, (stride, n) in enumerate(axes):
        row.shape[i], row.strides[i] = n, stride
    return row


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _lines(library: Path, pc: int | None) -> str:
    """The chain of inlined source lines at an address, innermost first."""
    info = _DlInfo()
    if not pc or not ctypes.CDLL(None).dladdr(ctypes.c_void_p(pc), ctypes.byref(info)):
        return "  (no place in the kernel)"
    command = ["addr2line", "-Cfipe", str(library), hex(pc - 1 - info.base)]
    out = subprocess.run(command, capture_output=True, text=True).stdout
    # Twins only forward; and what stands around the kernel is of no interest.
    others = (f"{build.HOST}/", " at launch:")
    lines = (line for line in out.splitlines() if not any(place in line for place in others))
    return "\n".join(f"  {_shorter(line)}" for line in lines)


def _line(library: Path, pc: int) -> str:
    first = _lines(library, pc).splitlines()[0]
    return first.rpartition(" at ")[2].strip()


def _shorter(line: str) -> str:
    return re.sub(r"/\S*/kernels/| \(discriminator \d+\)", "", line.strip())
