"""The GPU backend. Importing this package, or any module of it but `cards`, needs no CuPy."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_tuning

    load_tuning(os.environ["CUFA_TUNING"])
