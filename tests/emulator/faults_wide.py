"""Faults planted in fa2_fwd on float32 and float64; faults.py says what a row is."""

from __future__ import annotations

from emulator.faults import BOUNDS, CONFLICTS, WRONG, Fault

# fmt: off
_BOTH = (
    Fault("columns past the head dim are loaded",       BOUNDS,    "narrow",
          "tile/copy_async.cuh", "kWhole || right >= kChunk ? 16 :", "true ? 16 :"),
    Fault("weights are taken for other keys",           WRONG,     "plain",
          "tile/wide_fragment.cuh", "p.x[m][k][i % 2 * 2 + i / 2]", "p.x[m][k][i]"),
    Fault("every second key has its neighbour's value", WRONG,     "plain",
          "tile/wide_fragment.cuh", "v.origin(key + 1, chunk)", "v.origin(key, chunk)"),
    Fault("columns of the result lie elsewhere",        WRONG,     "plain",
          "tile/wide_fragment.cuh", "kPaired ? c / kChunk % 2 : c % 2", "c % 2"),
    Fault("rows of Q are those of another warp",        WRONG,     "plain",
          "tile/wide_fragment.cuh", "a_rows(a, 16 * kRowTiles * warp())", "a_rows(a, 0)"),
)
FA2_FWD_FLOAT32 = (
    *_BOTH,
    Fault("Q is its rounded part twice",                WRONG,     "plain",
          "tile/wide_fragment.cuh", "(small, a.low, b.high[0]", "(small, a.high, b.high[0]"),
    Fault("what TF32 lacks of K is left out",           WRONG,     "plain",
          "tile/wide_fragment.cuh", "(small, a.high, b.low[0], b.low[1])", "(small, a.high, 0, 0)"),
    Fault("what TF32 lacks of V is left out",           WRONG,     "plain",
          "tile/wide_fragment.cuh", "(x, a.high, b.low[0], b.low[1])", "(x, a.high, 0, 0)"),
    Fault("small products are not added",               WRONG,     "plain",
          "tile/wide_fragment.cuh", "large[i] + small[i] * (1 / kLift)", "large[i]"),
    Fault("a block's output takes the place of O",      WRONG,     "plain",
          "tile/wide_fragment.cuh", "to[i] += x[i];", "to[i] = x[i];"),
    Fault("8 rows of K are the same",                   WRONG,     "plain",
          "tile/wide_fragment.cuh", "(lane() >> 4) * 8, lane() >> 3", "0, lane() >> 3"),
    Fault("Q is read without its swizzle",              CONFLICTS, "plain",
          "tile/swizzled_tile.cuh", "chunk ^ (row & 7)", "chunk"),
)
FA2_FWD_FLOAT64 = (
    *_BOTH,
    Fault("exp2 lacks a coefficient",                   WRONG,     "plain",
          "base/math.cuh", "y = y * f + 7.074194297288521e-09;", ""),
    Fault("exp2 rounds down",                           WRONG,     "plain",
          "base/math.cuh", "f = x - (n - kRound)", "f = x - (n - kRound) - 1"),
    Fault("half of the columns are read twice",         WRONG,     "plain",
          "tile/wide_fragment.cuh", "step ? address ^ 16 : address", "address"),
    Fault("O begins anew with each block",              WRONG,     "plain",
          "tile/wide_fragment.cuh", "x[i] = from[i];", "x[i] = 0;"),
)
# fmt: on
