"""Launches of test kernels: described once, run by the emulator or on a card.

A test kernel takes one struct: first its tensor maps, then its pointers, then its integers.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cufa.gpu import build as nvrtc
from cufa.gpu.tensor_map import MAP_ALIGNMENT, MAP_BYTES, TensorMap
from emulator import build
from emulator.run import FIRST_COME, Access, Order, Schedule, run
from emulator.tensor_map import emulated

Arrays = dict[str, NDArray[Any]]

#: The lowest architecture that a test kernel is for.
ARCHS = {
    "ptx_scalar": "sm_70",
    "ptx_barrier": "sm_70",
    "ptx_atom": "sm_70",
    "ptx_red": "sm_70",
    "dropout": "sm_70",
    "ptx_ldmatrix": "sm_75",
    "ptx_pack": "sm_80",
    "ptx_mma": "sm_80",
    "ptx_cp_async": "sm_80",
    "ptx_red_vector": "sm_90",
    "ptx_stmatrix": "sm_90",
    "ptx_mma_wide": "sm_90",
    "ptx_bulk": "sm_90",
    "ptx_tensor": "sm_90",
    "ptx_warpgroup": "sm_90a",
    "ptx_wgmma": "sm_90a",
    "linear_attention_sm90": "sm_90a",
}


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments, and its grid.

    Parameters
    ----------
    arrays : mapping from name to (array, Access)
        C-contiguous, in the order of the struct's pointers; outputs hold what they are to hold
        before. None is changed.
    maps : mapping from the name of an array to the map of it, without an address
        Such an array is passed as its map, not as a pointer.
    numbers : mapping from name to int
    """

    kernel: str
    arrays: Mapping[str, tuple[NDArray[Any], Access]]
    numbers: Mapping[str, int] = field(default_factory=dict)
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
    grid: tuple[int, ...] = (1,)
    threads: int = 128
    shared_bytes: int = 0
    defines: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (a, _) in self.arrays.items():
            if not a.flags.c_contiguous:
                raise ValueError(
                    f"{name} of {self.kernel} has shape {a.shape} and strides {a.strides}; arrays "
                    "of a launch must be C-contiguous: pass np.ascontiguousarray of it"
                )

    def params(
        self, address: Mapping[str, int], encode: Callable[[TensorMap, int], bytes]
    ) -> NDArray[np.void]:
        """The kernel's argument, one opaque item, shape (1,)."""
        pointers = [name for name in self.arrays if name not in self.maps]
        fields = [(name, f"V{MAP_BYTES}") for name in self.maps]
        fields += [(name, "u8") for name in pointers] + [(name, "i4") for name in self.numbers]
        alignment = MAP_ALIGNMENT if self.maps else 8
        p = np.zeros(1, [*fields, ("padding", "u1", -np.dtype(fields).itemsize % alignment)])
        for name, tensor_map in self.maps.items():
            p[name] = encode(tensor_map, address[name])
        for name in pointers:
            p[name] = address[name]
        for name, value in self.numbers.items():
            p[name] = value
        return p.view((np.void, p.itemsize))

    def outputs(self) -> list[str]:
        """The names of the arrays that the kernel changes."""
        return [name for name, (_, access) in self.arrays.items() if access is not Access.READ]

    def emulated(self, schedule: Schedule = FIRST_COME) -> Arrays:
        """The outputs after a run in the emulator."""
        held = {name: (a.copy(), access) for name, (a, access) in self.arrays.items()}
        address = {name: a.ctypes.data for name, (a, _) in held.items()}
        run(
            build.library(build.Unit.of(self.kernel, self.defines)),
            self.params(address, emulated),
            self.grid,
            self.threads,
            self.shared_bytes,
            held,
            schedule,
        )
        return {name: held[name][0] for name in self.outputs()}

    def on_card(self) -> Arrays:
        """The outputs after a run on the current device."""
        import cupy

        held = {
            name: cupy.asarray(a.reshape(-1).view(np.uint8)) for name, (a, _) in self.arrays.items()
        }
        address = {name: a.data.ptr for name, a in held.items()}
        params = self.params(address, TensorMap.encoded)
        kernel = load(self.kernel, tuple(sorted(self.defines.items())))
        start(kernel, params, self.grid, self.threads, self.shared_bytes)
        given = {name: self.arrays[name][0] for name in self.outputs()}
        return {
            name: cupy.asnumpy(held[name]).view(a.dtype).reshape(a.shape)
            for name, a in given.items()
        }


