// Two halves of a block's threads, each with half of the keys and all rows, on the fragments of
// simt_fragment.cuh: those number rows through the block, so a row of the second half is kBlockM
// further on than the tile's. (16 keys are one slice: 16 lanes divide the columns.)
#pragma once
#include "tile/simt_fragment.cuh"

constexpr int kSlices = kBlockN > kColumnLanes ? 2 : 1;
constexpr int kSlice = kBlockN / kSlices;
constexpr int kRows = kSlices * kBlockM * kColumnLanes / kThreads;  // of a thread
constexpr int kOwnRows = kRows / kSlices;                           // of which it owns
static_assert(kRows * kThreads == kSlices * kBlockM * kColumnLanes && kRows % kSlices == 0);
static_assert(kSlice % kColumnLanes == 0 && (kBlockM & (kBlockM - 1)) == 0);

DEVICE int slice() { return ptx::tid_x() / (kThreads / kSlices); }

// The rows of a tile under the numbers that this half has for them.
template <int kCols>
DEVICE PaddedTile<kSlices * kBlockM, kCols> as_numbered(PaddedTile<kBlockM, kCols> rows) {
  return {&rows.at(-slice() * kBlockM, 0)};
}

// This half's keys.
template <int kCols> DEVICE PaddedTile<kSlice, kCols> own_keys(PaddedTile<kBlockN, kCols> keys) {
  return {&keys.at(slice() * kSlice, 0)};
}

// Of the rows that thread t of both halves hold, the first half owns the first half.
template <int kCols, int kRun> struct OwnRows : SimtFragment<kOwnRows, kCols, kRun> {
  DEVICE static int row(int r) {
    return kRows * (ptx::tid_x() / kColumnLanes) - slice() * (kBlockM - kOwnRows) + r;
  }
};

// Exchanges the two halves of a thread's rows in the second half of the threads: now those that it
// owns come first.
template <int kCols, int kRun> DEVICE void own_rows_first(SimtFragment<kRows, kCols, kRun>& f) {
  if constexpr (kSlices == 1) return;
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const Real upper = f.at(r, c), lower = f.at(r + kRows / 2, c);
      f.at(r, c) = slice() ? lower : upper;
      f.at(r + kRows / 2, c) = slice() ? upper : lower;
    }
}
