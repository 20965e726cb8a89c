// dQ from what the warps of all key tiles have added up: float16 and bfloat16, sm_80 and later.
//
//   in    workspace          BackwardRows, whose dq_sums are SumTiles
//   out   dq [B, H, Tq, D]   rows 16-byte aligned
//   grid  B * H * ceil(Tq / kBlockM)             block kThreads; a warp has 16 rows
#include "attn/backward_rows.cuh"
#include "attn/store_pairs.cuh"
#include "tile/sum_tiles.cuh"

static_assert(kBlockM == kThreads / 2 && kAligned);

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
bwd_queries_mma(const __grid_constant__ BackwardParams p) {
  using Sums = SumTiles<kHeadDim>;
  const Tile tile(p, ptx::ctaid_x());
  const f32* sums = BackwardRows(p, tile).dq_sums + i64(tile.row0) * kHeadDim;
#pragma unroll
  for (int col = 0; col < kHeadDim; col += 32) {
    MmaFragment<1, 4> dq;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      Sums::load(dq.x[0][n], sums + Sums::place(16 * warp(), col + 8 * n));
#pragma unroll
    for (int c = 0; c < dq.kCols; ++c) dq.at(0, c) *= Real(p.scale), dq.at(1, c) *= Real(p.scale);
    store_pairs(dq, tile.dq(p) + col, p.dq_stride.row, tile.row0, p.seqlen_q, p.head_dim - col);
  }
}
