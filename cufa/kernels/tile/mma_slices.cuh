// Fragments of warps that divide the keys of a block and share its rows: warp w has keys
// w * kSlice .. (w + 1) * kSlice - 1, and owns rows w * kOwnRows .. (w + 1) * kOwnRows - 1.
#pragma once
#include "tile/mma_fragment.cuh"

constexpr int kSlices = kThreads / 32;
constexpr int kSlice = kBlockN / kSlices;
constexpr int kOwnRows = kBlockM / kSlices;
static_assert((kBlockM & (kBlockM - 1)) == 0 && kOwnRows % 8 == 0 && kSlice % 16 == 0);

// The rows of a tile as a warp counts them: from the first that it owns, and around. So what it
// owns lies in the same registers in every warp.
DEVICE int own_first(int row) { return (kOwnRows * warp() + row) & (kBlockM - 1); }

struct SliceScores : MmaFragment<kBlockM / 16, kSlice / 8> {
  static constexpr int kRowHalf = 0;  // the first row may be in the second half of 16

  DEVICE static int row(int r) { return own_first(lane() / 4 + 8 * r); }
  DEVICE static int col(int c) { return kSlice * warp() + MmaFragment::col(c); }
};

// What a warp owns: 8 * kRowGroups rows, all columns; lanes hold them as in an MmaFragment.
template <int kRowGroups, int kColTiles> struct OwnRows {
  static constexpr int kRows = kRowGroups, kCols = 2 * kColTiles;
  static constexpr int kRowLanes = 4, kRun = 2;

  f32 x[kRows][kCols];

  DEVICE f32& at(int r, int c) { return x[r][c]; }
  DEVICE static int row(int r) { return kOwnRows * warp() + lane() / 4 + 8 * r; }
  DEVICE static int col(int c) { return 2 * (lane() % 4) + 8 * (c / 2) + c % 2; }
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) x[r][c] = 0.f;
  }
};

// A warp's slice of K, the B operand of S = Q K^T, in registers.
template <int kDepth> struct KeySlice {
  u32 x[kDepth / 16][kSlice / 16][4];  // two 8-key tiles each

  DEVICE void load(SwizzledTile<kBlockN, kDepth> k) {
    using K = SwizzledTile<kBlockN, kDepth>;
    const auto from = k.origin(kSlice * warp() + (lane() & 7) + (lane() >> 4) * 8, lane() >> 3 & 1);
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d)
#pragma unroll
      for (int n = 0; n < kSlice / 16; ++n) ptx::ldmatrix_x4(x[d][n], K::at(from, 16 * n, d));
  }
};

// s = q k^T for the keys of this warp.
template <int kDepth>
DEVICE void matmul_nt(SliceScores& s, SwizzledTile<kBlockM, kDepth> q, const KeySlice<kDepth>& k) {
  using Q = SwizzledTile<kBlockM, kDepth>;
  s.clear();
#pragma unroll
  for (int m = 0; m < kBlockM / 16; ++m) {
    const auto from = q.origin(own_first(16 * m + (lane() & 15)), lane() >> 4);
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d) {
      u32 q_frag[4];
      ptx::ldmatrix_x4(q_frag, Q::at(from, 0, d));
#pragma unroll
      for (int n = 0; n < kSlice / 16; ++n) {
        mma(s.x[m][2 * n], q_frag, k.x[d][n][0], k.x[d][n][1]);
        mma(s.x[m][2 * n + 1], q_frag, k.x[d][n][2], k.x[d][n][3]);
      }
    }
  }
}

// o = p v over the keys of this warp, columns 16 * n .. 16 * n + 15.
template <int kColsV>
DEVICE void matmul_nn(MmaFragment<kBlockM / 16, 2>& o,
                      const OperandFragment<kBlockM / 16, kSlice / 16>& p,
                      SwizzledTile<kBlockN, kColsV> v, int n) {
  using V = SwizzledTile<kBlockN, kColsV>;
  const auto from = v.origin(kSlice * warp() + (lane() & 15), lane() >> 4);
  o.clear();
#pragma unroll
  for (int k = 0; k < kSlice / 16; ++k) {
    u32 v_frag[4];
    ptx::ldmatrix_x4_trans(v_frag, V::at(from, 16 * k, n));
#pragma unroll
    for (int m = 0; m < kBlockM / 16; ++m) {
      mma(o.x[m][0], p.x[m][k], v_frag[0], v_frag[1]);
      mma(o.x[m][1], p.x[m][k], v_frag[2], v_frag[3]);
    }
  }
}
