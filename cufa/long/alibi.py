"""ALiBi of a piece of the scores whose distances are not those of the piece itself.

Where all keys are on one side of ALiBi's diagonal, a score loses a number for its key and a number
for its row. The first is a bias; the second moves the row's lse, and nothing else.
"""

from __future__ import annotations

from typing import Any

from cufa.errors import UnsupportedError
from cufa.long.plan import Piece
from cufa.problem import Problem


def check(problem: Problem) -> None:
    """Raise if a piece could not have its part of ALiBi.

    Raises
    ------
    UnsupportedError
    """
    if problem.alibi_slopes and problem.band.diagonal != problem.seqlen_k - problem.seqlen_q:
        raise UnsupportedError(
            f"alibi_slopes are given with causal='top_left', {problem.seqlen_q} queries and "
            f"{problem.seqlen_k} keys; where lengths differ ALiBi needs causal=True here, or to be "
            "passed as a bias"
        )


def of_keys(xp: Any, piece: Piece, slopes: Any) -> Any:
    """What ALiBi takes from the scores of each key beyond what it takes from the row's nearest
    key, negative; shape (..., heads, 1, keys) for slopes (..., heads)."""
    first, last = piece.keys.start, piece.keys.stop - 1
    j = xp.arange(first, last + 1)
    distance = last - j if piece.side == "left" else j - first
    return -(slopes[..., None, None] * distance.astype(slopes.dtype))


def of_rows(xp: Any, problem: Problem, piece: Piece, slopes: Any) -> Any:
    """What ALiBi takes from the scores of each row's nearest key; shape (..., heads, rows)."""
    i = xp.arange(piece.rows.start, piece.rows.stop)
    i = i + problem.seqlen_k - problem.seqlen_q
    distance = i - (piece.keys.stop - 1) if piece.side == "left" else piece.keys.start - i
    return slopes[..., None] * distance.astype(slopes.dtype)


def moved(xp: Any, lse: Any, of_rows: Any, sign: int) -> Any:
    """The lse of a piece from what its call gives, which lacks what ALiBi takes of each row
    (`of_rows`), to that of the whole problem (`sign` -1), or back (1).

    A row that sees no key keeps -inf, also where what ALiBi takes is infinite.
    """
    return xp.where(lse == -xp.inf, lse, lse + sign * of_rows)
