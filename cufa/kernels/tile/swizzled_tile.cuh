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

  // Where a lane begins to read: the address of elements [row][8 * half ..].
  struct Origin {
    u32 whole, last;  // in a slab of 64 columns, and in the last one if that has 32
  };
  DEVICE Origin origin(int row, int half) const {
    return {swizzled<8>(base, row, half), swizzled<4>(slab(kWholeSlabs), row, half)};
  }
  // From there, the address of elements [row + down][16 * step + 8 * half ..]; `step` and `down`, a
  // multiple of 8, are known at compile time. The place of a chunk is a bitwise sum, so that all
  // addresses come from one register by one instruction each.
  DEVICE static u32 at(Origin origin, int down, int step) {
    return step < 4 * kWholeSlabs
               ? (origin.whole ^ step % 4 * 32) + step / 4 * (kRows * 128) + down * 128
               : (origin.last ^ step % 4 * 32) + down * 64;
  }
};
