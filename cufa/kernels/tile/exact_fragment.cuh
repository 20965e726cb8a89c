// The fragments of wide_fragment.cuh with products on CUDA cores, slowly. For numbers that
// tensor cores cannot multiply: infinities, NaN, very large and very small ones (tile/tf32.cuh).
#pragma once
#include "tile/wide_fragment.cuh"

// A type of its own, by which the functions below are chosen.
template <int kRowTiles, int kColTiles>
struct ExactScores : WideFragment<kRowTiles, kColTiles, false> {};

// s = a b^T.
template <int kRowTiles, int kColTiles, int kRowsA, int kRowsB, int kDepth>
DEVICE void matmul_nt(ExactScores<kRowTiles, kColTiles>& s, SwizzledTile<kRowsA, kDepth> a,
                      SwizzledTile<kRowsB, kDepth> b) {
  using S = ExactScores<kRowTiles, kColTiles>;
  s.clear();
#pragma unroll 1
  for (int chunk = 0; chunk < kDepth / kChunk; ++chunk) {
    Real a_row[S::kRows][kChunk];
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) load_chunk(a_row[r], a.address(s.row(r), chunk));
#pragma unroll
    for (int c = 0; c < S::kCols; ++c) {
      Real b_row[kChunk];
      load_chunk(b_row, b.address(s.col(c), chunk));
#pragma unroll
      for (int r = 0; r < S::kRows; ++r)
#pragma unroll
        for (int i = 0; i < kChunk; ++i) s.at(r, c) += a_row[r][i] * b_row[i];
    }
  }
}

// o += p v. The four lanes that share a row hand their weights round.
template <int kRowTiles, int kColTiles, int kKeyTiles>
DEVICE void matmul_nn(WideFragment<kRowTiles, kColTiles, true>& o,
                      ExactScores<kRowTiles, kKeyTiles>& p,
                      SwizzledTile<kKeyTiles * 8, kColTiles * 8> v) {
  using O = WideFragment<kRowTiles, kColTiles, true>;
  using P = ExactScores<kRowTiles, kKeyTiles>;
#pragma unroll
  for (int c = 0; c < P::kCols; ++c)
#pragma unroll 1
    for (int other = 0; other < 4; ++other) {
      const int key = p.col(c) ^ 2 * other;  // in bits 1 and 2 of a column is its lane
      Real weight[P::kRows];
#pragma unroll
      for (int r = 0; r < P::kRows; ++r) weight[r] = ptx::shfl_bfly(p.at(r, c), other);
#pragma unroll
      for (int to = 0; to < O::kCols; to += kChunk) {
        Real v_run[kChunk];
        load_chunk(v_run, v.address(key, o.col(to) / kChunk));
#pragma unroll
        for (int r = 0; r < P::kRows; ++r)
#pragma unroll
          for (int i = 0; i < kChunk; ++i) o.at(r, to + i) += weight[r] * v_run[i];
      }
    }
}

template <int kRowTiles, int kColTiles>
DEVICE auto narrow(ExactScores<kRowTiles, kColTiles>& s) -> ExactScores<kRowTiles, kColTiles>& {
  return s;
}
