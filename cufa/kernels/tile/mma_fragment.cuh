// Register fragments of mma.sync and the two matrix products of attention on them.
#pragma once
#include "base/config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shfl.cuh"
#include "ptx/thread.cuh"
#include "tile/swizzled_tile.cuh"

DEVICE int lane() { return ptx::tid_x() % 32; }
DEVICE int warp() { return ptx::tid_x() / 32; }

// What is the same in all lanes of a warp, though the compiler cannot know: it would keep it in a
// register of each thread, and prepare what depends on it for lanes that part.
DEVICE int uniform(int x) { return ptx::shfl_idx(x, 0); }

// float32 accumulators of one warp: kRowTiles * 16 rows (those of warp w begin at row
// w * 16 * kRowTiles) by kColTiles * 8 columns. In each 16 x 8 tile a lane holds rows g and g + 8
// (g = lane / 4), two columns each.
template <int kRowTiles, int kColTiles> struct MmaFragment {
  static constexpr int kRows = 2 * kRowTiles, kCols = 2 * kColTiles;  // held by one lane
  static constexpr int kRowLanes = 4;                                 // lanes that share a row
  static constexpr int kRun = 2;                                      // columns side by side
  // How far on the same place is in the second half of 16 rows, of 16 columns; 0: not in this lane.
  static constexpr int kRowHalf = 1, kColHalf = 2;

  f32 x[kRowTiles][kColTiles][4];

  DEVICE f32& at(int r, int c) { return x[r / 2][c / 2][2 * (r % 2) + c % 2]; }
  DEVICE static int row(int r) {
    return 16 * kRowTiles * warp() + lane() / 4 + 16 * (r / 2) + 8 * (r % 2);
  }
  DEVICE static int col(int c) { return 2 * (lane() % 4) + 8 * (c / 2) + c % 2; }

  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) at(r, c) = 0.f;
  }
};

// The A operand: 16-bit pairs.
template <int kRowTiles, int kSteps> struct OperandFragment {
  u32 x[kRowTiles][kSteps][4];
};

DEVICE void mma(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kDType == kBFloat16) ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  else ptx::mma_m16n8k16_f16(d, a, b0, b1);
}

DEVICE u32 pack(f32 lo, f32 hi) {
  if constexpr (kDType == kBFloat16) return ptx::cvt_rn_bf16x2_f32(lo, hi);
  else return ptx::cvt_rn_f16x2_f32(lo, hi);
}

// Both numbers of a pair, the lower half first.
DEVICE Vec<f32, 2> unpack(u32 pair) {
  if constexpr (kDType == kBFloat16)
    return {ptx::mov_f32(pair << 16), ptx::mov_f32(pair & 0xffff0000)};
  else return {ptx::cvt_f32_f16(u16(pair)), ptx::cvt_f32_f16(u16(pair >> 16))};
}

// Where a lane reads a tile. kApart: the tile's address is kept from the lane's place in it, which
// then takes registers once for all tiles.
template <bool kApart, int kRows, int kCols> struct TileReader {
  using Tile = SwizzledTile<kRows, kCols>;

  u32 base;
  typename Tile::Origin from;

  DEVICE TileReader(Tile tile, int row, int chunk)
      : base(kApart ? tile.base : 0), from(Tile{tile.base - base}.origin(row, chunk)) {}

  DEVICE u32 at(int down, int step) const { return base + Tile::at(from, down, step); }
};

