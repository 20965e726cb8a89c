// Online softmax over the rows of a fragment.
// Source: Dao, arXiv:2307.08691, Algorithm 1, lines 9, 10, 12 and 13.
#pragma once
#include "attn/tile.cuh"
#include "base/math.cuh"
#include "tile/reduce.cuh"

// Beyond this exponent of 2, to round scale * s and scale * m apart costs more than their
// difference is worth: subtract first, then scale.
constexpr f32 kFoldLimit = 16384.f;

template <int kRows> struct OnlineSoftmax {
  Real scale;     // from scores, as score_mod leaves them, to exponents of 2
  Real m[kRows];  // largest score so far
  Real l[kRows];  // this lane's part of sum exp2(scale * (s - m))

  DEVICE explicit OnlineSoftmax(const Params& p)
      : scale(kFoldScale ? Real(p.scale * kLog2e) : Real(kLog2e)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = -infinity(), l[r] = 0;
  }

  // s becomes P = exp2(scale * (s - m)), and the output so far follows the new m.
  template <class Scores, class Output> DEVICE void update(Scores& s, Output& o) {
    static_assert(Scores::kRows == kRows && Output::kRows == kRows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Real top = s.at(r, 0);
#pragma unroll
      for (int c = 1; c < Scores::kCols; ++c) top = larger(top, s.at(r, c));
      top = larger(m[r], row_max<Scores::kRowLanes>(top));
      Real previous = m[r], base = ptx::mul_rn(top, scale);
      m[r] = top;
      if (!kFoldScale || !(abs_of(base) < kFoldLimit)) {
        // A row without a key yet keeps its place: -inf - -inf would be NaN.
        const Real shift = top == -infinity() ? Real(0) : top;
#pragma unroll
        for (int c = 0; c < Scores::kCols; ++c) s.at(r, c) -= shift;
        previous -= shift;
        base = 0;
      }
      // diag(exp(m_prev - m_new)), not its inverse. Both products are rounded: a base that is
      // exact here and rounded below would be off by a factor that grows with every block.
      const Real rescale = exp2_of(ptx::mul_rn(previous, scale) - base);
      l[r] *= rescale;
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        s.at(r, c) = exp2_of(s.at(r, c) * scale - base);
        l[r] += s.at(r, c);
      }
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) o.at(r, c) *= rescale;
    }
  }

  // Divides the output by l; returns lse, natural log. A row that saw no key gives 0 and -inf.
  template <class Output>
  DEVICE void finish(Output& o, const Params& p, const Tile& tile, Real (&lse)[kRows]) {
    Real sink = 0;
    if constexpr (kSink) sink = static_cast<const Real*>(p.sink)[tile.head * p.sink_stride_head];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Real sum = row_sum<Output::kRowLanes>(l[r]), rescale = 1;
      Real top = kFoldScale ? m[r] * scale * Real(kLn2) : m[r];  // natural units
      if constexpr (kSink) {                                     // one more score, without a value
        const Real base = larger(top, sink);
        if (base != -infinity()) {
          // A large sink makes results tiny, and bfloat16 reaches as far down as float32.
          rescale = exp2_with_denormals((top - base) * Real(kLog2e));
          sum = sum * rescale + exp2_with_denormals((sink - base) * Real(kLog2e));
          top = base;
        }
      }
      const Real inverse = sum == 0 ? Real(0) : rescale / sum;
      lse[r] = sum == 0 ? -infinity() : top + log2_of(sum) * Real(kLn2);
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) o.at(r, c) *= inverse;
    }
  }
};
