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
  PaddedTile<kBlockM, kHeadDim> q;
  PaddedTile<kBlockM, kHeadDimV> dout;
  PaddedTile<kBlockN, kHeadDim> k;
  PaddedTile<kBlockN, kHeadDimV> v;
  PaddedTile<kBlockM, kBlockN> scores;

  static constexpr int kBytes = decltype(q)::kBytes + decltype(dout)::kBytes +
                                decltype(k)::kBytes + decltype(v)::kBytes +
                                decltype(scores)::kBytes;
  static_assert(kSmemBytes == kBytes, "gpu/config.py");

  DEVICE explicit BackwardTiles(u8* smem) {
    const auto place = [&](auto& tile) {
      tile.base = reinterpret_cast<Real*>(smem);
      smem += tile.kBytes;
    };
    place(q), place(dout), place(k), place(v), place(scores);
  }

  // Loads keep kFlying runs of 16 bytes a thread under way.
  static constexpr int kFlying = 4;

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
    matmul_nt(s, q, k);      // S = Q K^T
    matmul_nt(ds, dout, v);  // dP = dO V^T
    score_gradients<kTo>(s, ds, p, tile, n * kBlockN, [&](Scores& scores) {
      if (keys.is_partial(n)) apply_mask(scores, p, tile, n * kBlockN);
    });
  }
};
