"""The GPU backend. Importing it, or its modules but `cards` and `exchange`, needs no CuPy."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_tuning

    load_tuning(os.environ["CUFA_TUNING"])
