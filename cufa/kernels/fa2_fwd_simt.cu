// FlashAttention-2 forward on CUDA cores: every dtype, any alignment, sm_70 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 1.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32 (float64 for float64), natural log
//   grid  B * H * ceil(Tq / kBlockM)            block kThreads; half a warp owns kRows rows
//   smem  one tile each of Q, K, V and P in the accumulator's type; K and V share a place if kStages is 1
#include "attn/epilogue.cuh"
#include "attn/key_range.cuh"
#include "attn/softmax.cuh"
#include "ptx/barrier.cuh"
#include "tile/simt_fragment.cuh"

constexpr int kRows = kBlockM * kColumnLanes / kThreads;
using Scores = SimtFragment<kRows, kBlockN / kColumnLanes, 1>;
using Output = SimtFragment<kRows, kHeadDimV / kColumnLanes, kHeadDimV % 64 == 0 ? kRealVec : 2>;
using TileQ = PaddedTile<kBlockM, kHeadDim>;
using TileK = PaddedTile<kBlockN, kHeadDim>;
using TileV = PaddedTile<kBlockN, kHeadDimV>;
using TileP = PaddedTile<kBlockM, kBlockN>;

constexpr bool kOnePlace = kStages == 1;
constexpr int kKeyBytes = kOnePlace && TileV::kBytes > TileK::kBytes ? TileV::kBytes : TileK::kBytes;
constexpr int kValueBytes = kOnePlace ? 0 : TileV::kBytes;
static_assert(kBlockM == kRows * kThreads / kColumnLanes && kBlockN % kColumnLanes == 0);
static_assert(kSmemBytes == TileQ::kBytes + TileP::kBytes + kKeyBytes + kValueBytes, "gpu/plan.py");

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) fa2_fwd_simt(const __grid_constant__ Params p) {
  const Tile tile(p, ptx::ctaid_x());           // which rows, which head, which sequence
  const KeyRange keys = visible_keys(p, tile);  // blocks that no row can see are never loaded
  u8* smem = ptx::dynamic_smem();
  const TileQ q{reinterpret_cast<Real*>(smem)};
  const TileP prob{reinterpret_cast<Real*>(smem + TileQ::kBytes)};
  const TileK k{reinterpret_cast<Real*>(smem + TileQ::kBytes + TileP::kBytes)};
  const TileV v{reinterpret_cast<Real*>(smem + TileQ::kBytes + TileP::kBytes + (kOnePlace ? 0 : kKeyBytes))};

  copy_rows(q, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
  Output o;
  o.clear();
  OnlineSoftmax<kRows> softmax(exponent_scale(p));

  for (int n = keys.first; n < keys.last; ++n) {
    copy_rows(k, tile.k(p), p.k_stride.row, n * kBlockN, p.seqlen_k, p.head_dim);
    if constexpr (!kOnePlace) copy_rows(v, tile.v(p), p.v_stride.row, n * kBlockN, p.seqlen_k, p.head_dim_v);
    ptx::bar_sync();
    Scores s;
    matmul_nt(s, q, k);                         // S = Q K^T
    const int key0 = n * kBlockN;
    score_mod(s, p, tile, key0);
    if (keys.is_partial(n)) apply_mask(s, p, tile, key0);
    softmax.update(s, o);                       // S becomes P; O follows the new row maximum
    store_tile(prob, s);
    ptx::bar_warp_sync();                       // P is exchanged inside half a warp only
    if constexpr (kOnePlace) {
      ptx::bar_sync();                          // all have used K
      copy_rows(v, tile.v(p), p.v_stride.row, n * kBlockN, p.seqlen_k, p.head_dim_v);
      ptx::bar_sync();
    }
    matmul_nn(o, prob, v);                      // O += P V
    ptx::bar_sync();                            // all have used block n: its place is free
  }

  Real lse[kRows];
  softmax.finish(o, sink_of(p, tile), lse);
  store_output(o, p, tile);
  store_lse(o, lse, p, tile);
}
