// Rows of a tile in shared memory that are to be 0, whatever was loaded.
#pragma once
#include "ptx/thread.cuh"
#include "tile/swizzled_tile.cuh"

template <int kRows, int kCols, class Lacks>
DEVICE void clear_rows(SwizzledTile<kRows, kCols> tile, Lacks lacks) {
  constexpr int kRowChunks = kCols / kChunk;
#pragma unroll 1
  for (int i = ptx::tid_x(); i < kRows * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    if (lacks(row)) shared<Vec<u32, 4>>(tile.at(tile.origin(row, chunk % 2), 0, chunk / 2)) = {};
  }
}
