// Results to global memory, straight from registers; rows and columns past the end are left alone.
#pragma once
#include "attn/tile.cuh"
#include "base/math.cuh"

// Rows row0 and on of a matrix [rows][cols]; `place(row)` is where one begins.
template <class Output, class Place>
DEVICE void store_rows(Output& o, int row0, int rows, int cols, Place place) {
  constexpr int kRun = Output::kRun;
#pragma unroll
  for (int r = 0; r < Output::kRows; ++r) {
    const int row = row0 + o.row(r);
    if (row >= rows) continue;
    Elem* out = place(row);
#pragma unroll
    for (int c = 0; c < Output::kCols; c += kRun) {
      const int col = o.col(c);
      if (kAligned && col + kRun <= cols) {
        Vec<Elem, kRun> run;
#pragma unroll
        for (int i = 0; i < kRun; ++i) run.x[i] = to_elem(o.at(r, c + i));
        *reinterpret_cast<Vec<Elem, kRun>*>(out + col) = run;
      } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (col + i < cols) out[col + i] = to_elem(o.at(r, c + i));
      }
    }
  }
}

template <class Output> DEVICE void store_output(Output& o, const Params& p, const Tile& tile) {
  store_rows(o, tile.row0, p.seqlen_q, p.head_dim_v,
             [&](int row) { return tile.o(p) + row * p.o_stride.row; });
}

// Whether every result is finite, and 0 or no smaller than `least`.
template <class Output> DEVICE bool is_within(Output& o, Real least) {
  bool within = true;
#pragma unroll
  for (int r = 0; r < Output::kRows; ++r)
#pragma unroll
    for (int c = 0; c < Output::kCols; ++c) {
      const Real size = abs_of(o.at(r, c));
      within &= (size >= least && size < infinity()) || size == 0;
    }
  return within;
}

template <class Output, int kRows>
DEVICE void store_lse(const Output& o, const Real (&lse)[kRows], const Params& p,
                      const Tile& tile) {
  if constexpr (!kLse) return;
  const i64 head = i64(tile.batch) * p.heads.value + tile.head;
  Real* out = static_cast<Real*>(p.lse) + head * p.seqlen_q;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = tile.row0 + o.row(r);
    if (o.col(0) == 0 && row < p.seqlen_q) out[row] = lse[r];  // one lane of those that share it
  }
}
