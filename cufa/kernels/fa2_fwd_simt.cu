// FlashAttention-2 forward on CUDA cores: every dtype, any alignment, sm_70 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 1.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32 (float64 for float64), natural log
//   grid  B * H * ceil(Tq / kBlockM)            block kThreads; half a warp owns kRows rows
//   smem  one tile of Q, one of P, one that K and V use in turn, in the accumulator's type
#include "attn/drop_weights.cuh"
#include "attn/epilogue.cuh"
#include "attn/key_range.cuh"
#include "attn/score_mod.cuh"
#include "attn/softmax.cuh"
#include "ptx/barrier.cuh"
#include "tile/simt_fragment.cuh"

constexpr int kRows = kBlockM * kColumnLanes / kThreads;
using Scores = SimtFragment<kRows, kBlockN / kColumnLanes, 1>;
constexpr int kRun = kHeadDimV / kColumnLanes % kRealVec == 0 ? kRealVec : 2;
using Output = SimtFragment<kRows, kHeadDimV / kColumnLanes, kRun>;
using TileQ = PaddedTile<kBlockM, kHeadDim>;
using TileP = PaddedTile<kBlockM, kBlockN>;
using TileK = PaddedTile<kBlockN, kHeadDim>;
using TileV = PaddedTile<kBlockN, kHeadDimV>;

static_assert(kBlockM == kRows * kThreads / kColumnLanes && kBlockN % kColumnLanes == 0);
static_assert(kSmemBytes == TileQ::kBytes + TileP::kBytes + max_of(TileK::kBytes, TileV::kBytes),
              "gpu/config.py");
static_assert(kStages == 1);

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_fwd_simt(const __grid_constant__ Params p) {
  const Tile tile(p, ptx::ctaid_x());           // which rows, which head, which sequence
  const KeyRange keys = visible_keys(p, tile);  // blocks that no row can see are never loaded
  u8* smem = ptx::dynamic_smem();
  const TileQ q_smem{reinterpret_cast<Real*>(smem)};
  const TileP p_smem{reinterpret_cast<Real*>(smem + TileQ::kBytes)};
  const TileK k_smem{reinterpret_cast<Real*>(smem + TileQ::kBytes + TileP::kBytes)};
  const TileV v_smem{k_smem.base};

  copy_rows(q_smem, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
  Output o;
  o.clear();
  OnlineSoftmax<kRows> softmax(p);

  for (int n = keys.first; n < keys.last; ++n) {
    const int key0 = n * kBlockN;
    copy_rows(k_smem, tile.k(p), p.k_stride.row, key0, p.seqlen_k, p.head_dim);
    ptx::bar_sync();                            // Q and K of block n are here
    Scores s;
    matmul_nt(s, q_smem, k_smem);               // S = Q K^T
    score_mod(s, p, tile, key0);
    if (keys.is_partial(n)) apply_mask(s, p, tile, key0);
    softmax.update(s, o);                       // S becomes P; O follows the row maximum
    drop_weights(s, p, tile, key0);             // dropped ones become 0
    store_tile(p_smem, s);
    ptx::bar_sync();                            // all have used K; P is here
    copy_rows(v_smem, tile.v(p), p.v_stride.row, key0, p.seqlen_k, p.head_dim_v);
    ptx::bar_sync();                            // V of block n is here
    matmul_nn(o, p_smem, v_smem);               // O += P V
    ptx::bar_sync();                            // all have used V: its place is free for K
  }

  Real lse[kRows];
  softmax.finish(o, p, tile, lse);              // divides by l
  store_output(o, p, tile);
  store_lse(o, lse, p, tile);
}
