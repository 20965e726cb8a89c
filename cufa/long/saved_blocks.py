"""Finished blocks of a long run in files, so that a run which was killed goes on where it was.

A folder holds what the run computes, `problem.json`, and a file for each block that is finished. A
file is written under another name, flushed to the disk and then renamed, so it is whole or not
there.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from cufa.arrays import is_cupy, namespace
from cufa.errors import ArgumentError

#: Rows of each input, first and last among them, that tell one input from another.
_SAMPLED_ROWS = 64


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
        The folder holds blocks of another run; the message names what differs.
    """

    def __init__(self, folder: Any, identity: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / "problem.json"
        identity = json.loads(json.dumps(identity))
        try:
            found = json.loads(written.read_text())
        except FileNotFoundError:
            text = json.dumps(identity, indent=1).encode()
            _write(written, lambda file: file.write(text))
            return
        except ValueError:
            found = {}
        for name in {**identity, **found}:
            if identity.get(name) != found.get(name):
                raise ArgumentError(
                    f"checkpoint_dir is {os.fspath(folder)!r}, which holds blocks of another run: "
                    f"{name} is {found.get(name)!r} there and {identity.get(name)!r} now; pass "
                    "another folder, or delete this one"
                )

    def load(self, name: str, targets: Sequence[Any]) -> bool:
        """Fill `targets` with what was saved of a block; False, and nothing, if there is none."""
        # A file that was damaged since counts as none: the block is computed again.
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            with np.load(self._folder / f"{name}.npz") as file:
                found = [file[f"arr_{n}"] for n in range(len(targets))]
            arrays = [
                raw.view(target.dtype).reshape(target.shape)
                for raw, target in zip(found, targets, strict=True)
            ]
            for target, a in zip(targets, arrays, strict=True):
                target[...] = namespace(target).asarray(a)
            return True
        return False

    def save(self, name: str, arrays: Sequence[Any]) -> None:
        """Keep the results of a block."""
        raw = [_bytes_of(a) for a in arrays]
        _write(self._folder / f"{name}.npz", lambda file: np.savez(file, *raw))


def digest(arrays: dict[str, Any]) -> str:
    """Of some rows of each array: two inputs that differ in one of these have two digests."""
    found = blake2b(digest_size=16)
    for name, a in arrays.items():
        found.update(name.encode())
        for axis in range(a.ndim - 1):
            count = a.shape[axis]
            if count > _SAMPLED_ROWS:
                rows = np.linspace(0, count - 1, _SAMPLED_ROWS, dtype=np.int64)
                a = a[(slice(None),) * axis + ([*map(int, rows)],)]
        found.update(_bytes_of(a).tobytes())
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
