// What happens to a score between Q K^T and the mask: scale, softcap, ALiBi, bias, in this order.
//
// Afterwards scores are in units of log2. Where there is nothing to do but scale (kFoldScale), they stay raw and
// softmax multiplies them by scale * log2(e) inside the exponent, which costs nothing.
#pragma once
#include "attn/score_row.cuh"
#include "base/math.cuh"

// From scores as score_mod leaves them to exponents of 2.
DEVICE Real exponent_scale(const Params& p) { return kFoldScale ? Real(p.scale_log2) : Real(1); }

// The lowest finite float, by which others mark hidden keys, must not become -inf: a row of it is a row of equal scores.
template <DType kFrom> DEVICE Real bias_log2(typename Storage<kFrom>::type bias) {
  using Wide = typename Accumulator<kFrom == kFloat64 || kDType == kFloat64>::type;
  const Wide b = kFrom == kFloat64 ? Wide(bias) : Wide(to_real<kFrom>(bias));
  if (b == Wide(infinity()) || b == Wide(-infinity())) return Real(b);
  const Wide x = b * Wide(kLog2e), bound = -Wide(lowest());
  return Real(x < -bound ? -bound : x > bound ? bound : x);
}

template <class Fragment> DEVICE void score_mod(Fragment& s, const Params& p, const Tile& tile, int key0) {
  if constexpr (kFoldScale) return;
  Real slope = 0;
  if constexpr (kAlibi) {
    slope = static_cast<const Real*>(p.alibi_slopes)[tile.batch * p.alibi_stride_batch + tile.head * p.alibi_stride_head];
    slope *= Real(kLog2e);
  }
  const Real scale_log2 = Real(p.scale_log2);
  const Real softcap_log2 = Real(p.softcap_log2), scale_over_softcap = Real(p.scale_over_softcap);
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    const int row = tile.row0 + s.row(r);
    const ScoreRow<Storage<kBias>::type> bias(p.bias, p.bias_stride, p, tile, row);
#pragma unroll
    for (int c = 0; c < Fragment::kCols; ++c) {
      const int key = key0 + s.col(c);
      Real& x = s.at(r, c);
      x = kSoftcap ? softcap_log2 * tanh_of(x * scale_over_softcap) : x * scale_log2;
      if constexpr (kAlibi) x -= slope * Real(abs_of(Real(row + p.seqlen_k - p.seqlen_q - key)));
      // Keys past the end take the bias of the last one and are masked later. Loading under a condition instead
      // takes the compiler so many registers that it spills.
      if constexpr (kBias != kNone) x += bias_log2<kBias>(bias.at(min_of(key, p.seqlen_k - 1)));
    }
  }
}
