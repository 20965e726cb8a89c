"""A failing case as a script to paste: it fails where `verify` has found the case to fail."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from cufa.testing import Case, Memory

_SCRIPT = """\
{imports}

import cufa
from cufa.testing import {names}

case = {case}
{arrays}
q, k, v = case.arrays({xp})
options = case.options({xp})
out, lse = cufa.attention(q, k, v, return_lse=True, **options)

want = case.exact()  # in float64, with the bounds of cufa.bounds.exact
print("out", to_numpy(out), "wanted", want.out, sep="\\n")
print("lse", to_numpy(lse), "wanted", want.lse, sep="\\n")
assert_within_rounding((out, lse), want)
"""


def make_script(case: Case, library: str) -> str:
    """Source text that computes a case by `cufa.attention` and compares it with the formula.

    Parameters
    ----------
    case : Case
    library : {"numpy", "cupy"}
        Whose arrays are passed.
    """
    made = _construct(case)
    names = ["Case", "assert_within_rounding", "to_numpy"]
    if "Memory(" in made:
        names.insert(1, "Memory")
    numpy = "import numpy as np"
    return _SCRIPT.format(
        imports=numpy if library == "numpy" else f"import {library}\n{numpy}",
        names=", ".join(names),
        case=made,
        arrays="\n".join(_describe(case)),
        xp="np" if library == "numpy" else library,
    )


def _construct(value: Case | Memory) -> str:
    """The call that makes a value, with the fields alone that differ from their defaults."""
    given = [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    arguments = [f"{name}={_literal(content)}" for name, content in given]
    if isinstance(value, Memory):
        return f"Memory({', '.join(arguments)})"
    return "\n".join(["Case(", *(f"    {argument}," for argument in arguments), ")"])


def _literal(value: Any) -> str:
    if isinstance(value, Memory):
        return _construct(value)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _describe(case: Case) -> list[str]:
    """What the case's arrays and options are, in comments."""
    arrays = dict(zip("qkv", case.arrays(np), strict=True)) | {
        name: value for name, value in case.options(np).items() if isinstance(value, np.ndarray)
    }
    lines = [
        f"# {name}: {a.dtype} {a.shape}, strides {a.strides} bytes" for name, a in arrays.items()
    ]
    plain = {name: value for name, value in case.options(np).items() if name not in arrays}
    options = ", ".join(f"{name}={value!r}" for name, value in plain.items() if value is not None)
    return [*lines, f"# {options}"]
