// Results of tensor cores to global memory, two at a time: for what is stored after many steps.
#pragma once
#include "tile/mma_fragment.cuh"

// Rows row0 and on of a matrix [rows][cols].
template <class Fragment>
DEVICE void store_pairs(Fragment& x, Elem* to, i64 stride, int row0, int rows, int cols) {
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    const int row = row0 + x.row(r);
    if (row >= rows) continue;
    Elem* out = to + row * stride;
#pragma unroll
    for (int c = 0; c < Fragment::kCols; c += 2) {
      const int col = x.col(c);
      const u32 pair = pack(x.at(r, c), x.at(r, c + 1));
      if (col + 2 <= cols) *reinterpret_cast<u32*>(out + col) = pair;
      else if (col < cols) out[col] = Elem(pair);
    }
  }
}
