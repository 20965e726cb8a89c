// Sums in global memory to which the warps of many blocks add their accumulators: a matrix of kCols
// columns, in tiles of 16 x 8 row by row, in each of which numbers lie as lanes hold them. So one
// instruction of a warp adds to whole lines.
#pragma once
#include "ptx/red.cuh"
#include "tile/mma_fragment.cuh"

template <int kCols> struct SumTiles {
  static constexpr bool kRuns = kArch >= 90;  // a lane's four numbers side by side: added at once

  // From the first tile to the one at `row` and `col`.
  DEVICE static constexpr int offset(int row, int col) { return row * kCols + col * 16; }

  // Where this lane's numbers of a tile begin.
  DEVICE static u32 place(int row, int col) { return offset(row, col) + lane() * (kRuns ? 4 : 1); }

  DEVICE static void add(f32* to, const f32 (&x)[4]) {
    if constexpr (kRuns) {
      ptx::red_add_v4(to, x);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::red_add(to + 32 * i, x[i]);
    }
  }

  DEVICE static void load(f32 (&x)[4], const f32* from) {
    if constexpr (kRuns) {
      const auto run = *reinterpret_cast<const Vec<f32, 4>*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = run.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = from[32 * i];
    }
  }
};
