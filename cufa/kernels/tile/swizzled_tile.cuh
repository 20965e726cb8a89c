// A tile of 16-bit elements in shared memory whose 16-byte chunks are permuted within each row, so
// that eight rows at one chunk lie in eight different groups of banks: ldmatrix and cp.async meet
// no bank conflicts.
#pragma once
#include "base/types.cuh"

// Address of a chunk in a slab whose rows have kChunks chunks (8: 128 bytes, 4: 64 bytes).
template <int kChunks> DEVICE u32 swizzled(u32 slab, int row, int chunk) {
  static_assert(kChunks == 8 || kChunks == 4);
  const int place = kChunks == 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  return slab + row * (kChunks * 16) + place * 16;
}

// Slabs of 64 columns; a last one of 32 if kCols is an odd multiple of 32.
template <int kRows, int kCols> struct SwizzledTile {
  static constexpr int kBytes = kRows * kCols * 2;
  static constexpr int kWholeSlabs = kCols / 64;
  static constexpr bool kHalfSlab = kCols % 64 != 0;
  static_assert(kCols % 32 == 0 && kRows % 8 == 0);

  u32 base;  // a multiple of 1024

  DEVICE u32 slab(int i) const { return base + i * (kRows * 128); }

  // Address of elements [row][16 * step + 8 * half ..]; as `step` is known at compile time, so is
  // the slab.
  DEVICE u32 at(int row, int step, int half) const {
    const int i = step / 4, chunk = 2 * (step % 4) | half;
    return i < kWholeSlabs ? swizzled<8>(slab(i), row, chunk) : swizzled<4>(slab(i), row, chunk);
  }
};
