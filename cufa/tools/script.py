"""A failing case as a script to paste: it fails where `verify` has found the case to fail."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from cufa.testing import Case, Memory

_HEAD = """\
{imports}

import cufa
from cufa.testing import {names}

case = {case}
{arrays}
q, k, v = case.arrays({xp})
options = case.options({xp})
"""
_FORWARD = """\
out, lse = cufa.attention(q, k, v, return_lse=True, **options)

want = case.exact()  # in float64, with the bounds of cufa.bounds.exact
print("out", to_numpy(out), "wanted", want.out, sep="\\n")
print("lse", to_numpy(lse), "wanted", want.lse, sep="\\n")
assert_within_rounding((out, lse), want)
"""
_BACKWARD = """\
out, vjp = cufa.attention_vjp(q, k, v, **options, **case.backward_options())
got = vjp(*case.back({xp}))

want = case.exact_gradients()  # in float64, with bounds of cufa.gradient_bounds
for name, gradient, wanted in zip(got._fields, got, want.gradients):
    if gradient is not None:
        print(name, to_numpy(gradient), "wanted", wanted, sep="\\n")
assert_gradients_within_rounding(got, want)
"""


def make_script(case: Case, library: str, direction: str = "forward") -> str:
    """Source text that computes a case by cufa and compares it with the formula.

    Parameters
    ----------
    case : Case
    library : {"numpy", "cupy"}
        Whose arrays are passed.
    direction : {"forward", "backward"}
        Whether `cufa.attention` is called, or `cufa.attention_vjp`.
    """
    made = _construct(case)
    forward = direction == "forward"
    check = "assert_within_rounding" if forward else "assert_gradients_within_rounding"
    names = ["Case", check, "to_numpy"]
    if "Memory(" in made:
        names.insert(1, "Memory")
    numpy = "import numpy as np"
    return (_HEAD + (_FORWARD if forward else _BACKWARD)).format(
        imports=numpy if library == "numpy" else f"import {library}\n{numpy}",
        names=", ".join(names),
        case=made,
        arrays="\n".join(_describe(case, direction)),
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


def _describe(case: Case, direction: str) -> list[str]:
    """What the case's arrays and options are, in comments."""
    given = case.options(np)
    arrays = dict(zip("qkv", case.arrays(np), strict=True))
    arrays |= {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    if direction == "backward":
        arrays |= dict(zip(("dout", "dlse"), case.back(np), strict=True))
        given |= case.backward_options()
    lines = [
        f"# {name}: {a.dtype} {a.shape}, strides {a.strides} bytes" for name, a in arrays.items()
    ]
    plain = {name: value for name, value in given.items() if name not in arrays}
    options = ", ".join(f"{name}={value!r}" for name, value in plain.items() if value is not None)
    return [*lines, f"# {options}"]
