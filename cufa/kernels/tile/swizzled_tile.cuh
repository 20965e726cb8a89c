// A tile in shared memory whose 16-byte chunks are permuted within each row, so that eight rows at
// one chunk lie in eight different groups of banks: ldmatrix, cp.async and the loads of float64
// fragments meet no bank conflicts. In whole slabs it is the order that TMA and wgmma know as their
// swizzle of 128 bytes.
#pragma once
#include "base/dtype.cuh"
#include "ptx/thread.cuh"

constexpr int kChunk = 16 / sizeof(Elem);  // elements

// Address of a chunk in a slab whose rows have kChunks chunks (8: 128 bytes, 4: 64 bytes).
template <int kChunks> DEVICE u32 swizzled(u32 slab, int row, int chunk) {
  static_assert(kChunks == 8 || kChunks == 4);
  const int place = kChunks == 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  return slab + row * (kChunks * 16) + place * 16;
}

// What is at an address of the shared window, for plain loads and stores.
template <class T> DEVICE T& shared(u32 address) {
  u8* smem = ptx::dynamic_smem();
  return *reinterpret_cast<T*>(smem + (address - ptx::smem_address(smem)));
}

// Slabs of 128 bytes a row; a last one of 64 if that is what is left.
template <int kRows, int kCols> struct SwizzledTile {
  static constexpr int kBytes = kRows * kCols * sizeof(Elem);
  static constexpr int kSlabCols = 8 * kChunk;
  static constexpr int kSlabBytes = kRows * 128;
  static constexpr int kWholeSlabs = kCols / kSlabCols;
  static constexpr bool kHalfSlab = kCols % kSlabCols != 0;
  static_assert(kCols % (4 * kChunk) == 0 && kRows % 8 == 0);

  u32 base;  // a multiple of 1024

  DEVICE u32 slab(int i) const { return base + i * kSlabBytes; }
  // The tile whose row 0 is row `rows` of this one, or so far before it; a multiple of 8. There is
  // no half slab.
  DEVICE SwizzledTile from_row(int rows) const {
    static_assert(!kHalfSlab);
    return {base + rows * 128};
  }

  // Every 4 bytes of a slab become `word`; by all threads of the block.
  DEVICE void fill_slab(int i, u32 word) const {
    for (int at = 4 * ptx::tid_x(); at < kSlabBytes; at += 4 * kThreads)
      shared<u32>(slab(i) + at) = word;
  }

  // Address of any chunk; there is no half slab.
  DEVICE u32 address(int row, int chunk) const {
    static_assert(!kHalfSlab);
    return swizzled<8>(slab(chunk / 8), row, chunk % 8);
  }

  // Where a lane begins to read: the address of a chunk of the first 128 bytes, or 64.
  struct Origin {
    u32 whole, last;  // in a whole slab, and in the last one if that has 64 bytes a row
  };
  DEVICE Origin origin(int row, int chunk) const {
    return {swizzled<8>(base, row, chunk), swizzled<4>(slab(kWholeSlabs), row, chunk)};
  }
  // From there, the address `down` rows below and 32 * step bytes to the right; `step` and `down`,
  // a multiple of 8, are known at compile time. The place of a chunk is a bitwise sum, so that all
  // addresses come from one register by one instruction each.
  DEVICE static u32 at(Origin origin, int down, int step) {
    return step < 4 * kWholeSlabs
               ? (origin.whole ^ step % 4 * 32) + step / 4 * kSlabBytes + down * 128
               : (origin.last ^ step % 4 * 32) + down * 64;
  }
};
