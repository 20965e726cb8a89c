"""Compiles kernels for the CPU: the same text as for a card, but for `ptx/`, whose twins it takes.

Compiled units are kept by a hash of all that they are made from, in CUFA_EMULATOR_CACHE or the
user's cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cufa.gpu import build

HERE = Path(__file__).parent
HOST = HERE / "host"
#: Where an include is looked for; what is found first counts.
ROOTS = (HOST, HERE / "kernels", build.KERNELS)

#: -fsanitize only makes the compiler call the hooks of host/hooks.cpp, or set traps, which take it
#: a quarter less time than calls that would say which check has failed; no sanitizer is linked.
_CHECKS = (
    "-fsanitize=thread",
    "-fsanitize=bounds-strict,shift,alignment,null,integer-divide-by-zero,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
)
# Each instruction keeps one place in the code, by which lanes that diverge are told apart.
_ONE_PLACE = ("-fno-thread-jumps", "-fno-tree-dominator-opts")
MODES = {
    "checked": ("-O1", *_CHECKS, *_ONE_PLACE),
    "coverage": ("-O0", "--coverage", "-DEMULATE_COVERAGE"),
    "debug": ("-O0", "-g3", *_CHECKS, *_ONE_PLACE),
}
CHECKED_MODES = ("checked", "debug")
# Of DWARF 5 addr2line (binutils 2.40) gives functions of the kernel's own file the unit's name.
# Where variables lie is not asked; to find it out takes a third of the time of -O1, or half.
_LINES = ("-g1", "-gdwarf-4", "-fno-var-tracking")
# Units in one process share nothing, not even what the language says is one.
_COMMON = ("-std=c++17", "-fno-gnu-unique", "-fPIC", "-march=x86-64-v3", "-ffp-contract=off")
_WARNINGS = ("-Wno-unknown-pragmas", "-Wno-psabi")
# Without C++'s own, which no kernel calls: to search it takes longer than to link a unit.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc")

Edit = Callable[[str, str], str]


class Unit(NamedTuple):
    """One kernel in one configuration."""

    kernel: str
    defines: tuple[tuple[str, int], ...] = ()
    mode: str = "checked"

    @classmethod
    def of(cls, kernel: str, defines: Mapping[str, int], mode: str = "checked") -> Unit:
        """A unit from defines as `KernelKey.defines` has them."""
        return cls(kernel, tuple(sorted(defines.items())), mode)


class CompilerError(Exception):
    """g++ refused a unit; the text is what it printed."""


@cache
def obstacle() -> str | None:
    """Why kernels cannot run here; None if they can."""
    if platform.machine() != "x86_64":
        return f"the emulator has x86-64 assembly in it; this machine is {platform.machine()}"
    missing = [tool for tool in ("g++", "gcov", "addr2line") if shutil.which(tool) is None]
    if missing:
        return f"the emulator needs {' and '.join(missing)} on the PATH"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    if not version.partition(".")[0].strip().isdecimal():
        return "the emulator needs g++, and the one on the PATH does not run"
    if int(version.partition(".")[0]) < 12:
        return f"the emulator needs g++ 12 or later; this is {version.strip()}"
    return None


def folder() -> Path:
    """Where compiled units are kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("CUFA_EMULATOR_CACHE") or base / "cufa-emulator")


def source(unit: Unit, edit: Edit | None = None) -> str:
    """The text of a unit; `edit` takes a file's name and text and returns another text."""

    def read(file: str) -> tuple[str, str]:
        path = next(root / file for root in ROOTS if (root / file).exists())
        text = path.read_text()
        return str(path), text if edit is None else edit(file, text)

    text = build.expand(f"{unit.kernel}.cu", read)
    return f'{text}\n#line 1 "launch"\nEMULATED_UNIT({unit.kernel})\n'


@cache
def library(unit: Unit, edit: Edit | None = None) -> Path:
    """The compiled unit, a shared library."""
    text = source(unit, edit)
    flags = [*_COMMON, *_LINES, *_WARNINGS, *MODES[unit.mode]]
    flags += [f"-DCUFA_{name}={value}" for name, value in unit.defines]
    libraries = _LIBRARIES if unit.mode in CHECKED_MODES else ("--coverage",)
    digest = _digest(text, flags, libraries, _runtime().name)
    path = folder() / f"{unit.kernel}-{unit.mode}-{digest}.so"
    with _building(path) as scratch:
        if scratch:
            code, object_file = path.with_suffix(".cpp"), path.with_suffix(".o")
            code.write_text(text)
            prelude = ["-include", str(HOST / "prelude.h"), f"-I{HOST}"]
            _compile(["-c", *flags, *prelude, str(code), "-o", str(object_file)])
            _compile(["-shared", str(object_file), str(_runtime()), *libraries, "-o", scratch])
    return path


@cache
def _runtime() -> Path:
    """What all units are linked with: everything in host/ but the twins."""
    flags = ["-O3", "-g", "-std=c++20", "-fPIC", "-march=x86-64-v3", "-Wall", "-Wextra", "-Werror"]
    # In one piece: so it compiles in three quarters of the time, and runs a tenth faster, as calls
    # from file to file are inlined.
    flags += ["-fno-semantic-interposition", "-shared", f"-I{HOST}"]
    text = "".join(path.read_text() for path in sorted(HOST.iterdir()) if path.is_file())
    path = folder() / f"emulator-{_digest(text, flags)}.so"
    with _building(path) as scratch:
        if scratch:
            whole = path.with_suffix(".cpp")
            names = sorted(source.name for source in HOST.glob("*.cpp"))
            whole.write_text("".join(f'#include "{name}"\n' for name in names))
            _compile([*flags, str(whole), "-o", scratch])
    return path


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr((*facts, _compiler())).encode()).hexdigest()[:20]


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


@contextmanager
def _building(path: Path) -> Iterator[str | None]:
    """A name to build a file under, which then takes its own; None if it is there. Others that want
    the same file, threads or processes, wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        yield None
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            yield None
            return
        scratch = path.with_suffix(".partial")
        yield str(scratch)
        scratch.replace(path)


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(done.stderr)
