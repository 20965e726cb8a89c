// What the backward kernels on CUDA cores share: fragments, places in shared memory, and the step
// from loaded tiles to P and dS.
#pragma once
#include "attn/key_range.cuh"
#include "attn/score_gradients.cuh"
#include "ptx/barrier.cuh"
#include "tile/simt_fragment.cuh"

constexpr int kRowsQ = kBlockM * kColumnLanes / kThreads;  // of a thread
constexpr int kRowsK = kBlockN * kColumnLanes / kThreads;
static_assert(kRowsQ * kThreads == kBlockM * kColumnLanes && kBlockN % kColumnLanes == 0);

constexpr int kRun = kHeadDim / kColumnLanes % kRealVec == 0 ? kRealVec : 2;
constexpr int kRunV = kHeadDimV / kColumnLanes % kRealVec == 0 ? kRealVec : 2;
using Scores = SimtFragment<kRowsQ, kBlockN / kColumnLanes, 1>;
using GradientQ = SimtFragment<kRowsQ, kHeadDim / kColumnLanes, kRun>;
using GradientK = SimtFragment<kRowsK, kHeadDim / kColumnLanes, kRun>;
using GradientV = SimtFragment<kRowsK, kHeadDimV / kColumnLanes, kRunV>;

// One tile each of Q, dO, K, V, and one that P and dS use in turn.
struct BackwardTiles {
  using TileQ = PaddedTile<kBlockM, kHeadDim>;
  using TileO = PaddedTile<kBlockM, kHeadDimV>;
  using TileK = PaddedTile<kBlockN, kHeadDim>;
  using TileV = PaddedTile<kBlockN, kHeadDimV>;
  using TileP = PaddedTile<kBlockM, kBlockN>;
  static constexpr int kAtO = TileQ::kBytes, kAtK = kAtO + TileO::kBytes;
  static constexpr int kAtV = kAtK + TileK::kBytes, kAtP = kAtV + TileV::kBytes;
  static_assert(kSmemBytes == kAtP + TileP::kBytes, "gpu/config.py");

  TileQ q;
  TileO dout;
  TileK k;
  TileV v;
  TileP scores;

  DEVICE explicit BackwardTiles(u8* smem)
      : q{reinterpret_cast<Real*>(smem)},
        dout{reinterpret_cast<Real*>(smem + kAtO)},
        k{reinterpret_cast<Real*>(smem + kAtK)},
        v{reinterpret_cast<Real*>(smem + kAtV)},
        scores{reinterpret_cast<Real*>(smem + kAtP)} {}

  // Loads keep kFlying runs of 16 bytes a thread under way; float64 has no registers for more.
  static constexpr int kFlying = kRealVec;

  DEVICE void load_queries(const BackwardParams& p, const Tile& tile) const {
    const BackwardRows rows(p, tile);
    copy_rows<kFlying>(q, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
    copy_rows<kFlying>(dout, tile.dout(p), p.dout_stride.row, tile.row0, p.seqlen_q, p.head_dim_v,
                       [&](int row) { return rows.sees_keys(tile.row0 + row); });
  }
  // Keys and values of a KeyTile or Tile.
  template <class Head>
  DEVICE void load_keys(const BackwardParams& p, const Head& head, int key0) const {
    copy_rows<kFlying>(k, head.k(p), p.k_stride.row, key0, p.seqlen_k, p.head_dim);
    copy_rows<kFlying>(v, head.v(p), p.v_stride.row, key0, p.seqlen_k, p.head_dim_v);
  }

  // P and dS of key tile n, whose keys are loaded, as are the rows of `tile`.
  template <Back kTo>
  DEVICE void gradients(Scores& s, Scores& ds, const BackwardParams& p, const Tile& tile,
                        const KeyRange& keys, int n) const {
    const int key0 = n * kBlockN;
    matmul_nt<2>(s, q, k);                                          // S = Q K^T
    // Rows past the end are 0, and 0 times an infinite key is NaN: sums over rows must not meet it.
    const bool ends = tile.row0 + kBlockM > p.seqlen_q;
    const auto hide = [&](Scores& x) {
      if (keys.is_partial(n) || ends) apply_mask(x, p, tile, key0);
    };
    const BackwardRows rows(p, tile);
    score_gradients<kTo>(s, ds, p, tile, key0, rows.lse + tile.row0, rows.delta + tile.row0, hide,
                         [&](Scores& x) { matmul_nt<2>(x, dout, v); });  // dP = dO V^T
  }
};
