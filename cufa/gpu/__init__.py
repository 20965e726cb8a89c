"""The GPU backend. It needs no CuPy; `cards`, `exchange`, `nccl` and `streaming` in it do."""

import os

if os.environ.get("CUFA_TUNING"):
    from cufa.gpu.tuning import load_first

    load_first(os.environ["CUFA_TUNING"])
