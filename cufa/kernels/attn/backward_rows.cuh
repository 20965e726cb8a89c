// What the backward pass knows of each query row: in the workspace, for every head padded_rows of
// lse, then of D, then in float32 of `splits`, then, where dQ is gathered from many blocks, of its
// sums.
#pragma once
#include "attn/tile.cuh"
#include "base/math.cuh"
#include "ptx/red.cuh"

// 0.69 times the largest number: beyond, lse * log2(e) may not be finite. A row whose lse is below
// minus that counts as one that sees no key: a weight of 1 and many of 1 / seqlen_k have the same
// lse there.
constexpr f64 kMostLse = 1.38 * (sizeof(Real) == 8 ? 0x1p1023 : 0x1p127);

// Those of one head.
struct BackwardRows {
  Real* lse;      // natural log; +inf where there is no row, or one that counts as seeing no key
  Real* delta;    // D = rowsum(dO * O) - dlse; 0 there
  Real* splits;   // float32: 1 if tensor cores may multiply its Q and dO (tile/tf32.cuh), else 0
  Real* dq_sums;  // [padded_rows][kHeadDim], without the scale

  DEVICE BackwardRows(const BackwardParams& p, int batch, int head) {
    const i64 all = i64(p.batch) * p.heads.value * p.padded_rows;
    const i64 before = (i64(batch) * p.heads.value + head) * p.padded_rows;
    Real* rows = static_cast<Real*>(p.workspace);
    lse = rows + before;
    delta = rows + all + before;
    splits = rows + 2 * all + before;
    dq_sums = rows + (kDType == kFloat32 ? 3 : 2) * all + before * kHeadDim;
  }
  DEVICE BackwardRows(const BackwardParams& p, const Tile& tile)
      : BackwardRows(p, tile.batch, tile.head) {}

  // Whether a row contributes; of others dO counts as 0, whatever it holds.
  DEVICE bool sees_keys(int row) const { return lse[row] != infinity(); }
};

// Adds adjacent numbers to such sums, which other blocks add to meanwhile.
template <class T, int kCount> DEVICE void add_run(T* to, const T (&x)[kCount]) {
  if constexpr (kArch >= 90 && sizeof(T) == 4 && kCount == 4) {
    ptx::red_add_v4(to, x);
  } else if constexpr (kArch >= 90 && sizeof(T) == 4 && kCount == 2) {
    ptx::red_add_v2(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::red_add(to + i, x[i]);
  }
}
