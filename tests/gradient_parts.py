"""How large the parts are that a gradient is summed up from, where each of them is rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cufa import reference
from cufa.testing import Case


def largest_sums(case: Case) -> dict[str, Any]:
    """By gradient, in its shape, the largest that a row of it adds up to without signs; no part of
    it is larger, whatever queries and keys it is over."""
    plain = replace(case, layout="bhsd", rank=4)
    q, k, v = plain.arrays(np)
    options = plain.options(np)
    scores = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    bias = np.zeros(scores) + options.pop("bias", 0)
    (dout, _), dlse = plain.back(np), np.reshape(case.back(np)[1], plain.back(np)[1].shape)
    with np.errstate(all="ignore"):
        ds = abs(reference.gradients(dout, q, k, v, dlse=dlse, bias=bias, **options).dbias)
        ds = ds * (case.head_dim**-0.5 if case.scale is None else abs(case.scale))
        _, lse = reference.attention(q, k, v, bias=bias, **options)
        lse = lse.reshape(*scores[:3], 1)
        options.pop("sink", None)
        s = reference.scores(q, k, bias=bias, **options)
        p = np.exp(s - np.where(lse == -np.inf, 0, lse))
        q, k, dout = (abs(a.astype(np.float64)) for a in (q, k, dout))
        sizes = {
            "dq": ds @ reference.per_query_head(k, case.heads),
            "dk": _by_key_head(case, ds.swapaxes(2, 3) @ q),
            "dv": _by_key_head(case, p.swapaxes(2, 3) @ dout),
        }
    found = {}
    for name, size in sizes.items():
        most = np.nan_to_num(size, posinf=np.inf).max(-1, keepdims=True, initial=0)
        found[name] = case.caller_axes(np.broadcast_to(most, size.shape))
    return found


def _by_key_head(case: Case, a: Any) -> Any:
    return a.reshape(case.batch, case.kv_heads, case.group, *a.shape[2:]).sum(2)
