// What happens to a score between Q K^T and the mask: scale, softcap, ALiBi, bias, in this order.
//
// Where there is nothing to do but scale (kFoldScale), scores stay raw and softmax multiplies them
// by scale * log2(e) inside the exponent, in the same instruction as it subtracts the maximum.
#pragma once
#include "attn/score_row.cuh"
#include "base/math.cuh"

using Bias = Storage<kBias>::type;

template <DType kFrom> DEVICE Real bias_of(typename Storage<kFrom>::type bias) {
  // The lowest finite float64, by which others mark hidden keys, stays finite: a row of it is a
  // row of equal scores.
  if constexpr (kFrom == kFloat64 && sizeof(Real) == 4) return ptx::cvt_rz_f32_f64(bias);
  else return to_real<kFrom>(bias);
}

// key0 is the key of column 0; bias_at(r, c) is the bias of an element.
template <class Fragment, class At>
DEVICE void score_mod(Fragment& s, const Params& p, const Tile& tile, int key0, At bias_at) {
  if constexpr (kFoldScale) return;
  Real slope = 0;
  if constexpr (kAlibi) {
    const i64 place = tile.batch * p.alibi_stride_batch + tile.head * p.alibi_stride_head;
    slope = static_cast<const Real*>(p.alibi_slopes)[place];
  }
  const Real scale = Real(p.scale), softcap = Real(p.softcap);
  const Real scale_over_softcap = Real(p.scale_over_softcap);
  const int diagonal = p.seqlen_k - p.seqlen_q;  // ALiBi's is the same for causal="top_left"
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    // Columns are told apart as numbers: to convert one takes longer than all the rest.
    const int begin = tile.row0 + s.row(r) + diagonal - key0 - s.col(0);
#pragma unroll
    for (int c = 0; c < Fragment::kCols; ++c) {
      Real& x = s.at(r, c);
      x = kSoftcap ? softcap * tanh_of(x * scale_over_softcap) : x * scale;
      if constexpr (kAlibi) x -= slope * abs_of(Real(begin) - Real(s.col(c) - s.col(0)));
      if constexpr (kBias != kNone) x += bias_at(r, c);
    }
  }
}

// The same with a bias that is read here.
template <class Fragment>
DEVICE void score_mod(Fragment& s, const Params& p, const Tile& tile, int key0) {
  score_mod(s, p, tile, key0, [&](int r, int c) {
    const ScoreRow<Bias> bias(p.bias, p.bias_stride, p, tile, tile.row0 + s.row(r));
    // Keys past the end take the bias of the last one and are masked later: a conditional load
    // needs so many registers that the compiler spills.
    return bias_of<kBias>(bias.at(min_of(key0 + s.col(c), p.seqlen_k - 1)));
  });
}
