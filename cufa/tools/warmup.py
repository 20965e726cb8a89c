"""Compile kernels into the cache ahead of their first use, on a machine without a GPU too."""

from __future__ import annotations

import argparse
import warnings

from cufa.errors import BuildError
from cufa.gpu import cache
from cufa.gpu.warmup import warmup
from cufa.options import FLOAT_DTYPES
from cufa.tools.console import counting
from cufa.tools.shapes import KINDS

_ANSWERS = {"no": (False,), "yes": (True,), "both": (False, True)}
_SWITCHES = {
    "window": "a window",
    "mask": "a mask",
    "alibi-slopes": "ALiBi slopes",
    "softcap": "a softcap",
    "sink": "a sink",
    "dropout": "dropout",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cufa.warmup`."""
    add = parser.add_argument
    add("--arch", type=int, help="90 for sm_90; default: the GPU's of this machine")
    add("--head-dim", type=int, nargs="+", default=[64, 128], help="default: 64 128")
    add(
        "--dtype",
        nargs="+",
        choices=FLOAT_DTYPES,
        default=["float16", "bfloat16"],
        help="default: float16 bfloat16",
    )
    add("--causal", choices=KINDS, default="both", help="default: both")
    add("--return-lse", choices=_ANSWERS, default="no", help="default: no")
    for name, feature in _SWITCHES.items():
        add(f"--{name}", action="store_true", help=f"calls will have {feature}")
    add("--gradients", action="store_true", help="calls will want gradients")
    add("--bias", choices=FLOAT_DTYPES, help="calls will have a bias of this dtype")


def run(options: argparse.Namespace) -> int:
    """Compile, with a bar, and say how many kernels are ready."""
    arguments = {name: value for name, value in vars(options).items() if name != "tool"}
    arguments["causal"] = KINDS[options.causal]
    arguments["return_lse"] = _ANSWERS[options.return_lse]
    with counting("compiling") as progress, warnings.catch_warnings():
        # Kernels that cannot be kept are gone with this process: of no use to anybody.
        warnings.simplefilter("error", RuntimeWarning)
        try:
            kernels = warmup(**arguments, progress=progress)
        except RuntimeWarning as warning:
            raise BuildError(str(warning)) from warning
    print(f"{kernels} kernels are ready in {cache.directory()}")
    return 0
