"""How a process joins the other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.distributed import mpi
from cufa.distributed.communicator import Communicator


def connect(*, xp: Any = np, timeout: float = 60.0, comm: Any = None) -> Communicator:
    group = mpi.load().COMM_WORLD if comm is None else comm
    return mpi.MPICommunicator(group, timeout)
