// One row of a mask or bias in global memory.
#pragma once
#include "attn/tile.cuh"

template <class T> struct ScoreRow {
  const T* row;
  i64 stride;

  // A query past the end, where a tile sticks out, gets the last row: its result is never stored.
  DEVICE ScoreRow(const void* array, const ScoreStrides& s, const Params& p, const Tile& tile,
                  int query)
      : row(static_cast<const T*>(array) + tile.batch * s.batch + tile.head * s.head +
            min_of(query, p.seqlen_q - 1) * s.row),
        stride(s.key) {}

  DEVICE T at(int key) const { return row[key * stride]; }

  // Keys key .. key + kRun - 1 of an array that `has_runs` of so many; key is a multiple of kRun.
  template <int kRun> DEVICE Vec<T, kRun> run(int key) const {
    return *reinterpret_cast<const Vec<T, kRun>*>(row + key * stride);
  }
};

// Whether all rows can be read by runs of kRun keys.
template <class T, int kRun>
DEVICE bool has_runs(const void* array, const ScoreStrides& s, const Params& p) {
  return s.key == 1 && (s.batch | s.head | s.row | p.seqlen_k) % kRun == 0 &&
         reinterpret_cast<u64>(array) % sizeof(Vec<T, kRun>) == 0;
}
