"""Faults planted in dropout, in the kernels that it is part of; faults.py says what a row is."""

from __future__ import annotations

from emulator.faults import WRONG, Fault

# fmt: off
_DROP, _SOFTMAX = "attn/drop_weights.cuh", "attn/softmax.cuh"
FA2_FWD = (
    Fault("nothing is dropped",                            WRONG,      "dropout",
          "fa2_fwd.cu", "drop_weights(s, p, tile, key0);", ""),
    Fault("what is kept makes up for nothing",             WRONG,      "dropout",
          _SOFTMAX, "rescale * kept_scale(p) / sum", "rescale / sum"),
    Fault("dropped weights are not in the row sums",       WRONG,      "dropout",
          "fa2_fwd.cu", "softmax.update(s, o);",
          "Real l[4]; for (int r = 0; r < s.kRows; ++r) l[r] = softmax.l[r]; softmax.update(s, o); "
          "drop_weights(s, p, tile, key0); for (int r = 0; r < s.kRows; ++r) { "
          "softmax.l[r] = l[r]; for (int c = 0; c < s.kCols; ++c) softmax.l[r] += s.at(r, c); }"),
    Fault("all heads drop the same",                       WRONG,      "dropout",
          _DROP, "tile.batch, tile.head, row", "tile.batch, 0, row"),
    Fault("heads that share keys drop the same",           WRONG,      "dropout",
          _DROP, "tile.batch, tile.head, row", "tile.batch, tile.kv_head, row"),
    Fault("all tiles of queries drop the same",            WRONG,      "dropout",
          _DROP, "row = tile.row0 + Fragment::row", "row = Fragment::row"),
    Fault("all blocks of keys drop the same",              WRONG,      "dropout",
          _DROP, "key = key0 + Fragment::col", "key = Fragment::col"),
    Fault("rows 8 apart drop the same",                    WRONG,      "dropout",
          _DROP, "Fragment::kRowHalf ? (kByRow ? i : j) :", "Fragment::kRowHalf ? 0 :"),
    Fault("columns 8 apart change places",                 WRONG,      "dropout",
          _DROP, "<< (b + j * kBitHalf)", "<< (b + !j * kBitHalf)"),
    Fault("turns come in the other order",                 WRONG,      "dropout",
          _DROP, "first = kBits - kTurn; first >= 0; first -= kTurn",
          "first = 0; first < kBits; first += kTurn"),
    Fault("the upper half of the seed does not count",     WRONG,      "dropout",
          "attn/dropout.cuh", "u32(seed >> 32)", "0"),
    Fault("one round too few",                             WRONG,      "dropout",
          "attn/dropout.cuh", "round < 10", "round < 9"),
    Fault("what is kept is dropped",                       WRONG,      "dropout",
          "attn/dropout.cuh", ">= threshold", "< threshold"),
)
FA2_FWD_FLOAT32 = (
    Fault("columns side by side take each other's words",  WRONG,      "dropout",
          _DROP, "key = key0 + Fragment::col(kByRow ? first + b : w)",
          "key = key0 + (Fragment::col(kByRow ? first + b : w) ^ 1)"),
)
FA2_FWD_SIMT = (
    Fault("nothing is dropped",                            WRONG,      "dropout",
          "fa2_fwd_simt.cu", "drop_weights(s, p, tile, key0);", ""),
    Fault("every row counts as one of the upper half",     WRONG,      "dropout",
          _DROP, ": row >> 3 & 1", ": 0"),
    Fault("every key counts as one of the first half",     WRONG,      "dropout",
          _DROP, ": key >> 3 & 1", ": 0"),
)
FA1_FWD = (
    Fault("rows that lie elsewhere count as pairs",        WRONG,      "dropout",
          "tile/mma_slices.cuh", "kRowHalf = 0", "kRowHalf = 1"),
    Fault("what is kept makes up for nothing",             WRONG,      "dropout",
          "attn/running_rows.cuh", "kSink || kDropout", "kSink"),
    Fault("tiles after the first drop as the first",       WRONG,      "dropout",
          "fa1_fwd.cu", "drop_weights(s, p, tile, key0);",
          "drop_weights(s, p, tiles.tile(tiles.first), key0);"),
)
FA1_FWD_SIMT = (
    Fault("the second half drops as other rows",           WRONG,      "dropout",
          "fa1_fwd_simt.cu", "drop_weights(s, p, numbered,", "drop_weights(s, p, tile,"),
    Fault("the second half drops as the first keys",       WRONG,      "dropout",
          "fa1_fwd_simt.cu", "drop_weights(s, p, numbered, key0 + slice() * kSlice)",
          "drop_weights(s, p, numbered, key0)"),
)
FA3_FWD_SM90 = (
    Fault("nothing of a tile's first block is dropped",    WRONG,      "dropout",
          "fa3_fwd_sm90.cu",
          "softmax.begin(s); drop_weights(s, p, job.tile, block.n * kBlockN);",
          "softmax.begin(s);"),
    Fault("nothing of its other blocks is dropped",        WRONG,      "dropout",
          "fa3_fwd_sm90.cu", "drop_weights(s, p, job.tile, block.n * kBlockN); "
          "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<0>();"),
)
FA2_BWD = (
    Fault("nothing is marked",                             WRONG,      "dropout",
          "fa2_bwd.cu", "KeptWeights<Scores>(p, part, key0).mark(s);", ""),
    Fault("marked weights are in dV",                      WRONG,      "dropout",
          "fa2_bwd.cu", "drop_marked(weights);", ""),
    Fault("dV makes up for nothing",                       WRONG,      "dropout",
          "fa2_bwd.cu", "scale_row(sums, r, kept_scale(p));", ";"),
    Fault("what is dropped has a dP",                      WRONG,      "dropout",
          "attn/score_changes.cuh", "(is_dropped ? 0.f : dp * kept_scale(p))",
          "dp * kept_scale(p)"),
    Fault("a mark makes the weight negative",              WRONG,      "dropout",
          "attn/score_changes.cuh", "abs_of(weight) *", "weight *"),
    Fault("of a pair only the first is dropped",           WRONG,      "dropout",
          "attn/score_changes.cuh", "0x10001", "0x1"),
    Fault("rows that lie elsewhere count as pairs",        WRONG,      "dropout",
          "tile/transposed.cuh", "kRowHalf = Fragment::kColHalf,", "kRowHalf = 1,"),
)
FA2_BWD_SIMT = (
    Fault("what is dropped has a dP",                      WRONG,      "dropout",
          "attn/score_gradients.cuh", "kept.drop(ds);", ""),
    Fault("dropped weights are in dV",                     WRONG,      "dropout",
          "attn/score_gradients.cuh", "kept.multiply(s);", ""),
    Fault("dP makes up for nothing",                       WRONG,      "dropout",
          "attn/score_gradients.cuh", "ds.at(r, c) * kept_scale(p)", "ds.at(r, c)"),
    Fault("dV makes up for nothing",                       WRONG,      "dropout",
          "fa2_bwd_simt.cu", "scale_row(dv, r, kept_scale(p));", ";"),
)
# fmt: on
