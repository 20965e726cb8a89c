"""The GPU backend. It needs no CuPy to be imported; `cards`, `exchange` and `streaming` do."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_first

    load_first(os.environ["CUFA_TUNING"])
