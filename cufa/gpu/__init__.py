"""The GPU backend. Importing it, or its modules but `cards`, `exchange`, `nccl`, needs no CuPy."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_first

    load_first(os.environ["CUFA_TUNING"])
