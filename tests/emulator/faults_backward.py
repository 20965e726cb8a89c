"""Faults planted in the kernels of the backward pass; faults.py says what a row is."""

from __future__ import annotations

from emulator.faults import BOUNDS, OUTPUT, RACE, UNWRITTEN, WRONG, Fault

# fmt: off
FA2_BWD_SIMT = (
    # global memory
    Fault("a query past the end is loaded",                BOUNDS,     "plain",
          "tile/padded_tile.cuh", "first + row < rows ?", "first + row <= rows ?"),
    Fault("every query head has its own keys",             BOUNDS,     "grouped",
          "attn/key_tile.cuh", "kv_head * stride.head", "2 * kv_head * stride.head"),
    Fault("a key past the end is stored",                  OUTPUT,     "plain",
          "attn/epilogue.cuh", "if (row >= rows)", "if (row > rows)"),
    Fault("dQ is stored, not added",                       OUTPUT,     "plain",
          "fa2_bwd_simt.cu", "add_run(sums + i64(row) * kHeadDim + dq.col(c), run);",
          "for (int e = 0; e < kRun; ++e) sums[i64(row) * kHeadDim + dq.col(c) + e] = run[e];"),
    Fault("rows of the sums lie closer than they should",  WRONG,      "narrow",
          "fa2_bwd_simt.cu", "i64(row) * kHeadDim", "i64(row) * p.head_dim"),
    # barriers
    Fault("no barrier before Q and dO are read",           UNWRITTEN,  "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // Q and dO", "// Q and dO"),
    Fault("no barrier before P is read",                   UNWRITTEN,  "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // P is", "// P is"),
    Fault("dS is put where others still read P",           RACE,       "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // all have used P", "// all have used P"),
    Fault("no barrier before dS is read",                  RACE,       "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // dS is", "// dS is"),
    Fault("the next Q comes while others read this one",   RACE,       "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // all have used Q", "// all have used Q"),
    Fault("a thread goes past a barrier",                  RACE,       "plain",
          "fa2_bwd_simt.cu", "ptx::bar_sync(); // P is",
          "if (ptx::tid_x() != 5) ptx::bar_sync(); // P is"),
    # arithmetic
    Fault("the group's other heads are left out",          WRONG,      "grouped",
          "fa2_bwd_simt.cu", "member < p.group.value", "member < 1"),
    Fault("the first tile that sees a key is left out",    WRONG,      "causal",
          "attn/key_tile.cuh", "begin / kBlockM", "ceil_div(begin, kBlockM)"),
    Fault("the last tile that sees a key is left out",     WRONG,      "window",
          "attn/key_tile.cuh", "ceil_div(max_of(0, end), kBlockM)", "max_of(0, end) / kBlockM"),
    Fault("keys outside the band count",                   WRONG,      "causal",
          "attn/backward_simt.cuh", "if (keys.is_partial(n))", "if (kMask)"),
    Fault("dO of a row that sees no key counts",           WRONG,      "dead rows",
          "attn/backward_rows.cuh", "return lse[row] != infinity();", "return true;"),
    Fault("D is not subtracted",                           WRONG,      "plain",
          "attn/score_gradients.cuh", "(ds.at(r, c) - delta[r])", "ds.at(r, c)"),
    Fault("the cap is not differentiated",                 WRONG,      "softcap",
          "attn/score_gradients.cuh", "if constexpr (kThroughCap) multiply(ds, slope);", ""),
    Fault("P^T is read as if all its rows were one",       WRONG,      "plain",
          "tile/simt_fragment.cuh", "p_run[r / kRunP].x[r % kRunP]", "p_run[r / kRunP].x[0]"),
    Fault("dK lacks the scale",                            WRONG,      "plain",
          "fa2_bwd_simt.cu", "scale_row(dk, r, Real(p.scale))", "scale_row(dk, r, Real(1))"),
)
FA2_BWD_DQ_SIMT = (
    Fault("no barrier before K and V are read",            UNWRITTEN,  "plain",
          "fa2_bwd_dq_simt.cu", "ptx::bar_sync(); // K and", "// K and"),
    Fault("no barrier before dS is read",                  UNWRITTEN,  "plain",
          "fa2_bwd_dq_simt.cu", "ptx::bar_sync(); // dS", "// dS"),
    Fault("the next K comes while others read this one",   RACE,       "plain",
          "fa2_bwd_dq_simt.cu", "ptx::bar_sync(); // all", "// all"),
    Fault("a query past the end is stored",                OUTPUT,     "plain",
          "attn/epilogue.cuh", "if (row >= rows)", "if (row > rows)"),
    Fault("dQ lacks the scale",                            WRONG,      "plain",
          "fa2_bwd_dq_simt.cu", "Real(p.scale)", "Real(1)"),
)
FA2_BWD_DBIAS_SIMT = (
    Fault("no barrier before the tiles are read",          UNWRITTEN,  "plain",
          "fa2_bwd_dbias_simt.cu", "ptx::bar_sync(); // all four", "// all four"),
    Fault("the next tiles come while others read these",   RACE,       "repeated",
          "fa2_bwd_dbias_simt.cu", "ptx::bar_sync(); // all have", "// all have"),
    Fault("no barrier before the sums are read",           UNWRITTEN,  "plain",
          "fa2_bwd_dbias_simt.cu", "ptx::bar_sync(); // the sums", "// the sums"),
    Fault("no barrier between sums over keys and rows",    RACE,       "repeated",
          "fa2_bwd_dbias_simt.cu", "x.at(row, 0) += x.at(row, col); ptx::bar_sync();",
          "x.at(row, 0) += x.at(row, col);"),
    Fault("rows are not summed up",                        WRONG,      "repeated",
          "fa2_bwd_dbias_simt.cu", "if (stride.row == 0) sum_rows(", "if (false) sum_rows("),
    Fault("a batch is left out",                           WRONG,      "repeated",
          "fa2_bwd_dbias_simt.cu", "batch < batches.last", "batch < max_of(1, batches.last - 1)"),
    Fault("rows past the end are stored",                  OUTPUT,     "plain",
          "fa2_bwd_dbias_simt.cu", "min_of(kBlockM, p.seqlen_q - row0)", "kBlockM"),
    Fault("all blocks have the first tile of rows",        OUTPUT,     "plain",
          "fa2_bwd_dbias_simt.cu", "first = varies ? rest % count : 0;", "first = 0;"),
    Fault("the gradient goes back through the cap",        WRONG,      "softcap",
          "attn/score_gradients.cuh", "kSoftcap && kTo == Back::kProduct", "kSoftcap"),
)
BWD_ROWS = (
    Fault("a row past the end is read",                    BOUNDS,     "plain",
          "bwd_rows.cu", "row < p.seqlen_q", "row <= p.seqlen_q"),
    Fault("each lane keeps its part of D",                 WRONG,      "plain",
          "bwd_rows.cu", "delta = row_sum<kRowLanes>(delta);", ""),
    Fault("dlse is added",                                 WRONG,      "plain",
          "bwd_rows.cu", "delta -= static_cast", "delta += static_cast"),
    Fault("a row that sees no key has a D",                WRONG,      "dead rows",
          "bwd_rows.cu", "counts ? delta : Real(0)", "delta"),
    Fault("sums of dQ do not begin at 0",                  OUTPUT,     "plain",
          "bwd_rows.cu", "i < kBlockM * kHeadDim / kRealVec;", "i < kHeadDim / kRealVec;"),
    Fault("all lanes of a row write",                      OUTPUT,     "plain",
          "bwd_rows.cu", "if (ptx::tid_x() % kRowLanes != 0) continue;", ""),
)
BWD_QUERIES = (
    Fault("a query past the end is stored",                OUTPUT,     "plain",
          "bwd_queries.cu", "row >= p.seqlen_q", "row > p.seqlen_q"),
    Fault("dQ lacks the scale",                            WRONG,      "plain",
          "bwd_queries.cu", "* Real(p.scale)", ""),
)
BWD_SINK = (
    Fault("no barrier before the sums are read",           UNWRITTEN,  "plain",
          "bwd_sink.cu", "ptx::bar_sync();", ""),
    Fault("the first warp's sum counts alone",             WRONG,      "plain",
          "bwd_sink.cu", "i < kWarps; ++i) sum", "i < 1; ++i) sum"),
    Fault("the first batch counts alone",                  WRONG,      "plain",
          "bwd_sink.cu", "batch < p.batch", "batch < 1"),
    Fault("the gradient has the wrong sign",               WRONG,      "plain",
          "bwd_sink.cu", "sum -= exp2", "sum += exp2"),
)
# fmt: on