// x += a b^T for rows a_row .. of a and b_row .. of b, both in shared memory; b_row, a multiple of
// 8, is known at compile time.
template <bool kApart, int kRowTiles, int kColTiles, int kRowsA, int kRowsB, int kDepth>
DEVICE void add_nt(f32 (&x)[kRowTiles][kColTiles][4], SwizzledTile<kRowsA, kDepth> a, int a_row,
                   SwizzledTile<kRowsB, kDepth> b, int b_row) {
  const TileReader<kApart, kRowsA, kDepth> a_rows(a, a_row + (lane() & 15), lane() >> 4);
  // The two halves of k of one 8-column tile land in adjacent registers, as the instruction takes
  // them; any other order costs two moves a tile.
  const TileReader<kApart, kRowsB, kDepth> b_rows(b, (lane() & 7) + (lane() >> 4) * 8,
                                                  lane() >> 3 & 1);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    u32 a_frag[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a_frag[m], a_rows.at(16 * m, k));
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      u32 b_frag[4];  // two 8-column tiles
      ptx::ldmatrix_x4(b_frag, b_rows.at(b_row + 16 * n, k));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma(x[m][2 * n], a_frag[m], b_frag[0], b_frag[1]);
        mma(x[m][2 * n + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}

// x += p v for rows row .. row + kSteps * 16 - 1 of v, in shared memory, and the columns that it
// has; `row`, a multiple of 16, is known at compile time.
template <bool kApart, int kRowTiles, int kColTiles, int kSteps, int kRowsV, int kColsV>
DEVICE void add_nn(f32 (&x)[kRowTiles][kColTiles][4], const OperandFragment<kRowTiles, kSteps>& p,
                   SwizzledTile<kRowsV, kColsV> v, int row) {
  static_assert(kColsV <= kColTiles * 8 && kSteps * 16 <= kRowsV);
  const TileReader<kApart, kRowsV, kColsV> v_rows(v, lane() & 15, lane() >> 4);
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int n = 0; n < kColsV / 16; ++n) {
      u32 v_frag[4];
      ptx::ldmatrix_x4_trans(v_frag, v_rows.at(row + 16 * k, n));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma(x[m][2 * n], p.x[m][k], v_frag[0], v_frag[1]);
        mma(x[m][2 * n + 1], p.x[m][k], v_frag[2], v_frag[3]);
      }
    }
}

// s = a b^T: a [this warp's rows][kDepth], b [kColTiles * 8][kDepth], both in shared memory.
template <int kRowTiles, int kColTiles, int kRowsA, int kDepth>
DEVICE void matmul_nt(MmaFragment<kRowTiles, kColTiles>& s, SwizzledTile<kRowsA, kDepth> a,
                      SwizzledTile<kColTiles * 8, kDepth> b) {
  s.clear();
  add_nt<false>(s.x, a, 16 * kRowTiles * warp(), b, 0);
}

// o += p v: v [kSteps * 16][kColTiles * 8] in shared memory.
template <int kRowTiles, int kColTiles, int kSteps>
DEVICE void matmul_nn(MmaFragment<kRowTiles, kColTiles>& o,
                      const OperandFragment<kRowTiles, kSteps>& p,
                      SwizzledTile<kSteps * 16, kColTiles * 8> v) {
  add_nn<false>(o.x, p, v, 0);
}

// Rounds P to 16 bits. The accumulator layout of one product is the A layout of the next: lanes
// exchange nothing.
template <int kRowTiles, int kColTiles>
DEVICE OperandFragment<kRowTiles, kColTiles / 2> narrow(
    const MmaFragment<kRowTiles, kColTiles>& s) {
  OperandFragment<kRowTiles, kColTiles / 2> p;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int k = 0; k < kColTiles / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const f32(&tile)[4] = s.x[m][2 * k + i / 2];
        p.x[m][k][i] = pack(tile[2 * (i % 2)], tile[2 * (i % 2) + 1]);
      }
  return p;
}

// Element j of lane i of a quad becomes element i of lane j.
DEVICE void transpose_quad(u32 (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 give = upper ? x[i] : x[i + step];
      const u32 got = ptx::mov_b32(ptx::shfl_bfly(ptx::mov_f32(give), step));
      x[i] = upper ? got : x[i];
      x[i + step] = upper ? x[i + step] : got;
    }
  }
}
