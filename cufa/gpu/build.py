"""A kernel's source, compiled by NVRTC for one `KernelKey`, kept on disk, loaded through CuPy.

The text that is compiled is the `.cu` file with every include replaced by its content, so that the
cache's key, a hash of that text, the options and the compiler's version, sees every header. A file
in the cache is named after its key and after its own content; it is written under another name and
renamed, so that no process ever reads half of one.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections import defaultdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cufa.errors import BuildError
from cufa.gpu.plan import KernelKey

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


@cache
def source(name: str) -> str:
    """``kernels/<name>.cu`` with its includes expanded, and `#line` marks for the compiler."""
    return "\n".join(_expand(f"{name}.cu", set()))


def _expand(name: str, seen: set[str]) -> list[str]:
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((KERNELS / name).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
        elif include[1] in seen:
            lines.append("")
        else:
            seen.add(include[1])
            lines += [*_expand(include[1], seen), f'#line {number + 1} "{name}"']
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
    if key.arch < min(known):
        raise BuildError(
            f"{key.kernel} for sm_{key.arch}: the installed NVRTC knows sm_{min(known)} and later; "
            "install an older one"
        )
    arch = max(a for a in known if a <= key.arch)
    options = core.ProgramOptions(
        name=f"{key.kernel}.cu",
        std="c++17",
        arch=f"sm_{arch}",
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
        raise BuildError(
            f"{key.kernel} does not compile for {key}:\n{error}\n{log.getvalue()}"
        ) from error
    if _debugging():
        print(f"cufa: compiled {key}\n{log.getvalue()}", file=sys.stderr)
    return bytes(code), log.getvalue().replace("\0", "")


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
                "or cuda13, whichever your CuPy is for"
            ) from error
        return _Toolchain(nvrtc, cuda.core)


def _debugging() -> bool:
    return bool(os.environ.get("CUFA_DEBUG"))


@cache
def _compiler_version() -> str:
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
        key.arch,
        _debugging(),
        _compiler_version(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def cache_directory() -> Path:
    """Where compiled kernels are kept: CUFA_CACHE_DIR, or ``cufa`` in the user's cache folder."""
    try:
        if chosen := os.environ.get("CUFA_CACHE_DIR"):
            return Path(chosen).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "cufa"
    except RuntimeError as error:  # no home folder
        _warn_once(f"compiled kernels are not kept ({error}); {_WAY_OUT}")
        return _private_directory()


_WAY_OUT = "set CUFA_CACHE_DIR to a writable folder"


def _find(directory: Path, name: str) -> Path | None:
    """The whole and unharmed file of that name in the cache."""
    try:
        candidates = [entry for entry in os.scandir(directory) if entry.name.startswith(f"{name}-")]
    except OSError:
        return None
    for entry in candidates:
        path = Path(entry.path)
        try:
            if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return path
            path.unlink()
        except OSError:
            continue
    return None


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:32]


def _store(directory: Path, name: str, code: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{_digest(code)}.cubin"
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _cached_file(key: KernelKey) -> Path:
    """The compiled kernel on disk: from the cache, or compiled into it."""
    directory, name = cache_directory(), _cache_key(key)
    found = _find(directory, name) or _find_private(name)
    if found is not None:
        return found
    code, _ = compile_key(key)
    try:
        return _store(directory, name, code)
    except OSError as error:
        _warn_once(f"cannot keep compiled kernels in {directory} ({error}); {_WAY_OUT}")
    try:
        return _store(_private_directory(), name, code)
    except OSError as error:
        raise BuildError(f"no folder to load {key.kernel} from ({error}); {_WAY_OUT}") from error


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


@cache
def _private_directory() -> Path:
    """Of this process alone, and gone with it: the driver loads kernels from files only."""
    directory = tempfile.mkdtemp(prefix="cufa-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _find_private(name: str) -> Path | None:
    made = _private_directory.cache_info().currsize
    return _find(_private_directory(), name) if made else None


def _load(key: KernelKey) -> Any:
    import cupy

    path = str(_cached_file(key))
    try:
        found = cupy.RawModule(path=path).get_function(key.kernel)
        found.max_dynamic_shared_size_bytes = key.smem_bytes
    except cupy.cuda.driver.CUDADriverError as error:
        raise BuildError(f"the driver does not load {path}: {error}") from error
    return found.kernel  # a RawKernel looks up its device at every launch
