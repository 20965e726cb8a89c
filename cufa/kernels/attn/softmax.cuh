// Online softmax over the rows of a fragment.
// Source: Dao, arXiv:2307.08691, Algorithm 1, lines 9, 10, 12 and 13.
#pragma once
#include "attn/drop_weights.cuh"
#include "attn/tile.cuh"
#include "base/math.cuh"
#include "ptx/vote.cuh"
#include "tile/reduce.cuh"

// Beyond this exponent of 2, to round scale * s and scale * m apart costs more than their
// difference is worth: subtract first, then scale.
constexpr f32 kFoldLimit = 16384.f;

// How far, as an exponent of 2, a score may exceed m before m and the output follow it: until then
// weights are up to 2^kSlack, and most blocks multiply no output. In 16 bits the largest weight is
// then rounded like others, where with its score for m it would be 1.
constexpr f32 kSlack = 8.f;

// From scores, as score_mod leaves them, to exponents of 2; positive, so that the order stays.
DEVICE Real exponent_scale(const Params& p) {
  return kFoldScale ? Real(p.scale * kLog2e) : Real(kLog2e);
}

// Whether scale * s and scale * x may be rounded apart; not where x is infinite or NaN.
DEVICE bool can_fold(Real x, Real scale) { return abs_of(ptx::mul_rn(x, scale)) < kFoldLimit; }

DEVICE Real sink_of(const Params& p, const Tile& tile) {
  if constexpr (!kSink) return 0;
  return static_cast<const Real*>(p.sink)[tile.head * p.sink_stride_head];
}

struct RowEnd {
  Real factor;  // what the row's output is multiplied by; 0 for a row that saw no key
  Real lse;     // natural log; -inf for such a row, if it has no sink
};

// `sum` is that of the weights exp2(scale * (s - m)), dropped ones too.
DEVICE RowEnd end_row(const Params& p, Real m, Real sum, Real sink) {
  Real rescale = 1;
  Real top = kFoldScale ? m * Real(p.scale) : m;  // natural units
  if constexpr (kSink) {                          // one more score, without a value
    const Real base = larger(top, sink);
    if (base != -infinity()) {
      // A large sink makes results tiny, and bfloat16 reaches as far down as float32.
      rescale = exp2_with_denormals((top - base) * Real(kLog2e));
      sum = sum * rescale + exp2_with_denormals((sink - base) * Real(kLog2e));
      top = base;
    }
  }
  return {sum == 0 ? Real(0) : rescale * kept_scale(p) / sum,
          sum == 0 ? -infinity() : top + log2_of(sum) * Real(kLn2)};
}

template <class Fragment> DEVICE void scale_row(Fragment& x, int r, Real factor) {
#pragma unroll
  for (int c = 0; c < Fragment::kCols; ++c) x.at(r, c) *= factor;
}

template <int kRows> struct OnlineSoftmax {
  Real scale;     // exponent_scale
  Real m[kRows];  // what the weights of a row are relative to: about its largest score so far
  Real l[kRows];  // this lane's part of sum exp2(scale * (s - m))

  DEVICE explicit OnlineSoftmax(const Params& p) : scale(exponent_scale(p)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = -infinity(), l[r] = 0;
  }

  // s becomes P = exp2(scale * (s - m)), and the output so far follows m where that moves.
  template <class Scores, class Output> DEVICE void update(Scores& s, Output& o) {
    static_assert(Output::kRows == kRows);
    update_apart(s, [&](int r, Real factor) { scale_row(o, r, factor); });
  }

  // The same where the output is elsewhere: where m moves, follow(r, factor) is told for every row
  // what to multiply it by.
  template <class Scores, class Follow> DEVICE void update_apart(Scores& s, Follow follow) {
    static_assert(Scores::kRows == kRows);
    Real top[kRows];
    bool special = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = s.at(r, 0);
#pragma unroll
      for (int c = 1; c < Scores::kCols; ++c) top[r] = larger(top[r], s.at(r, c));
      top[r] = row_max<Scores::kRowLanes>(top[r]);
      // Without a branch for each row.
      special |= ((top[r] - m[r]) * scale > kSlack) | !can_fold(m[r], scale);
    }
    // One branch for all rows, so that exponentials and the product that follows share a block of
    // instructions, in which the compiler runs one under the other.
    if (ptx::vote_any(special)) move_up(top, s, follow);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Real base = can_fold(m[r], scale) ? ptx::mul_rn(m[r], scale) : Real(0);
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        s.at(r, c) = exp2_of(s.at(r, c) * scale - base);
        l[r] += s.at(r, c);
      }
    }
  }

  // Divides the output by l; returns lse, natural log. A row that saw no key gives 0 and -inf.
  template <class Output>
  DEVICE void finish(Output& o, const Params& p, const Tile& tile, Real (&lse)[kRows]) {
    Real factors[kRows];
    end_rows<Output::kRowLanes>(p, tile, factors, lse);
#pragma unroll
    for (int r = 0; r < kRows; ++r) scale_row(o, r, factors[r]);
  }

  // The same for an output that is not there yet: what to multiply it by.
  template <int kRowLanes>
  DEVICE void end_rows(const Params& p, const Tile& tile, Real (&factors)[kRows],
                       Real (&lse)[kRows]) const {
    const Real sink = sink_of(p, tile);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowEnd end = end_row(p, m[r], row_sum<kRowLanes>(l[r]), sink);
      factors[r] = end.factor;
      lse[r] = end.lse;
    }
  }

 private:
  // Moves m up to the largest score so far. The output so far is multiplied by
  // diag(exp(m_prev - m_new)), not by its inverse.
  template <class Scores, class Follow>
  DEVICE void move_up(const Real (&top)[kRows], Scores& s, Follow follow) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Real previous = m[r];
      m[r] = larger(previous, top[r]);
      Real from = ptx::mul_rn(previous, scale), base = ptx::mul_rn(m[r], scale);
      if (!can_fold(m[r], scale)) {
        // A row without a key yet keeps its place: -inf - -inf would be NaN.
        const Real shift = m[r] == -infinity() ? Real(0) : m[r];
#pragma unroll
        for (int c = 0; c < Scores::kCols; ++c) s.at(r, c) -= shift;
        from = (previous - shift) * scale;
        base = 0;
      }
      const Real rescale = exp2_of(from - base);
      l[r] *= rescale;
      follow(r, rescale);
    }
  }
};
