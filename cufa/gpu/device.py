"""What a kernel must know of the card it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

#: Shared memory that one block may have, in bytes, by architecture (CUDA C++ Programming Guide,
#: table of compute capabilities, less the 1 KiB that the system keeps from sm_80 on).
_SHARED_MEMORY = {
    70: 96 << 10,
    72: 96 << 10,
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    110: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}

OLDEST_ARCH = min(_SHARED_MEMORY)


@dataclass(frozen=True)
class Device:
    """A card, or an architecture to compile for.

    Parameters
    ----------
    arch : int
        Compute capability times 10: 90 for sm_90.
    shared_memory : int
        Bytes of shared memory that one block may have.
    name : str
    sm_count : int
        Multiprocessors; 1 if the card is not known.
    """

    arch: int
    shared_memory: int
    name: str
    sm_count: int = 1

    @classmethod
    def of_arch(cls, arch: int) -> Device:
        """A stand-in for a card of that architecture; an unknown one counts as the next older."""
        known = max((a for a in _SHARED_MEMORY if a <= arch), default=OLDEST_ARCH)
        return cls(arch, _SHARED_MEMORY[known], f"sm_{arch}")


@cache
def get_device(ordinal: int) -> Device:
    """The card with this number."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(ordinal)
    arch = 10 * properties["major"] + properties["minor"]
    name = properties["name"].decode()
    return Device(
        arch,
        properties["sharedMemPerBlockOptin"],
        f"{name} (sm_{arch})",
        properties["multiProcessorCount"],
    )
