// A tile of accumulator-type elements in shared memory. Rows are 16 bytes longer than their
// content, so that eight rows at one column lie in eight different groups of banks.
#pragma once
#include "base/dtype.cuh"
#include "ptx/thread.cuh"

using RealVec = Vec<Real, kRealVec>;

template <int kRows, int kCols> struct PaddedTile {
  static constexpr int kPitch = kCols + kRealVec;
  static constexpr int kBytes = kRows * kPitch * sizeof(Real);

  Real* base;

  DEVICE Real& at(int row, int col) const { return base[row * kPitch + col]; }
  template <int kCount> DEVICE const Vec<Real, kCount>& run(int row, int col) const {
    return *reinterpret_cast<const Vec<Real, kCount>*>(base + row * kPitch + col);
  }
};

// Rows first .. first + kRows - 1 of a matrix [rows][cols] in global memory; zeros past its ends,
// and in rows that `keep(row)` does not want. A thread has kFlying loads under way at once.
template <int kFlying, int kRows, int kCols, class Keep>
DEVICE void copy_rows(PaddedTile<kRows, kCols> dst, const Elem* src, i64 stride, int first,
                      int rows, int cols, Keep keep) {
  constexpr int kRun = kAligned ? 16 / sizeof(Elem) : 1;
  constexpr int kRuns = kCols / kRun;
#pragma unroll kFlying
  for (int i = ptx::tid_x(); i < kRows * kRuns; i += kThreads) {
    const int row = i / kRuns, col = i % kRuns * kRun;
    const int inside = first + row < rows ? cols - col : 0;  // elements that exist from here on
    const Elem* from = src + (first + row) * stride + col;
    const bool kept = keep(row);
    Vec<Elem, kRun> run;
    if (inside >= kRun) {
      run = *reinterpret_cast<const Vec<Elem, kRun>*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) run.x[e] = e < inside ? from[e] : Elem(0);
    }
#pragma unroll
    for (int e = 0; e < kRun; ++e)
      dst.at(row, col + e) = kept ? to_real<kDType>(run.x[e]) : Real(0);
  }
}

template <int kFlying = 2, int kRows, int kCols>
DEVICE void copy_rows(PaddedTile<kRows, kCols> dst, const Elem* src, i64 stride, int first,
                      int rows, int cols) {
  copy_rows<kFlying>(dst, src, stride, first, rows, cols, [](int) { return true; });
}
