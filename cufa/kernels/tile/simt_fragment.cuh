// Register fragments on CUDA cores and the matrix products of attention on them.
#pragma once
#include "tile/padded_tile.cuh"

constexpr int kColumnLanes = 16;  // half a warp shares its rows and divides the columns

// Each thread owns kRows_ rows and kCols_ columns, the latter in runs of kRun_ that alternate
// between the lanes.
template <int kRows_, int kCols_, int kRun_> struct SimtFragment {
  static constexpr int kRows = kRows_, kCols = kCols_, kRun = kRun_;
  static constexpr int kRowLanes = kColumnLanes;
  static_assert(kCols % kRun == 0);

  Real x[kRows][kCols];

  DEVICE Real& at(int r, int c) { return x[r][c]; }
  DEVICE static int row(int r) { return kRows * (ptx::tid_x() / kColumnLanes) + r; }
  DEVICE static int col(int c) {
    return kRun * (ptx::tid_x() % kColumnLanes + c / kRun * kColumnLanes) + c % kRun;
  }
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) x[r][c] = 0;
  }
};

// s = a b^T: a [rows][kDepth], b [columns][kDepth], both in shared memory.
template <int kSteps = 1, int kRows, int kCols, int kRowsA, int kRowsB, int kDepth>
DEVICE void matmul_nt(SimtFragment<kRows, kCols, 1>& s, PaddedTile<kRowsA, kDepth> a,
                      PaddedTile<kRowsB, kDepth> b) {
  s.clear();
#pragma unroll kSteps
  for (int d = 0; d < kDepth; d += kRealVec) {
    RealVec a_run[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) a_run[r] = a.template run<kRealVec>(s.row(r), d);
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const RealVec b_run = b.template run<kRealVec>(s.col(c), d);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kRealVec; ++e) s.x[r][c] += a_run[r].x[e] * b_run.x[e];
    }
  }
}

// o += p v: p [rows][kDepth], v [kDepth][columns], both in shared memory.
template <int kRows, int kCols, int kRun, int kRowsP, int kDepth, int kColsV>
DEVICE void matmul_nn(SimtFragment<kRows, kCols, kRun>& o, PaddedTile<kRowsP, kDepth> p,
                      PaddedTile<kDepth, kColsV> v) {
#pragma unroll 1
  for (int j = 0; j < kDepth; j += kRealVec) {
    RealVec p_run[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) p_run[r] = p.template run<kRealVec>(o.row(r), j);
#pragma unroll
    for (int e = 0; e < kRealVec; ++e)
#pragma unroll
      for (int c = 0; c < kCols; c += kRun) {
        const Vec<Real, kRun> v_run = v.template run<kRun>(j + e, o.col(c));
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kRun; ++i) o.x[r][c + i] += p_run[r].x[e] * v_run.x[i];
      }
  }
}

// o += p^T x: p [kDepth][rows], x [kDepth][columns], both in shared memory.
template <int kRows, int kCols, int kRun, int kRowsP, int kDepth, int kColsX>
DEVICE void matmul_tn(SimtFragment<kRows, kCols, kRun>& o, PaddedTile<kDepth, kRowsP> p,
                      PaddedTile<kDepth, kColsX> x) {
  constexpr int kRunP = min_of(kRows, kRealVec);
  static_assert(kRows % kRunP == 0 && (kRunP & (kRunP - 1)) == 0);
#pragma unroll kRealVec
  for (int i = 0; i < kDepth; ++i) {
    Vec<Real, kRunP> p_run[kRows / kRunP];
#pragma unroll
    for (int r = 0; r < kRows; r += kRunP)
      p_run[r / kRunP] = p.template run<kRunP>(i, o.row(r));
#pragma unroll
    for (int c = 0; c < kCols; c += kRun) {
      const Vec<Real, kRun> x_run = x.template run<kRun>(i, o.col(c));
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kRun; ++e)
          o.x[r][c + e] += p_run[r / kRunP].x[r % kRunP] * x_run.x[e];
    }
  }
}

// Puts P where matmul_nn and matmul_tn read it.
template <int kRows, int kCols, int kRowsP, int kDepth>
DEVICE void store_tile(PaddedTile<kRowsP, kDepth> p, SimtFragment<kRows, kCols, 1>& s) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) p.at(s.row(r), s.col(c)) = s.x[r][c];
}
