// Global to shared memory by cp.async; rows past the end and columns past the head dim are zeros.
#pragma once
#include "base/config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "tile/swizzled_tile.cuh"

// One slab of kRows rows of kChunks chunks; `rows` and `cols` count what exists from its first
// element on. kWhole: all columns do.
template <int kRows, int kChunks, bool kWhole>
DEVICE void copy_slab_async(u32 slab, const Elem* src, i64 stride, int rows, int cols) {
  constexpr int kStep = kThreads / kChunks;  // rows at a time
  static_assert(kStep % 8 == 0 && kStep <= 64, "the pattern of chunks repeats every 8 rows");
  const int chunk = ptx::tid_x() % kChunks, row = ptx::tid_x() / kChunks;
  const int right = cols - kChunk * chunk;  // columns from this chunk on
  const int bytes = kWhole || right >= kChunk ? 16 : right > 0 ? int(sizeof(Elem)) * right : 0;
  const u32 to = swizzled<kChunks>(slab, row, chunk);
  // It moves along: a product a row costs registers. The first row is below 64, and rows are less
  // than 2^24 elements apart (gpu/registry.py).
  const Elem* from = src + (row * i32(stride) + kChunk * chunk);
#pragma unroll
  for (int first = 0; first < kRows; first += kStep) {
    if (kRows % kStep == 0 || first + row < kRows)  // of 0 bytes nothing is read
      ptx::cp_async_cg_16(to + first * (kChunks * 16), from, first + row < rows ? bytes : 0);
    from += kStep * stride;
  }
}

// Rows first .. first + kRows - 1 of a matrix [rows][cols] whose rows are `stride` elements apart;
// kCols is `cols` rounded up to a multiple of 32, so only slabs that reach into the last 32 columns
// may lack some.
template <int kRows, int kCols>
DEVICE void copy_rows_async(SwizzledTile<kRows, kCols> dst, const Elem* src, i64 stride, int first,
                            int rows, int cols) {
  using Dst = SwizzledTile<kRows, kCols>;
  constexpr int kWide = Dst::kSlabCols, kWhole = (kCols - 32) / kWide;
  src += first * stride;
#pragma unroll
  for (int i = 0; i < kWhole; ++i)
    copy_slab_async<kRows, 8, true>(dst.slab(i), src + kWide * i, stride, rows - first, kWide);
#pragma unroll
  for (int i = kWhole; i < Dst::kWholeSlabs; ++i)
    copy_slab_async<kRows, 8, false>(dst.slab(i), src + kWide * i, stride, rows - first,
                                     cols - kWide * i);
  constexpr int kLast = Dst::kWholeSlabs;
  if constexpr (Dst::kHalfSlab)
    copy_slab_async<kRows, 4, false>(dst.slab(kLast), src + kWide * kLast, stride, rows - first,
                                     cols - kWide * kLast);
}
