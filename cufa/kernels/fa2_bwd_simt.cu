// FlashAttention-2 backward on CUDA cores, by keys: every dtype, any alignment, sm_70 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows)
//   out   dk [B, Hkv, Tk, D]   dv [B, Hkv, Tk, Dv]
//         dQ without the scale, added to the workspace (then bwd_queries)
//   grid  B * Hkv * ceil(Tk / kBlockN)          block kThreads; half a warp owns kRowsQ rows
//   smem  BackwardTiles, in the accumulator's type
#include "attn/backward_simt.cuh"
#include "attn/epilogue.cuh"
#include "attn/key_tile.cuh"

// dQ of all key tiles meets in global memory.
DEVICE void add_rows(GradientQ& dq, const BackwardParams& p, const Tile& tile) {
  Real* sums = BackwardRows(p, tile).dq_sums;
#pragma unroll
  for (int r = 0; r < kRowsQ; ++r) {
    const int row = tile.row0 + dq.row(r);
    if (row >= p.seqlen_q) continue;
#pragma unroll
    for (int c = 0; c < GradientQ::kCols; c += kRun) {
      if (dq.col(c) >= p.head_dim) continue;
      Real run[kRun];
#pragma unroll
      for (int e = 0; e < kRun; ++e) run[e] = dq.at(r, c + e);
      add_run(sums + i64(row) * kHeadDim + dq.col(c), run);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_simt(const __grid_constant__ BackwardParams p) {
  const KeyTile own(p, ptx::ctaid_x());            // which keys, which head, which sequence
  const QueryRange rows = own.rows_that_see(p);  // tiles that see none of them are never loaded
  const BackwardTiles smem(ptx::dynamic_smem());
  smem.load_keys(p, own, own.key0());
  GradientK dk;
  GradientV dv;
  dk.clear();
  dv.clear();

  for (int member = 0; member < p.group.value; ++member)
    for (int i = rows.first; i < rows.last; ++i) {
      const Tile tile = own.queries(p, member, i);
      const KeyRange keys = visible_keys(p, tile);
      smem.load_queries(p, tile);
      ptx::bar_sync();                             // Q and dO are here, and K and V
      Scores s, ds;
      smem.gradients<Back::kProduct>(s, ds, p, tile, keys, own.index);
      if constexpr (kDv) {
        store_tile(smem.scores, s);
        ptx::bar_sync();                           // P is here
        matmul_tn(dv, smem.scores, smem.dout);     // dV += P^T dO
        ptx::bar_sync();                           // all have used P: its place is free for dS
      }
      if constexpr (kDk || kDq) {
        store_tile(smem.scores, ds);
        ptx::bar_sync();                           // dS is here
        if constexpr (kDk) matmul_tn(dk, smem.scores, smem.q);  // dK += dS^T Q
        if constexpr (kDq) {
          GradientQ dq;
          dq.clear();
          matmul_nn(dq, smem.scores, smem.k);      // dQ += dS K
          add_rows(dq, p, tile);
        }
        ptx::bar_sync();                           // all have used Q, dO and dS
      }
    }

  if constexpr (kDk) {
#pragma unroll
    for (int r = 0; r < kRowsK; ++r) scale_row(dk, r, Real(p.scale));
    store_rows(dk, own.key0(), p.seqlen_k, p.head_dim,
               [&](int row) { return own.dk(p) + row * p.dk_stride.row; });
  }
  if constexpr (kDv) {
    if constexpr (kDropout) {
#pragma unroll
      for (int r = 0; r < kRowsK; ++r) scale_row(dv, r, kept_scale(p));
    }
    store_rows(dv, own.key0(), p.seqlen_k, p.head_dim_v,
               [&](int row) { return own.dv(p) + row * p.dv_stride.row; });
  }
}
