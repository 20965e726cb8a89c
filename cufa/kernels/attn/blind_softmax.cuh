// Softmax over blocks for whose largest score nobody looks. docs/hopper.md says why it is exact.
#pragma once
#include "attn/block_softmax.cuh"

// How large the float16 weights of a row that one lane has of a block may be together, where nobody
// looks for the largest score: the largest float16 is 65504.
constexpr f32 kMostFloat16Weight = 32768.f;

// What a lane's part of l may become by blind updates: the parts of four lanes are to have a finite
// sum, and beside a sink the weight of an old m may vanish where that of the row does not.
constexpr f32 kMostSum = kSink ? 0x1p40f : 0x1p125f;

// From here on sums of weights times values may overflow that would not with weights up to 2^kSlack:
// four lanes' parts are as much as those of 32 keys.
constexpr f32 kDoubtfulSum = 0x1p11f;

// The two rows that a lane has of the 16 of its warp.
struct BlindSoftmax : OnlineSoftmax<2> {
  static constexpr int kRows = 2;

  using OnlineSoftmax::OnlineSoftmax;

  // The first block: s becomes P, and m is its largest score.
  template <class Scores> DEVICE void begin(Scores& s) {
    row_maxima(s, m);
    exponentials(s, m, scale, l);
  }

  // `update_apart` without a look at the scores: weights are relative to the m that earlier blocks
  // have left. bfloat16 has float32's range, and they may become as large as that. Where they
  // overflow, or m is of no use (-inf, or beyond kFoldLimit), l is not finite from here on, and
  // `is_lost` tells. float16 has 16 powers of 2 above 1: where weights leave them, m moves up.
  template <class Scores, class Follow> DEVICE void update_blind(Scores& s, Follow follow) {
    Real base[kRows], sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      base[r] = can_fold(m[r], scale) ? ptx::mul_rn(m[r], scale) : nan();
      sum[r] = 0;
    }
    // By pairs and by rows in turn: the additions are two chains, and wait for nobody else.
#pragma unroll
    for (int c = 0; c < Scores::kCols; c += 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s.at(r, c) = exp2_of(s.at(r, c) * scale - base[r]);
        s.at(r, c + 1) = exp2_of(s.at(r, c + 1) * scale - base[r]);
        sum[r] += s.at(r, c) + s.at(r, c + 1);
      }
    if constexpr (kDType == kFloat16) {
      bool large = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) large |= !(sum[r] <= kMostFloat16Weight);
      if (ptx::vote_any(large)) move_up_by_weights(s, sum, follow);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) l[r] += sum[r];
  }

  // Whether blind updates have overflowed in any row of the warp, or a NaN has come in.
  template <class Output> DEVICE bool is_lost(Output& o) const {
    bool doubtful = kLeft;  // later blocks, which are masked, may have made l small again
#pragma unroll
    for (int r = 0; r < kRows; ++r) doubtful |= !(l[r] <= kDoubtfulSum);
    if (!ptx::vote_any(doubtful)) return false;
    bool lost = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      lost |= !(l[r] <= kMostSum);
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) lost |= !(abs_of(o.at(r, c)) < infinity());
    }
    return ptx::vote_any(lost);
  }

 private:
  // Moves m up by what the weights s are: none is above 2 after it, or l is not finite. That is also
  // where the factor is flushed to 0, by which the largest weights would vanish with all others.
  template <class Scores, class Follow>
  DEVICE void move_up_by_weights(Scores& s, Real (&sum)[kRows], Follow follow) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Real top = 1;  // m stays where all weights are below
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) top = larger(top, s.at(r, c));
      top = row_max<Scores::kRowLanes>(top);
      const Real previous = m[r];
      m[r] += exponent_of(top) * ptx::rcp_approx(scale);
      const Real rescale = exp2_of(ptx::mul_rn(previous, scale) - ptx::mul_rn(m[r], scale));
      l[r] = rescale > 0 ? l[r] * rescale : nan();
      sum[r] *= rescale;
      scale_row(s, r, rescale);
      follow(r, rescale);
    }
  }
};
