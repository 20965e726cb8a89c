// Softmax over one block of keys, and the step from one maximum to another.
// Source: Dao et al., arXiv:2205.14135, Algorithm 1, lines 10 and 11.
#pragma once
#include "attn/softmax.cuh"

// Each row's largest score among this thread's keys and those of the lanes that share the row.
template <class Scores> DEVICE void row_maxima(Scores& s, Real (&top)[Scores::kRows]) {
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    top[r] = s.at(r, 0);
#pragma unroll
    for (int c = 1; c < Scores::kCols; ++c) top[r] = larger(top[r], s.at(r, c));
    top[r] = row_max<Scores::kRowLanes>(top[r]);
  }
}

// s becomes P~ = exp2(scale * (s - top)); `sum` is this lane's part of its row sums.
template <class Scores>
DEVICE void exponentials(Scores& s, const Real (&top)[Scores::kRows], Real scale,
                         Real (&sum)[Scores::kRows]) {
  bool special = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) special |= !can_fold(top[r], scale);
  if (ptx::vote_any(special)) {
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) {
      // A row that sees no key of this block: -inf - -inf would be NaN.
      const bool apart = can_fold(top[r], scale) || top[r] == -infinity();
      const Real shift = apart ? Real(0) : top[r];
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) s.at(r, c) -= shift;
    }
  }
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const Real base = can_fold(top[r], scale) ? ptx::mul_rn(top[r], scale) : Real(0);
    sum[r] = 0;
#pragma unroll
    for (int c = 0; c < Scores::kCols; ++c) {
      s.at(r, c) = exp2_of(s.at(r, c) * scale - base);
      sum[r] += s.at(r, c);
    }
  }
}

// The same, with whole row sums.
template <class Scores>
DEVICE void exponentials_and_sums(Scores& s, const Real (&top)[Scores::kRows], Real scale,
                                  Real (&sum)[Scores::kRows]) {
  exponentials(s, top, scale, sum);
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) sum[r] = row_sum<Scores::kRowLanes>(sum[r]);
}

// exp2(scale * (from - to)) as `exponentials` rounds it, so that weights relative to `from` become
// weights relative to `to`.
DEVICE Real move_weights(Real from, Real to, Real scale) {
  if (can_fold(to, scale)) return exp2_of(ptx::mul_rn(from, scale) - ptx::mul_rn(to, scale));
  return exp2_of((from - (to == -infinity() ? Real(0) : to)) * scale);
}
