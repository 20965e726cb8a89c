// FlashAttention-2 backward on CUDA cores, by queries: dQ alone, with no sum that depends on the
// order of blocks. Every dtype, any alignment, sm_70 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2, its loops exchanged.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows)
//   out   dq [B, H, Tq, D]
//   grid  B * H * ceil(Tq / kBlockM)            block kThreads; half a warp owns kRowsQ rows
//   smem  BackwardTiles, in the accumulator's type
#include "attn/backward_simt.cuh"
#include "attn/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_dq_simt(const __grid_constant__ BackwardParams p) {
  const Tile tile(p, ptx::ctaid_x());              // which rows, which head, which sequence
  const KeyRange keys = visible_keys(p, tile);     // blocks that no row can see are never loaded
  const BackwardTiles smem(ptx::dynamic_smem());
  smem.load_queries(p, tile);
  GradientQ dq;
  dq.clear();

  for (int n = keys.first; n < keys.last; ++n) {
    smem.load_keys(p, tile, n * kBlockN);
    ptx::bar_sync();                               // K and V of block n are here, and Q and dO
    Scores s, ds;
    smem.gradients<Back::kProduct>(s, ds, p, tile, keys, n);
    store_tile(smem.scores, ds);
    ptx::bar_sync();                               // dS is here
    matmul_nn(dq, smem.scores, smem.k);            // dQ += dS K
    ptx::bar_sync();                               // all have used K, V and dS
  }

#pragma unroll
  for (int r = 0; r < kRowsQ; ++r) scale_row(dq, r, Real(p.scale));
  store_rows(dq, tile.row0, p.seqlen_q, p.head_dim,
             [&](int row) { return tile.dq(p) + row * p.dq_stride.row; });
}