def source(kernel: str) -> str:
    """The text of a test kernel for a card."""

    def read(file: str) -> tuple[str, str]:
        roots = (build.HERE / "kernels", nvrtc.KERNELS)
        return file, next(r / file for r in roots if (r / file).exists()).read_text()

    return nvrtc.expand(f"{kernel}.cu", read)


def compile_for(
    arch: str, kernel: str, defines: tuple[tuple[str, int], ...] = ()
) -> tuple[bytes, str]:
    """The machine code for an architecture such as "sm_90a", and the compiler's log with registers
    and spills. Needs no GPU."""
    core = nvrtc._toolchain().core
    options = core.ProgramOptions(
        name=f"{kernel}.cu",
        std="c++17",
        arch=arch,
        define_macro=[f"CUFA_{name}={value}" for name, value in defines] or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    code = core.Program(source(kernel), "c++", options).compile("cubin", logs=log).code
    return bytes(code), log.getvalue().replace("\0", "")


@cache
def load(kernel: str, defines: tuple[tuple[str, int], ...] = ()) -> Any:
    """The kernel on the current device, as a `cupy.RawKernel`."""
    import cupy

    arch = ARCHS[kernel]
    if not arch.endswith("a"):  # not for this architecture alone
        arch = f"sm_{cupy.cuda.Device().compute_capability}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernel}.cubin"
        path.write_bytes(compile_for(arch, kernel, defines)[0])
        found = cupy.RawModule(path=str(path)).get_function(kernel)
        assert found.kernel  # read from the file now, while it is there
    return found


def start(
    kernel: Any, params: NDArray[np.void], grid: tuple[int, ...], threads: int, shared_bytes: int
) -> None:
    """Run a kernel that `load` returned, to its end. `params` is one opaque item."""
    import cupy

    kernel.max_dynamic_shared_size_bytes = shared_bytes
    kernel(grid, (threads,), (params,), shared_mem=shared_bytes)
    cupy.cuda.Device().synchronize()


def skip_unless_card(kernel: str) -> None:
    """Skips a test where there is no card that the kernel is for."""
    cupy = pytest.importorskip("cupy")
    try:
        have = int(cupy.cuda.Device().compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no GPU: {error}")
    need = ARCHS[kernel].removeprefix("sm_")
    if have < int(need.rstrip("a")) or (need.endswith("a") and have != int(need.rstrip("a"))):
        pytest.skip(f"{kernel} is for sm_{need}; this is sm_{have}")


Agree = Callable[[NDArray[Any], NDArray[Any]], None]


def same_bits(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bits."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(*(a.view(f"u{a.itemsize}") for a in (got, want)))


@dataclass(frozen=True)
class Runner:
    """What runs a launch: the emulator with one order of threads, or (None) a card."""

    order: Order | None

    def check(
        self,
        launch: Launch,
        expected: Arrays,
        seed: int = 0,
        agree: Callable[[str], Agree] = lambda name: same_bits,
    ) -> None:
        """Run a launch and compare its outputs with what is expected, as `agree` has it for each.

        A card is compared with the emulator too.
        """
        if self.order is not None:
            references = [expected]
            if obstacle := build.obstacle():
                pytest.skip(obstacle)
            out = launch.emulated(Schedule(self.order, seed))
        else:
            skip_unless_card(launch.kernel)
            references = [expected] if build.obstacle() else [expected, launch.emulated()]
            out = launch.on_card()
        for reference in references:
            assert out.keys() == reference.keys()
            for name, a in out.items():
                agree(name)(a, reference[name])


#: Runs a test in the emulator under each order, and on a card.
on_every_machine = pytest.mark.parametrize(
    "machine",
    [
        *(pytest.param(Runner(order), id=order.name.lower()) for order in Order),
        pytest.param(Runner(None), id="card", marks=pytest.mark.gpu),
    ],
)
