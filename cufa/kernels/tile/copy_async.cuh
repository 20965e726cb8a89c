// Global to shared memory by cp.async; rows past the end and columns past the head dim are zeros.
#pragma once
#include "base/config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "tile/swizzled_tile.cuh"

// One slab of kRows rows of kChunks chunks; `rows` and `cols` count what exists from its first
// element on. kWhole: all columns do.
template <int kRows, int kChunks, bool kWhole>
DEVICE void copy_slab_async(u32 slab, const u16* src, i64 stride, int rows, int cols) {
  constexpr int kStep = kThreads / kChunks;  // rows at a time
  static_assert(kStep % 8 == 0 && kStep <= 64, "the pattern of chunks repeats every 8 rows");
  const int chunk = ptx::tid_x() % kChunks, row = ptx::tid_x() / kChunks;
  const int right = cols - 8 * chunk;  // columns from this chunk on
  const int bytes = kWhole || right >= 8 ? 16 : right > 0 ? 2 * right : 0;
  const u32 to = swizzled<kChunks>(slab, row, chunk);
  // It moves along: a product a row costs registers. The first row is below 64, and rows are less
  // than 2^24 elements apart (gpu/registry.py).
  const u16* from = src + (row * i32(stride) + 8 * chunk);
#pragma unroll
  for (int first = 0; first < kRows; first += kStep) {
    if (kRows % kStep == 0 || first + row < kRows)  // of 0 bytes nothing is read
      ptx::cp_async_cg_16(to + first * (kChunks * 16), from, first + row < rows ? bytes : 0);
    from += kStep * stride;
  }
}

// Rows first .. first + kRows - 1 of a matrix [rows][cols] whose rows are `stride` elements apart;
// kCols is `cols` rounded up to a multiple of 32, so only the last slab may lack columns.
template <int kRows, int kCols>
DEVICE void copy_rows_async(SwizzledTile<kRows, kCols> dst, const u16* src, i64 stride, int first,
                            int rows, int cols) {
  using Dst = SwizzledTile<kRows, kCols>;
  src += first * stride;
  constexpr int kLast = Dst::kWholeSlabs - !Dst::kHalfSlab;
#pragma unroll
  for (int i = 0; i < kLast; ++i)
    copy_slab_async<kRows, 8, true>(dst.slab(i), src + 64 * i, stride, rows - first, 64);
  copy_slab_async<kRows, Dst::kHalfSlab ? 4 : 8, false>(dst.slab(kLast), src + 64 * kLast, stride,
                                                        rows - first, cols - 64 * kLast);
}
