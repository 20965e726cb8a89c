// What a block that owns keys has of a query tile in shared memory: Q, dO, lse and D.
#pragma once
#include "attn/row_numbers.cuh"
#include "ptx/barrier.cuh"
#include "tile/clear_rows.cuh"
#include "tile/copy_async.cuh"

struct QueryRows {
  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;  // of dO
  static constexpr int kTileBytes = TileQ::kBytes + TileO::kBytes;
  static constexpr int kBytes = kTileBytes + RowNumbers::kBytes;

  TileQ q;
  TileO dout;
  RowNumbers numbers;

  DEVICE QueryRows(u32 tiles, u32 of_numbers)
      : q{tiles}, dout{q.base + TileQ::kBytes}, numbers(of_numbers) {}

  DEVICE void load_async(const BackwardParams& p, const Tile& rows) const {
    copy_rows_async(q, rows.q(p), p.q_stride.row, rows.row0, p.seqlen_q, p.head_dim);
    copy_rows_async(dout, rows.dout(p), p.dout_stride.row, rows.row0, p.seqlen_q, p.head_dim_v);
    numbers.load_async(BackwardRows(p, rows), rows.row0);
    ptx::cp_async_commit_group();
  }

  // Until all that was loaded is there for all threads of the block. Rows past the end are empty
  // too.
  DEVICE void wait() const {
    ptx::cp_async_wait_group<0>();
    if (ptx::bar_red_or(numbers.finds_empty_row())) {
      clear_rows(dout, [&](int row) { return numbers.is_empty(row); });  // 0 * NaN is NaN
      ptx::bar_sync();                            // and are 0 for all
    }
  }
};
