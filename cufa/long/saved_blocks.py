"""Finished blocks of a long run in files, so that a run which was killed goes on where it was.

A folder holds what the run computes, `problem.json`, and a file for each block that is finished. A
file is written under another name, flushed to the disk and then renamed, so it is whole or not
there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np

from cufa.arrays import distinct, is_cupy, namespace, parts_of
from cufa.errors import ArgumentError, DTypeError
from cufa.options import shown

#: So many bytes of an input are read at a time to tell it from another.
_READ = 1 << 24


class SavedBlocks:
    """The blocks of one run in a folder, which is made if it is not there.

    Parameters
    ----------
    folder : path
    identity : dict
        What the run computes, of JSON's kinds.

    Raises
    ------
    ArgumentError
        The folder holds blocks of another run; the message names what differs. Or it cannot be
        made, read or written.
    DTypeError
        `folder` is no path.
    """

    def __init__(self, folder: Any, identity: dict[str, Any]) -> None:
        try:
            self._folder = Path(folder)
        except TypeError:
            raise DTypeError(
                f"checkpoint_dir is {shown(folder)}, a {type(folder).__name__}; it must be a path"
            ) from None
        given = f"checkpoint_dir is {os.fspath(folder)!r}"
        identity = json.loads(json.dumps(identity))
        try:
            text = self._begin(json.dumps(identity, indent=1))
        except (OSError, ValueError) as error:  # the latter for a name that holds a null
            raise ArgumentError(
                f"{given}, which cannot be used ({error}); pass a folder that can be written, or "
                "that can be made"
            ) from error
        try:
            found = dict(json.loads(text))
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{given}, whose problem.json is not one of a run; pass another folder, or delete "
                "this one"
            ) from None
        for name in {**identity, **found}:
            if identity.get(name) != found.get(name):
                raise ArgumentError(
                    f"{given}, which holds blocks of another run: {name} is {found.get(name)!r} "
                    f"there and {identity.get(name)!r} now; pass another folder, or delete this one"
                )

    def _begin(self, text: str) -> str:
        """What problem.json holds: `text` from now on, if it was not there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / "problem.json"
        try:
            return written.read_text(errors="replace")
        except FileNotFoundError:
            _write(written, lambda file: file.write(text.encode()))
            return text

    def load(self, name: str, targets: Sequence[Any]) -> bool:
        """Fill `targets` with what was saved of a block; False, and nothing, if there is none."""
        try:
            raw = np.fromfile(self._file(name), np.uint8)
        except OSError:
            return False
        # A file that was damaged since counts as none: the block is computed again.
        *parts, check = np.split(raw, np.cumsum([a.nbytes for a in targets]))
        if check.tobytes() != _check_of(parts):
            return False
        for target, part in zip(targets, parts, strict=True):
            a = part.view(target.dtype).reshape(target.shape)
            target[...] = namespace(target).asarray(a)
        return True

    def save(self, name: str, arrays: Sequence[Any]) -> None:
        """Keep the results of a block: their bytes, and a checksum."""
        parts = [_bytes_of(a) for a in arrays]

        def write(file: IO[bytes]) -> None:
            for part in parts:
                file.write(part.data)
            file.write(_check_of(parts))

        _write(self._file(name), write)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.block"


def _check_of(parts: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """A checksum of `parts`, one after the other."""
    return reduce(lambda check, part: crc32(part.data, check), parts, 0).to_bytes(4, "little")


def digest(arrays: dict[str, Any]) -> str:
    """Of all that each array holds, axes that only repeat it counted once."""
    found = blake2b(digest_size=16)
    for name, a in arrays.items():
        found.update(name.encode())
        for part in parts_of(distinct(a), _READ // a.itemsize):
            found.update(_bytes_of(part).data)
    return found.hexdigest()


def _bytes_of(a: Any) -> np.ndarray[Any, Any]:
    host = a.get() if is_cupy(a) else np.asarray(a)
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is whole or not there, whenever the process or the machine stops."""
    draft = path.with_name(f"{path.name}.part")
    with open(draft, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
