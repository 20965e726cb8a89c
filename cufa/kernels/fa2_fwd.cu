// FlashAttention-2 forward on mma.sync tensor cores, every dtype; sm_80 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 1.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   rows 16-byte aligned
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32 (float64 for float64), natural log
//   grid  B * H * ceil(Tq / kBlockM)            block kThreads; a warp owns kBlockM / warps rows
//   smem  one tile of Q, one of K, one of V
#include "attn/drop_weights.cuh"
#include "attn/epilogue_mma.cuh"
#include "attn/key_range.cuh"
#include "attn/score_mod.cuh"
#include "attn/softmax.cuh"
#include "ptx/barrier.cuh"
#include "tile/copy_async.cuh"
#include "tile/matrix_unit.cuh"
#include "tile/tf32.cuh"

using TileQ = SwizzledTile<kBlockM, kHeadDim>;
using TileK = SwizzledTile<kBlockN, kHeadDim>;
using TileV = SwizzledTile<kBlockN, kHeadDimV>;
constexpr int kWarps = kThreads / 32;
constexpr int kRowTiles = kBlockM / (16 * kWarps);

static_assert(kBlockM == kRowTiles * 16 * kWarps, "every warp owns whole 16-row tiles");
static_assert(kSmemBytes == TileQ::kBytes + TileK::kBytes + TileV::kBytes, "gpu/config.py");
static_assert(kAligned && kStages == 1);

// One tile of queries. With kCheck: false, and nothing stored, if a result is not finite, or small.
template <class Unit, bool kCheck> DEVICE bool attend(const Params& p) {
  using Scores = typename Unit::template Scores<kRowTiles, kBlockN / 8>;
  using Output = typename Unit::template Output<kRowTiles, kHeadDimV / 8>;
  const Tile tile(p, ptx::ctaid_x());           // which rows, which head, which sequence
  const KeyRange keys = visible_keys(p, tile);  // blocks that no row can see are never loaded
  const u32 smem = ptx::smem_address(ptx::dynamic_smem());
  const TileQ q_smem{smem};
  const TileK k_smem{smem + TileQ::kBytes};
  const TileV v_smem{smem + TileQ::kBytes + TileK::kBytes};
  const auto load_k = [&](int n) {
    copy_rows_async(k_smem, tile.k(p), p.k_stride.row, n * kBlockN, p.seqlen_k, p.head_dim);
    ptx::cp_async_commit_group();
  };
  const auto load_v = [&](int n) {
    copy_rows_async(v_smem, tile.v(p), p.v_stride.row, n * kBlockN, p.seqlen_k, p.head_dim_v);
    ptx::cp_async_commit_group();
  };

  Output o;
  o.clear();
  OnlineSoftmax<Output::kRows> softmax(p);
  if (keys.first < keys.last) {
    copy_rows_async(q_smem, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
    load_k(keys.last - 1);                      // in one group with Q
  }
  // From the last block down: where keys have no bound on the left, the loop ends at 0, which takes
  // no register.
  for (int n = keys.last - 1; n >= keys.first; --n) {
    const int key0 = n * kBlockN;
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();                            // K of block n is here, V of block n + 1 was used
    load_v(n);                                  // runs under S = Q K^T
    Scores s;
    matmul_nt(s, q_smem, k_smem);               // S = Q K^T
    score_mod(s, p, tile, key0);
    if (keys.is_partial(n)) apply_mask(s, p, tile, key0);
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();                            // V of block n is here, K of block n was used
    if (n > keys.first) load_k(n - 1);          // runs under all that follows
    softmax.update(s, o);                       // S becomes P; O follows the row maximum
    drop_weights(s, p, tile, key0);             // dropped ones become 0
    matmul_nn(o, narrow(s), v_smem);            // O += P V
  }

  Real lse[Output::kRows];
  softmax.finish(o, p, tile, lse);              // divides by l
  if constexpr (kCheck)
    if (ptx::bar_red_or(!is_within(o, kLeastSplit * kept_scale(p)))) return false;
  store_output(o, p, tile);
  store_lse(o, lse, p, tile);
  return true;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_fwd(const __grid_constant__ Params p) {
  if constexpr (kDType == kFloat32) {
    // An infinity is no sum of two TF32 numbers. Whatever it meets becomes NaN, down to the output,
    // and the tile is done again as float32 has it; so it is where values are very small.
    if (!attend<TensorCores<true>, true>(p)) attend<CudaCores, false>(p);
  } else {
    attend<TensorCores<kDType == kFloat64>, false>(p);
  }
}
