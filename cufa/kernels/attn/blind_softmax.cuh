// Online softmax that looks for the largest score in some blocks only; the others are blind.
// docs/hopper.md, section 4, says why it is exact.
#pragma once
#include "attn/block_softmax.cuh"
#include "tile/mma_fragment.cuh"

// Whether blind blocks move m up too. Weights of float16 must not leave its range; and ALiBi, as a
// bias may, makes scores grow from block to block, further than even float32 reaches.
constexpr bool kFollowsWeights = kDType == kFloat16 || kAlibi || kBias != kNone;

// Up to this sum, of one lane's weights of a row in one block, m stays then. None of the weights is
// above it, and the largest float16 is 65504.
constexpr f32 kMostBlindSum = kDType == kFloat16 ? 32768.f : 0x1p60f;

// Above this a lane's part of the divisor counts as lost: the parts of four lanes are to have a
// finite sum. l is finite then too; not to ask it keeps the output the same whether lse is wanted.
constexpr f32 kMostSum = 0x1p125f;

// Where a lane's part of the divisor is above this, weights times values may have overflowed that
// would not with weights up to 2^kSlack (the parts of four lanes are as much as those of 32 such
// keys): O has to be looked at.
constexpr f32 kDoubtfulSum = 0x1p11f;

// Whether the divisor may be small again where it was above that: m has moved up since then, with
// blocks that a bound on the left cuts, or by weights. Those of float16 are never so large that O
// overflows.
constexpr bool kMayShrink = kLeft || (kFollowsWeights && kDType == kBFloat16);

// A row with no higher score than this counts as one that has seen no key: some hide keys by biases
// of -10000 or the lowest number, not -inf, and scores that follow would be too far above that m.
// Where it is a score all the same, only time is lost.
DEVICE Real hidden_score() { return kBias != kNone ? -1000.f : -infinity(); }

// How far, in powers of 2, m moves up at once: what is below 2^-126 counts as 0.
constexpr f32 kLongestMove = 125.f;

// What a row's output is divided by.
//
// Weights are rounded to 16 bits for the product. Divided by the sum of rounded weights, what
// rounding adds to a weight is divided by too: a row that sees little but one key has that key's
// value, whatever m is. Divided by l it is off by that weight's rounding, except where m is that
// key's score, whose weight is 1.
enum class DivideBy {
  kL,        // the sum of weights as they are
  kRounded,  // that of rounded weights, which are added up here
  kProduct   // the same, from the product
};

