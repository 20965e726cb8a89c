// A product of all warps of a block together.
#pragma once
#include "tile/sum_tiles.cuh"

// The warps in a grid of kDown by kAcross: warp (i, j) has the 16-row tiles i, i + kDown, ... and
// the 16-column tiles j, j + kAcross, ..., so that the addresses of all its operands come from
// those of the first by constants.
template <int kRows, int kCols> struct MmaGrid {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kAcross = kCols % 64 == 0 && kWarps >= 8 ? 4 : 2, kDown = kWarps / kAcross;
  static constexpr int kRowTiles = kRows / (16 * kDown), kAllColTiles = kCols / (16 * kAcross);
  static_assert(kRows == kRowTiles * 16 * kDown && kCols == kAllColTiles * 16 * kAcross);
  // Columns come in parts, one after the other, where all of them take too many registers.
  static constexpr int kEven = kAllColTiles % 2 == 0 ? 2 : kAllColTiles > 5 ? kAllColTiles : 1;
  static constexpr int kParts = kRowTiles * kAllColTiles > 4 ? kEven : 1;
  static constexpr int kColTiles = kAllColTiles / kParts;

  f32 x[kRowTiles][kColTiles][2][4];  // of two 8-column tiles each

  DEVICE static int row(int m) { return 16 * (warp() / kAcross + m * kDown); }
  DEVICE static int col(int n) { return 16 * (warp() % kAcross + n * kAcross); }

  DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColTiles; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) x[m][n][i / 4][i % 4] = 0.f;
  }
};

// o = a^T b, part `part` of its columns: a [kDepth][kRows], b [kDepth][kCols] in shared memory.
template <int kRows, int kCols, int kDepth>
DEVICE void matmul_tn(MmaGrid<kRows, kCols>& o, SwizzledTile<kDepth, kRows> a,
                      SwizzledTile<kDepth, kCols> b, int part) {
  using O = MmaGrid<kRows, kCols>;
  const TileReader<true, kDepth, kRows> a_rows(a, (lane() & 7) + (lane() >> 4) * 8,
                                               O::row(0) / 8 + (lane() >> 3 & 1));
  const TileReader<true, kDepth, kCols> b_rows(b, lane() & 15, O::col(0) / 8 + (lane() >> 4));
  o.clear();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    u32 a_frag[O::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < O::kRowTiles; ++m)
      ptx::ldmatrix_x4_trans(a_frag[m], a_rows.at(16 * k, m * O::kDown));
#pragma unroll
    for (int n = 0; n < O::kColTiles; ++n) {
      u32 b_frag[4];
      ptx::ldmatrix_x4_trans(b_frag, b_rows.at(16 * k, (part * O::kColTiles + n) * O::kAcross));
#pragma unroll
      for (int m = 0; m < O::kRowTiles; ++m) {
        mma(o.x[m][n][0], a_frag[m], b_frag[0], b_frag[1]);
        mma(o.x[m][n][1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}

// Adds to sums in global memory, to which other blocks add too: SumTiles.
template <int kRows, int kCols>
DEVICE void add_to(f32* sums, const MmaGrid<kRows, kCols>& o, int part) {
  using O = MmaGrid<kRows, kCols>;
  using Sums = SumTiles<kCols>;
  f32* const first = sums + Sums::place(O::row(0), O::col(0));
#pragma unroll
  for (int m = 0; m < O::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < O::kColTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int col = 16 * O::kAcross * (part * O::kColTiles + n) + 8 * half;
        const int away = Sums::offset(16 * O::kDown * m, col);
        Sums::add(first + away, o.x[m][n][half]);
      }
}
