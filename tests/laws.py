"""What the laws of attention share: problems by each algorithm, and one call on a problem."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

import cufa
from cufa import testing
from cufa.testing import Case

#: Every law is one of each algorithm; the kernels of "auto" have more to be tried.
ALGORITHMS = st.sampled_from(["auto", "auto", "auto", "standard"])
cases = partial(testing.cases, algorithm=ALGORITHMS)


def attend(xp, case: Case, **options):
    """Output and lse of one call, some options replaced."""
    options = {**case.options(xp), **options}
    return cufa.attention(*case.arrays(xp), return_lse=True, **options)
