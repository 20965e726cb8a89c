// Results of tensor cores to global memory, 16 bytes at a time.
#pragma once
#include "attn/epilogue.cuh"
#include "tile/mma_fragment.cuh"

// The four lanes that share a row exchange what they hold of four 8-column tiles, so that each
// stores 16 bytes of one of them: a warp that stores single pairs writes half sectors, and four
// times as many.
template <template <int, int> class Fragment, int kRowTiles, int kColTiles>
DEVICE void store_output(Fragment<kRowTiles, kColTiles>& o, const Params& p, const Tile& tile) {
  static_assert(kColTiles % 4 == 0);
#pragma unroll
  for (int r = 0; r < o.kRows; ++r) {
    const int row = tile.row0 + o.row(r);
    Elem* out = tile.o(p) + row * p.o_stride.row;
#pragma unroll
    for (int t = 0; t < kColTiles; t += 4) {
      Vec<u32, 4> run;
#pragma unroll
      for (int i = 0; i < 4; ++i) run.x[i] = pack(o.at(r, 2 * (t + i)), o.at(r, 2 * (t + i) + 1));
      transpose_quad(run.x);
      const int col = 8 * (t + lane() % 4);
      if (row >= p.seqlen_q) continue;
      if (col + 8 <= p.head_dim_v) {
        *reinterpret_cast<Vec<u32, 4>*>(out + col) = run;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (col + i < p.head_dim_v) out[col + i] = Elem(run.x[i / 2] >> 16 * (i % 2));
      }
    }
  }
}
