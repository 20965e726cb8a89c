"""A kernel's source, compiled by NVRTC for one `KernelKey`, kept on disk, loaded through CuPy.

The text that is compiled is the `.cu` file with every include replaced by its content, so that the
name in the cache, a hash of that text, the options and the compiler's version, sees every header.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cufa.errors import BuildError
from cufa.gpu import cache
from cufa.gpu.plan import KernelKey
from cufa.gpu.registry import target

KERNELS = Path(__file__).parent.parent / "kernels"
_INCLUDE = re.compile(r'\s*#include "(.+)"')
#: Wheels that carry NVRTC, of CUDA 13 and 12.
_NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")

_kernels: dict[tuple[int, KernelKey], Any] = {}
_import_lock = threading.Lock()
_locks: defaultdict[tuple[int, KernelKey], threading.Lock] = defaultdict(threading.Lock)


def kernel(key: KernelKey, device: int) -> Any:
    """The kernel on a device as a `cupy.cuda.Function`, compiled and loaded at first use.

    Raises
    ------
    BuildError
        NVRTC is missing or refused the source.
    """
    place = (device, key)
    found = _kernels.get(place)
    if found is None:
        with _locks[place]:
            found = _kernels.get(place)
            if found is None:
                found = _kernels[place] = _load(key)
    return found


def ensure_cached(key: KernelKey) -> None:
    """Compile a kernel into the disk cache unless it is there; needs no GPU."""
    _cached_file(key)


def compile_into_cache(key: KernelKey) -> str:
    """Compile a kernel into the disk cache, there or not; the compiler's log, with its registers
    and spills. Needs no GPU."""
    code, log = compile_key(key, verbose=True)
    cache.store(_cache_key(key), code)
    return log


@lru_cache
def source(name: str) -> str:
    """``kernels/<name>.cu`` with its includes expanded, and `#line` marks for the compiler."""

    def read(file: str) -> tuple[str, str]:
        return file, (KERNELS / file).read_text(encoding="utf-8")

    return expand(f"{name}.cu", read)


def expand(file: str, read: Callable[[str], tuple[str, str]]) -> str:
    """A source file with every include, at its first place, replaced by its text.

    `read` takes a name as `#include` has it and returns what `#line` is to call it, and its text.
    """
    return "\n".join(_expand(file, read, {file}))


def _expand(file: str, read: Callable[[str], tuple[str, str]], seen: set[str]) -> list[str]:
    name, text = read(file)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
        elif include[1] in seen:
            lines.append("")
        else:
            seen.add(include[1])
            lines += [*_expand(include[1], read, seen), f'#line {number + 1} "{name}"']
    return lines


def compile_key(key: KernelKey, *, verbose: bool = False) -> tuple[bytes, str]:
    """The machine code for a key and the compiler's log (registers and spills with `verbose`).
    Needs no GPU.

    For an architecture newer than the compiler knows, PTX of the newest one it knows; that needs
    the driver.
    """
    nvrtc, core = _toolchain()
    status, *_, known = nvrtc.nvrtcGetSupportedArchs()
    if status:
        raise BuildError(f"NVRTC cannot be asked for its architectures: {status}")
    arch = _known_arch(key, known)
    options = core.ProgramOptions(
        name=f"{key.kernel}.cu",
        std="c++17",
        arch=target(key.kernel, arch),
        define_macro=[f"CUFA_{name}={value}" for name, value in key.defines().items()],
        lineinfo=_debugging(),
        ptxas_options=["-v"] if verbose or _debugging() else None,
    )
    log = io.StringIO()
    try:
        code = (
            core.Program(source(key.kernel), "c++", options)
            .compile("cubin" if arch == key.arch else "ptx", logs=log)
            .code
        )
    except Exception as error:
        newer = (
            ""
            if arch == key.arch
            else (
                f"\nthe installed NVRTC knows no sm_{key.arch}, and PTX of sm_{arch} in its place "
                "needs NVIDIA's driver"
            )
        )
        raise BuildError(
            f"{key.kernel} does not compile for {key}:\n{error}\n{log.getvalue()}{newer}"
        ) from error
    if _debugging():
        print(f"cufa: compiled {key}\n{log.getvalue()}", file=sys.stderr)
    return bytes(code), log.getvalue().replace("\0", "")


def _known_arch(key: KernelKey, known: Sequence[int]) -> int:
    """The newest architecture, of those that the compiler knows, whose code a key's card runs."""
    wanted = target(key.kernel, key.arch)
    if key.arch < min(known):
        raise BuildError(
            f"{key.kernel} for {wanted}: the installed NVRTC knows sm_{min(known)} and later; "
            "install an older one"
        )
    arch = max(a for a in known if a <= key.arch)
    if arch != key.arch and wanted.endswith("a"):
        raise BuildError(
            f"{key.kernel} for {wanted}: the installed NVRTC knows up to sm_{arch}; install a "
            "newer one"
        )
    return arch


class _Toolchain(NamedTuple):
    nvrtc: Any
    core: Any


def _toolchain() -> _Toolchain:
    """The modules that drive the compiler, imported at the first compilation."""
    with _import_lock:  # two threads that import cuda.core for the first time break each other
        try:
            import cuda.core
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise BuildError(
                f"kernels are compiled by NVRTC, and {error}; install cufa with the extra cuda12 "
                "or cuda13, whichever your CuPy is for, or compile if there is no GPU"
            ) from error
        return _Toolchain(nvrtc, cuda.core)


def _debugging() -> bool:
    return bool(os.environ.get("CUFA_DEBUG"))


@lru_cache
def compiler_version() -> str:
    """The NVRTC that compiles here, as the cache's names know it; BuildError if there is none."""
    # The wheels' metadata takes a millisecond; loading the compiler to ask it takes a third of a
    # second.
    found = []
    for wheel in _NVRTC_WHEELS:
        try:
            found.append(f"{wheel} {metadata.version(wheel)}")
        except metadata.PackageNotFoundError:
            continue
    if found:
        return ", ".join(found)
    return f"NVRTC {_toolchain().nvrtc.nvrtcVersion()}"


def _cache_key(key: KernelKey) -> str:
    facts = (
        source(key.kernel),
        sorted(key.defines().items()),
        target(key.kernel, key.arch),
        _debugging(),
        compiler_version(),
    )
    return cache.digest(repr(facts).encode())


def _cached_file(key: KernelKey) -> Path:
    """The compiled kernel on disk: from the cache, or compiled into it."""
    name = _cache_key(key)
    found = cache.find(name)
    return cache.store(name, compile_key(key)[0]) if found is None else found


def _load(key: KernelKey) -> Any:
    import cupy

    path = str(_cached_file(key))
    try:
        found = cupy.RawModule(path=path).get_function(key.kernel)
        found.max_dynamic_shared_size_bytes = key.smem_bytes
    except cupy.cuda.driver.CUDADriverError as error:
        raise BuildError(f"the driver does not load {path}: {error}") from error
    return found.kernel  # a RawKernel looks up its device at every launch
