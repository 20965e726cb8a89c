"""Problems written down by hand, and what must come of them."""

from __future__ import annotations

import numpy as np

import cufa
from cufa.bounds import exact
from cufa.testing import Case, assert_within_rounding


def case(seqlen_q, seqlen_k=None, heads=2, kv_heads=None, head_dim=64, dtype="float16", **fields):
    """A problem in layout bshd; as many keys as queries, as many key heads as heads."""
    kv_heads = kv_heads or heads
    fields = {"layout": "bshd", "head_dim_v": head_dim, **fields}
    return Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if seqlen_k is None else seqlen_k,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        **fields,
    )


def check(xp, problem, **options):
    """Attention on a case, with some options replaced or added, is the formula."""
    on_host = {**problem.options(np), **options}
    on_device = {**problem.options(xp), **{n: moved(xp, a) for n, a in options.items()}}
    result = cufa.attention(*problem.arrays(xp), return_lse=True, **on_device)
    assert_within_rounding(result, exact(*problem.arrays(np), **on_host))
    return result


def check_arrays(xp, q, k, v, **options):
    """The same for arrays of one's own; NumPy views keep their strides on the way to `xp`."""
    on_device = {n: moved(xp, a) for n, a in options.items()}
    result = cufa.attention(*(moved(xp, a) for a in (q, k, v)), return_lse=True, **on_device)
    assert_within_rounding(result, exact(q, k, v, **options))
    return result


def moved(xp, a):
    """`a` in the library `xp`, a view with the same strides in a copy of its whole buffer."""
    if xp is np or not isinstance(a, np.ndarray):
        return a
    owner = a
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = a.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    copy = xp.asarray(owner.ravel(order="K").view(np.uint8))
    return xp.ndarray(a.shape, a.dtype, copy.data + start, a.strides)
