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
};
