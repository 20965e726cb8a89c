"""The GPU backend. Only `cards`, `exchange`, `nccl` and `streaming` import CuPy at once."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_first

    load_first(os.environ["CUFA_TUNING"])
