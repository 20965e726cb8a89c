// dS of the second crew, from dP and the P that its partners of the first hand over.
// Source: Dao, arXiv:2307.08691, Algorithm 2, line 14.
#pragma once
#include "attn/drop_weights.cuh"
#include "tile/crews.cuh"

// Marked weights become 0. A number of 16 bits has its sign in the uppermost.
template <int kSteps> DEVICE void drop_marked(OperandFragment<kKeyTiles, kSteps>& weights) {
  if constexpr (!kDropout) return;
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32& pair = weights.x[m][k][i];
        pair &= ~((pair >> 15 & 0x10001) * 0xffff);
      }
}

// P * (dP - D). Of a weight that is marked as dropped dP is 0.
DEVICE f32 score_change(f32 weight, f32 dp, f32 delta, const Params& p) {
  if constexpr (!kDropout) return weight * (dp - delta);
  const bool is_dropped = ptx::mov_b32(weight) >> 31;
  return abs_of(weight) * ((is_dropped ? 0.f : dp * kept_scale(p)) - delta);
}

// dS = P * (dP - D), as an operand; `first` counts the tile's queries by 16.
template <int kQueryTiles>
DEVICE OperandFragment<kKeyTiles, kQueryTiles / 2> score_changes(
    const KeyScores<kQueryTiles>& dp, const Handover& weights, const Params& p, const Real* delta,
    int first) {
  OperandFragment<kKeyTiles, kQueryTiles / 2> ds;
#pragma unroll
  for (int k = 0; k < kQueryTiles / 2; ++k) {
    Vec<Real, 2> deltas[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      deltas[n] = *reinterpret_cast<const Vec<Real, 2>*>(delta + dp.row(4 * k + 2 * n));
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      const Vec<u32, 4> given = weights.at(first + k, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vec<f32, 2> weight = unpack(given.x[i]);
        const f32* from = dp.x[m][2 * k + i / 2] + 2 * (i % 2);
        ds.x[m][k][i] = pack(score_change(weight.x[0], from[0], deltas[i / 2].x[0], p),
                             score_change(weight.x[1], from[1], deltas[i / 2].x[1], p));
      }
    }
  }
  return ds;
}
