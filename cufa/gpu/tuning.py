"""Tuning files: tiles that were measured on one kind of card, used there before the built-in table.

``python -m cufa tune`` writes them. A file belongs to a card, a version of cufa and the source of
the kernels that it names: with another of these it is refused, since its figures mean nothing then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cufa
from cufa.errors import ArgumentError, CufaError, DeviceError, DTypeError
from cufa.gpu import build, cache, config
from cufa.gpu.config import ANY, Config, Scores, Tuned, _Row
from cufa.gpu.device import Device, get_device
from cufa.gpu.registry import KERNEL_NAMES

FORMAT = 1
_WAY_OUT = "python -m cufa tune makes one for this machine; none is needed"


def load_tuning(file: str | os.PathLike[str] | None) -> None:
    """Use the tiles of a tuning file, in this process and from the next call on.

    The environment variable CUFA_TUNING names a file that is loaded before the first call.

    Parameters
    ----------
    file : path or None
        What ``python -m cufa tune`` has written. None: the built-in table alone.

    Raises
    ------
    ArgumentError
        There is no such file, it is no tuning file, or it is for another version of cufa or of its
        kernels.
    DeviceError
        It is for a card that this machine does not have. Without any card nothing is compared:
        `cufa.warmup` may compile ahead.
    DTypeError
        `file` is no path.

    Notes
    -----
    A row is used on the card it was measured on, for the head dims it was measured with. Results
    may differ in their last bits from those with other tiles.
    """
    config.tuned = Tuned() if file is None else read(file, card_names())


def load_first(file: str) -> None:
    """`load_tuning` for CUFA_TUNING: a file that is refused is an error of the first call.

    Not of the import, so that what makes a new file, or does without, still works.
    """
    try:
        load_tuning(file)
    except CufaError as error:
        config.tuned = Tuned(file=file, refusal=error)


def refusal() -> CufaError | None:
    """Why the tuning file in use was refused; None: it was not."""
    return config.tuned.refusal


def in_force() -> str | None:
    """The tuning file in use; None: the built-in table alone."""
    return config.tuned.file


def read(file: str | os.PathLike[str], cards: Sequence[str]) -> Tuned:
    """A tuning file's rows, for a machine with these cards; the errors are `load_tuning`'s."""
    try:
        path = os.fsdecode(file)
    except TypeError:
        raise DTypeError(
            f"file is {file!r}, a {type(file).__name__}; it must be the path of a tuning file, or "
            "None"
        ) from None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"tuning file {path} cannot be read as JSON: {error}; {_WAY_OUT}"
        ) from error
    try:
        rows = _checked(content)
    except _Malformed as error:
        raise ArgumentError(f"tuning file {path} {error}; {_WAY_OUT}") from error
    card, arch = content["card"], content["arch"]
    if cards and card not in cards:
        raise DeviceError(
            f"tuning file {path} is for {card}, and this machine has {', '.join(cards)}; {_WAY_OUT}"
        )
    return Tuned(rows, (card, Device.of_arch(arch).name), path)


def write(
    file: str | os.PathLike[str],
    device: Device,
    rows: Sequence[_Row],
    measured: Sequence[Any],
) -> None:
    """Write a tuning file; `measured` says for each row what justifies it."""
    content = {
        "format": FORMAT,
        "cufa": cufa.__version__,
        "card": device.name,
        "arch": device.arch,
        "kernels": {name: source_digest(name) for name in sorted({row.kernel for row in rows})},
        "rows": [{**_plain(row), "measured": why} for row, why in zip(rows, measured, strict=True)],
    }
    Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def using(tuned: Tuned) -> Iterator[None]:
    """Other rows for a while, in all threads."""
    before = config.tuned
    config.tuned = tuned
    try:
        yield
    finally:
        config.tuned = before


def source_digest(kernel: str) -> str:
    """Of a kernel's source with all that it includes."""
    return cache.digest(build.source(kernel).encode())


def card_names() -> list[str]:
    """Of the cards that CuPy finds; none where it is missing."""
    try:
        from cupy.cuda import runtime

        return [get_device(ordinal).name for ordinal in range(runtime.getDeviceCount())]
    except Exception:  # no CuPy, no driver, no card: each has an error of its own
        return []


class _Malformed(Exception):
    """What a file holds that a tuning file does not, as the end of a sentence about the file."""


def _checked(content: Any) -> tuple[_Row, ...]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _Malformed(f"does not say that it is a tuning file of format {FORMAT}")
    for name, kind in (("cufa", str), ("card", str), ("arch", int), ("kernels", dict)):
        if not isinstance(content.get(name), kind):
            raise _Malformed(
                f"has {name} {content.get(name)!r}; it must be of type {kind.__name__}"
            )
    if content["cufa"] != cufa.__version__:
        raise _Malformed(f"is for cufa {content['cufa']}, and this is {cufa.__version__}")
    if not isinstance(content.get("rows"), list):
        raise _Malformed("has no list of rows")
    rows = tuple(_row(number, row) for number, row in enumerate(content["rows"]))
    for number, row in enumerate(rows):
        if row.arch != content["arch"]:
            raise _Malformed(f"is for sm_{content['arch']}, but its row {number} for sm_{row.arch}")
        if content["kernels"].get(row.kernel) != source_digest(row.kernel):
            raise _Malformed(f"was measured with another {row.kernel} than this cufa has")
    return rows


def _row(number: int, given: Any) -> _Row:
    columns = _columns(f"row {number}", given, _COLUMNS, also=("measured",))
    return _Row(**columns)


def _columns(
    where: str, given: Any, wanted: Mapping[str, _Column], also: Sequence[str] = ()
) -> dict[str, Any]:
    """The values of an object of JSON, each by the function that takes it."""
    if not isinstance(given, dict) or given.keys() - {*also} != wanted.keys():
        raise _Malformed(f"has in {where} other columns than {', '.join(wanted)}")
    return {name: take(f"{where}, {name}", given[name]) for name, take in wanted.items()}


_Column = Callable[[str, Any], Any]


def _one_of(*allowed: Any) -> _Column:
    typed = [(type(choice), choice) for choice in allowed]  # True is no 1 here

    def take(where: str, value: Any) -> Any:
        if (type(value), value) not in typed:
            raise _Malformed(f"has {value!r} in {where}; it must be one of {allowed}")
        return value

    return take


def _count(where: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _Malformed(f"has {value!r} in {where}; it must be an integer of at least 1")
    return value


def _scores(where: str, value: Any) -> Scores:
    return Scores[_one_of(*Scores.__members__)(where, value)]


def _seqlen(where: str, value: Any) -> int:
    return ANY if value is None else _count(where, value)


def _config(where: str, value: Any) -> Config:
    return Config(**_columns(where, value, dict.fromkeys(Config._fields, _count)))


#: The columns of a row, as they are in a file. A length of null is any.
_COLUMNS: dict[str, _Column] = {
    "kernel": _one_of(*KERNEL_NAMES),
    "element_bytes": _count,
    "arch": _count,
    "scores": _scores,
    "causal": _one_of(False, True, None),
    "head_dim": _count,
    "square": _one_of(False, True),
    "seqlen": _seqlen,
    "config": _config,
}


def _plain(row: _Row) -> dict[str, Any]:
    """A row as a file has it."""
    return {
        **row._asdict(),
        "scores": row.scores.name,
        "seqlen": None if row.seqlen == ANY else row.seqlen,
        "config": row.config._asdict(),
    }
