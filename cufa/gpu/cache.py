"""Compiled kernels on disk: safe for many processes at once, and never a stale or a broken one.

A file is named after what it was made from and after its own content. It is written under another
name and renamed, so that no process ever reads half of one.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

from cufa.errors import BuildError

_WAY_OUT = "set CUFA_CACHE_DIR to a writable folder"


def directory() -> Path:
    """CUFA_CACHE_DIR, or ``cufa`` in the user's cache folder, or this process's own folder."""
    try:
        if chosen := os.environ.get("CUFA_CACHE_DIR"):
            return Path(chosen).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "cufa"
    except RuntimeError as error:  # no home folder
        _warn_once(f"compiled kernels are not kept ({error}); {_WAY_OUT}")
        return _private_directory()


def find(name: str) -> Path | None:
    """The file kept under a name, whole and unharmed; a harmed one is deleted."""
    found = _find_in(directory(), name)
    if found is None and _private_directory.cache_info().currsize:
        found = _find_in(_private_directory(), name)
    return found


def store(name: str, code: bytes) -> Path:
    """Keep a file under a name; where that cannot be, in a folder of this process, with a warning.

    Raises
    ------
    BuildError
        No folder can be written.
    """
    try:
        return _store_in(directory(), name, code)
    except OSError as error:
        _warn_once(f"cannot keep compiled kernels in {directory()} ({error}); {_WAY_OUT}")
    try:
        return _store_in(_private_directory(), name, code)
    except OSError as error:
        raise BuildError(f"no folder to load kernels from ({error}); {_WAY_OUT}") from error


def digest(content: bytes) -> str:
    """A name for a content."""
    return hashlib.sha256(content).hexdigest()[:32]


def _find_in(folder: Path, name: str) -> Path | None:
    try:
        candidates = [entry for entry in os.scandir(folder) if entry.name.startswith(f"{name}-")]
    except OSError:
        return None
    for entry in candidates:
        path = Path(entry.path)
        try:
            if path.stem.rpartition("-")[2] == digest(path.read_bytes()):
                return path
            path.unlink()
        except OSError:
            continue
    return None


def _store_in(folder: Path, name: str, code: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{digest(code)}.cubin"
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@cache
def _private_directory() -> Path:
    """Of this process alone, and gone with it: the driver loads kernels from files only."""
    folder = tempfile.mkdtemp(prefix="cufa-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
