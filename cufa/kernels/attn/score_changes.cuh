// dS of the second crew, from dP and the P that its partners of the first hand over.
// Source: Dao, arXiv:2307.08691, Algorithm 2, line 14.
#pragma once
#include "tile/crews.cuh"

// dS = P * (dP - D), as an operand; `first` counts the tile's queries by 16.
template <int kQueryTiles>
DEVICE OperandFragment<kKeyTiles, kQueryTiles / 2> score_changes(
    const KeyScores<kQueryTiles>& dp, const Handover& weights, const Real* delta, int first) {
  OperandFragment<kKeyTiles, kQueryTiles / 2> ds;
#pragma unroll
  for (int k = 0; k < kQueryTiles / 2; ++k) {
    Vec<Real, 2> change[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      change[n] = *reinterpret_cast<const Vec<Real, 2>*>(delta + dp.row(4 * k + 2 * n));
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      const Vec<u32, 4> p = weights.at(first + k, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vec<f32, 2> weight = unpack(p.x[i]);
        const f32* from = dp.x[m][2 * k + i / 2] + 2 * (i % 2);
        ds.x[m][k][i] = pack(weight.x[0] * (from[0] - change[i / 2].x[0]),
                             weight.x[1] * (from[1] - change[i / 2].x[1]));
      }
    }
  }
  return ds;
}
