// What happens to a score between Q K^T and the mask: scale, softcap, ALiBi, bias, in this order.
//
// Where there is nothing to do but scale (kFoldScale), scores stay raw and softmax multiplies them by
// scale * log2(e) inside the exponent, which costs nothing.
#pragma once
#include "attn/score_row.cuh"
#include "base/math.cuh"

// From scores as score_mod leaves them to exponents of 2.
DEVICE Real exponent_scale(const Params& p) { return kFoldScale ? Real(p.scale * kLog2e) : Real(kLog2e); }

template <DType kFrom> DEVICE Real bias_of(typename Storage<kFrom>::type bias) {
  // The lowest finite float64, by which others mark hidden keys, stays finite: a row of it is a row of equal scores.
  if constexpr (kFrom == kFloat64 && sizeof(Real) == 4) return ptx::cvt_rz_f32_f64(bias);
  else return to_real<kFrom>(bias);
}

template <class Fragment> DEVICE void score_mod(Fragment& s, const Params& p, const Tile& tile, int key0) {
  if constexpr (kFoldScale) return;
  Real slope = 0;
  if constexpr (kAlibi) {
    slope = static_cast<const Real*>(p.alibi_slopes)[tile.batch * p.alibi_stride_batch + tile.head * p.alibi_stride_head];
  }
  const Real scale = Real(p.scale), softcap = Real(p.softcap), scale_over_softcap = Real(p.scale_over_softcap);
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    const int row = tile.row0 + s.row(r);
    const ScoreRow<Storage<kBias>::type> bias(p.bias, p.bias_stride, p, tile, row);
#pragma unroll
    for (int c = 0; c < Fragment::kCols; ++c) {
      const int key = key0 + s.col(c);
      Real& x = s.at(r, c);
      x = kSoftcap ? softcap * tanh_of(x * scale_over_softcap) : x * scale;
      if constexpr (kAlibi) x -= slope * Real(abs_of(Real(row + p.seqlen_k - p.seqlen_q - key)));
      // Keys past the end take the bias of the last one and are masked later. Loading under a condition instead
      // takes the compiler so many registers that it spills.
      if constexpr (kBias != kNone) x += bias_of<kBias>(bias.at(min_of(key, p.seqlen_k - 1)));
    }
  }
}
