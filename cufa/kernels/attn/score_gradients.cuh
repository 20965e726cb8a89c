// From scores and dP = dO V^T to P and dS, of the rows of a fragment.
// Source: Dao, arXiv:2307.08691, Algorithm 2, lines 11 and 14.
#pragma once
#include "attn/backward_rows.cuh"
#include "attn/score_mod.cuh"
#include "attn/softmax.cuh"

// s, scores as score_mod and the mask leave them, becomes P = exp(S - lse). More than 1 is lse's
// rounding, which in large scores may be large too.
template <class Scores>
DEVICE void weights_of(Scores& s, const Real (&lse)[Scores::kRows], const Params& p) {
  const Real scale = exponent_scale(p), natural = kFoldScale ? Real(p.scale) : Real(1);
  bool special = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r)
    special |= !can_fold(lse[r], Real(kLog2e)) && lse[r] != infinity();
  special = ptx::vote_any(special);
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const Real base = ptx::mul_rn(lse[r], Real(kLog2e));
#pragma unroll
    for (int c = 0; c < Scores::kCols; ++c) {
      // Large scores are rounded once: subtract first, then scale.
      const Real x = special ? (s.at(r, c) * natural - lse[r]) * Real(kLog2e)
                             : s.at(r, c) * scale - base;
      s.at(r, c) = exp2_of(x > 0 ? Real(0) : x);  // NaN stays
    }
  }
}

// The derivative of the cap: 1 - tanh^2, from scores as Q K^T leaves them.
template <class Scores> DEVICE void slope_of_cap(Scores& slope, Scores& s, const Params& p) {
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r)
#pragma unroll
    for (int c = 0; c < Scores::kCols; ++c) {
      const Real t = tanh_of(s.at(r, c) * Real(p.scale_over_softcap));
      slope.at(r, c) = 1 - t * t;
    }
}

// x *= y, element by element.
template <class Scores> DEVICE void multiply(Scores& x, Scores& y) {
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r)
#pragma unroll
    for (int c = 0; c < Scores::kCols; ++c) x.at(r, c) *= y.at(r, c);
}

// What comes back to scores: to those that the bias is added to, or, behind the cap and but for the
// scale, to those of Q K^T.
enum class Back { kBias, kProduct };

// s = Q K^T of a key tile becomes P, and ds is dS = P * (dP - D). `hide(s)` masks s, and
// `multiply_values(ds)` makes dP = dO V^T, once the registers that masks and biases need are free.
// Of weights that dropout drops P and dP become 0, but a P of NaN stays; dP of the others is
// multiplied by kept_scale, and dV, which is the last to have P, is to be. lse and D of the tile's
// rows begin at `lse_of` and `delta_of`.
template <Back kTo, class Scores, class Hide, class Product>
DEVICE void score_gradients(Scores& s, Scores& ds, const BackwardParams& p, const Tile& tile,
                            int key0, const Real* lse_of, const Real* delta_of, Hide hide,
                            Product multiply_values) {
  constexpr bool kThroughCap = kSoftcap && kTo == Back::kProduct;
  Scores slope;
  if constexpr (kThroughCap) slope_of_cap(slope, s, p);
  score_mod(s, p, tile, key0);
  hide(s);
  Real lse[Scores::kRows];
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) lse[r] = lse_of[s.row(r)];
  weights_of(s, lse, p);
  const KeptWeights<Scores> kept(p, tile, key0);
  multiply_values(ds);
  kept.drop(ds);
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const Real delta = delta_of[s.row(r)];
#pragma unroll
    for (int c = 0; c < Scores::kCols; ++c)
      ds.at(r, c) = s.at(r, c) * (ds.at(r, c) * kept_scale(p) - delta);
  }
  kept.multiply(s);
  if constexpr (kThroughCap) multiply(ds, slope);
}