// The two rows that a lane has of the 16 of its warp. lse is by l in any case.
template <DivideBy kDivideBy> struct BlindSoftmax : private OnlineSoftmax<2> {
  static constexpr int kRows = 2;

  using OnlineSoftmax::OnlineSoftmax;

  // The first block: s becomes P, and m is its largest score.
  template <class Scores> DEVICE void begin(Scores& s) {
    row_maxima(s, m);
    exponentials(s, m, scale, l);
#pragma unroll
    for (int r = 0; r < kRows; ++r) rounded_l[r] = 0;
    if constexpr (kDivideBy == DivideBy::kRounded) round_and_add(s);
  }

  // A row whose sum is too large by now stays lost, though m moves up and makes it small.
  template <class Scores, class Follow> DEVICE void update_apart(Scores& s, Follow follow) {
    OnlineSoftmax::update_apart(s, [&](int r, Real factor) {
      if (kMayShrink && kDivideBy != DivideBy::kL && !(rounded_l[r] <= kMostSum)) factor = nan();
      rounded_l[r] *= factor;
      follow(r, factor);
    });
    if constexpr (kDivideBy == DivideBy::kRounded) round_and_add(s);
  }

  // Whether this lane's rows have an m by which blocks can be weighed blind, those that exist.
  template <class Scores> DEVICE bool has_begun(const Params& p, const Tile& tile) const {
    bool has = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      has &= m[r] > hidden_score() || tile.row0 + Scores::row(r) >= p.seqlen_q;
    return has;
  }

  // `update_apart` without a look at the scores: weights are relative to the m that earlier blocks
  // have left. bfloat16 has float32's range, and they may become as large as that. Where they
  // overflow, or m is of no use (-inf, or beyond kFoldLimit), l is not finite from here on, and
  // `is_lost` tells. If kFollowsWeights, m moves up where weights are large.
  template <class Scores, class Follow> DEVICE void update_blind(Scores& s, Follow follow) {
    Real base[kRows], sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      base[r] = can_fold(m[r], scale) ? ptx::mul_rn(m[r], scale) : nan();
      sum[r] = 0;
    }
    // By pairs, and by rows in turn: the sums are two chains of half as many additions, neither of
    // which waits for the other.
#pragma unroll
    for (int c = 0; c < Scores::kCols; c += 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s.at(r, c) = exp2_of(s.at(r, c) * scale - base[r]);
        s.at(r, c + 1) = exp2_of(s.at(r, c + 1) * scale - base[r]);
        sum[r] += s.at(r, c) + s.at(r, c + 1);
      }
    if constexpr (kFollowsWeights) {
      bool large = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) large |= sum[r] > kMostBlindSum;
      if (ptx::vote_any(large)) move_up_by_weights(s, sum, follow);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) l[r] += sum[r];
    if constexpr (kDivideBy == DivideBy::kRounded) round_and_add(s);
  }

  // Sums of rounded weights, from a column of the output. Every lane of a row has all of its sum,
  // and takes its part.
  template <class Output> DEVICE void take_sums(Output& o, int column) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rounded_l[r] = o.at(r, column) / Output::kRowLanes;
  }

  // Whether the row sums of the warp call for a closer look, as few do.
  template <class Output>
  DEVICE bool is_doubtful(const Output& o, const Params& p, const Tile& tile) const {
    bool doubtful = kMayShrink;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      doubtful |= !(divisor(r) <= kDoubtfulSum) && tile.row0 + o.row(r) < p.seqlen_q;
    return ptx::vote_any(doubtful);
  }

  // Then: whether blind updates have overflowed in any row of the warp, or a NaN has come in.
  template <class Output> DEVICE bool is_lost(Output& o, const Params& p, const Tile& tile) const {
    bool lost = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (tile.row0 + o.row(r) >= p.seqlen_q) continue;  // all its keys may have been masked
      lost |= !(divisor(r) <= kMostSum);
#pragma unroll
      for (int c = 0; c < Output::kCols; ++c) lost |= !(abs_of(o.at(r, c)) < infinity());
    }
    return ptx::vote_any(lost);
  }

  // And moves m up to about where the largest score is, as the divisor tells: the sum of an old m
  // and a large log of l would be less exact, and beside a sink the weight of an old m may vanish.
  template <class Output> DEVICE void move_to_top(Output& o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Real sum = row_sum<Output::kRowLanes>(divisor(r));
      if (!(sum > 1)) continue;
      const Real rescale = move(r, sum);
      l[r] *= rescale;
      rounded_l[r] *= rescale;
      scale_row(o, r, rescale);
    }
  }

  template <int kRowLanes>
  DEVICE void end_rows(const Params& p, const Tile& tile, Real (&factors)[kRows],
                       Real (&lse)[kRows]) const {
    const Real sink = sink_of(p, tile);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      factors[r] = end_row(p, m[r], row_sum<kRowLanes>(divisor(r)), sink).factor;
      // The compiler keeps the lanes' exchange, and so l, even where lse is not stored.
      lse[r] = kLse ? end_row(p, m[r], row_sum<kRowLanes>(l[r]), sink).lse : Real(0);
    }
  }

 private:
  Real rounded_l[kRows];  // of l, but the sum of rounded weights; not kept where l divides

  // This lane's part of what the row's output is divided by.
  DEVICE Real divisor(int r) const { return kDivideBy == DivideBy::kL ? l[r] : rounded_l[r]; }

  // By pairs, and by rows in turn, as in `update_blind`.
  template <class Scores> DEVICE void round_and_add(Scores& s) {
    Real sum[kRows] = {};
#pragma unroll
    for (int c = 0; c < Scores::kCols; c += 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Vec<f32, 2> pair = unpack(pack(s.at(r, c), s.at(r, c + 1)));
        s.at(r, c) = pair.x[0];
        s.at(r, c + 1) = pair.x[1];
        sum[r] += pair.x[0] + pair.x[1];
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r) rounded_l[r] += sum[r];
  }

  // Moves m up, so that a weight of `weight` becomes about 1; returns what to multiply weights by.
  // `scale` is positive, as is its reciprocal in float32: gpu/plan.py.
  DEVICE Real move(int r, Real weight) {
    const Real previous = m[r];
    m[r] += min_of(exponent_of(weight), kLongestMove) * ptx::rcp_approx(scale);
    return move_weights(previous, m[r], scale);
  }

  // Moves m up by what the weights s are: none is above 8 after it, or l is not finite.
  template <class Scores, class Follow>
  DEVICE void move_up_by_weights(Scores& s, Real (&sum)[kRows], Follow follow) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Real top = 1;  // m stays where all weights are below
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) top = larger(top, s.at(r, c));
      const Real rescale = move(r, row_max<Scores::kRowLanes>(top));
      l[r] *= rescale;
      rounded_l[r] *= rescale;
      follow(r, rescale);
      sum[r] = 0;  // anew: it may have been infinite where no weight is
#pragma unroll
      for (int c = 0; c < Scores::kCols; ++c) {
        s.at(r, c) *= rescale;
        sum[r] += s.at(r, c);
      }
    }
  }
};
