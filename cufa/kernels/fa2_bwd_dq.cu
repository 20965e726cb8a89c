// FlashAttention-2 backward on mma.sync tensor cores, by queries: dQ alone, with no sum that
// depends on the order of blocks. float16 and bfloat16, sm_80 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2, its loops exchanged.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows); rows 16-byte aligned
//   out   dq [B, H, Tq, D]
//   grid  B * H * ceil(Tq / kBlockM)            block kThreads; a warp owns kBlockM / warps rows
//   smem  one tile of Q, one of dO, two of K and of V that take turns
#include "attn/key_range.cuh"
#include "attn/score_gradients.cuh"
#include "attn/store_pairs.cuh"
#include "ptx/barrier.cuh"
#include "tile/clear_rows.cuh"
#include "tile/copy_async.cuh"

using TileQ = SwizzledTile<kBlockM, kHeadDim>;
using TileO = SwizzledTile<kBlockM, kHeadDimV>;  // of dO
using TileK = SwizzledTile<kBlockN, kHeadDim>;
using TileV = SwizzledTile<kBlockN, kHeadDimV>;
constexpr int kRowTiles = kBlockM / (kThreads / 2);
using Scores = MmaFragment<kRowTiles, kBlockN / 8>;
using GradientQ = MmaFragment<kRowTiles, kHeadDim / 8>;

static_assert(kBlockM == kRowTiles * kThreads / 2, "every warp owns whole 16-row tiles");
static_assert(kSmemBytes == TileQ::kBytes + TileO::kBytes + 2 * (TileK::kBytes + TileV::kBytes),
              "gpu/config.py");
static_assert(kAligned && kStages == 2);

// K and V of one block of keys
struct Keys {
  TileK k;
  TileV v;

  DEVICE Keys(u32 smem, int n)
      : k{smem + n % 2 * (TileK::kBytes + TileV::kBytes)}, v{k.base + TileK::kBytes} {}

  DEVICE void load_async(const Params& p, const Tile& tile, int n) const {
    copy_rows_async(k, tile.k(p), p.k_stride.row, n * kBlockN, p.seqlen_k, p.head_dim);
    copy_rows_async(v, tile.v(p), p.v_stride.row, n * kBlockN, p.seqlen_k, p.head_dim_v);
    ptx::cp_async_commit_group();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_dq(const __grid_constant__ BackwardParams p) {
  const Tile tile(p, ptx::ctaid_x());             // which rows, which head, which sequence
  const KeyRange keys = visible_keys(p, tile);    // blocks that no row can see are never loaded
  const TileQ q_smem{ptx::smem_address(ptx::dynamic_smem())};
  const TileO dout_smem{q_smem.base + TileQ::kBytes};
  const u32 pairs = dout_smem.base + TileO::kBytes;

  const BackwardRows rows(p, tile);
  GradientQ dq;
  dq.clear();
  if (keys.first < keys.last) {
    copy_rows_async(q_smem, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
    copy_rows_async(dout_smem, tile.dout(p), p.dout_stride.row, tile.row0, p.seqlen_q,
                    p.head_dim_v);
    Keys(pairs, keys.first).load_async(p, tile, keys.first);  // in one group with Q and dO
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();                              // dO is here
    clear_rows(dout_smem, [&](int row) { return !rows.sees_keys(tile.row0 + row); });
  }
  for (int n = keys.first; n < keys.last; ++n) {
    const Keys now(pairs, n);
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();                              // K and V of block n are here, n - 1 was used
    if (n + 1 < keys.last) Keys(pairs, n + 1).load_async(p, tile, n + 1);  // runs under the rest
    Scores s, ds;
    const int key0 = n * kBlockN;
    matmul_nt(s, q_smem, now.k);                  // S = Q K^T
    const auto hide = [&](Scores& x) {
      if (keys.is_partial(n)) apply_mask(x, p, tile, key0);
    };
    score_gradients<Back::kProduct>(              // S becomes P, dP becomes dS
        s, ds, p, tile, key0, rows.lse + tile.row0, rows.delta + tile.row0, hide,
        [&](Scores& x) { matmul_nt(x, dout_smem, now.v); });  // dP = dO V^T
    matmul_nn(dq, narrow(ds), now.k);             // dQ += dS K
  }

#pragma unroll
  for (int r = 0; r < dq.kRows; ++r) scale_row(dq, r, Real(p.scale));
  store_pairs(dq, tile.dq(p), p.dq_stride.row, tile.row0, p.seqlen_q, p.head_dim);
}
