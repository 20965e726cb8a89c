// P of the backward pass, for fragments whose rows are many and come in pairs.
// Source: Dao, arXiv:2307.08691, Algorithm 2, line 11.
#pragma once
#include "attn/score_gradients.cuh"

// s, scores as score_mod and the mask leave them, becomes P = exp(S - lse), for rows whose lse
// begins at `lse`. That both are scaled first, and rounded, adds no more than lse's own rounding.
// More than 1 is rounding too. A row without keys has an lse of +inf, and P = 0; no other's is so
// large that lse * log2(e) is infinite (kMostLse).
template <class Scores> DEVICE void weigh(Scores& s, const Real* lse, Real scale) {
#pragma unroll
  for (int r = 0; r < Scores::kRows; r += 2) {
    const auto pair = *reinterpret_cast<const Vec<Real, 2>*>(lse + Scores::row(r));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Real base = pair.x[i] * Real(kLog2e);
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        const Real x = s.at(r + i, c) * scale - base;
        s.at(r + i, c) = exp2_of(x > 0 ? Real(0) : x);  // NaN stays
      }
    }
  }
}
