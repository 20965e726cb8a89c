// Dropout on a fragment of weights.
#pragma once
#include "attn/dropout.cuh"
#include "attn/tile.cuh"

// What makes up for the weights that are dropped: what is kept is multiplied by it, as late as can
// be.
DEVICE Real kept_scale(const Params& p) { return kDropout ? Real(p.kept_scale) : Real(1); }

// Which weights of a fragment dropout keeps: a word for each row and a bit for each column, or the
// other way round where there are more rows. key0 is the key of column 0.
//
// One counter serves two rows and two columns, where a thread holds them. In a loop, and bit by bit
// first, since random words for all of a fragment at once would need more registers than there are.
template <class Fragment> struct KeptWeights {
  static constexpr bool kByRow = Fragment::kCols >= Fragment::kRows;
  static constexpr int kWords = kByRow ? Fragment::kRows : Fragment::kCols;
  static constexpr int kBits = kByRow ? Fragment::kCols : Fragment::kRows;
  static constexpr int kWordHalf = kByRow ? Fragment::kRowHalf : Fragment::kColHalf;
  static constexpr int kBitHalf = kByRow ? Fragment::kColHalf : Fragment::kRowHalf;
  static constexpr int kTurn = max_of(1, 2 * kBitHalf);  // bits of a turn: whole pairs
  static_assert(!kDropout || (kBits <= 32 && kBits % kTurn == 0));

  u32 words[kWords];

  DEVICE KeptWeights(const Params& p, const Tile& tile, int key0) {
    if constexpr (!kDropout) return;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll 1
    for (int first = kBits - kTurn; first >= 0; first -= kTurn) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] <<= kTurn;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (kWordHalf && w / max_of(1, kWordHalf) % 2) continue;  // the second of a pair
#pragma unroll
        for (int b = 0; b < max_of(1, kBitHalf); ++b) {
          const int row = tile.row0 + Fragment::row(kByRow ? w : first + b);
          const int key = key0 + Fragment::col(kByRow ? first + b : w);
          const DropoutBits bits = dropout_bits(p.dropout_seed, tile.batch, tile.head, row, key);
#pragma unroll
          for (int i = 0; i < (kWordHalf ? 2 : 1); ++i)
#pragma unroll
            for (int j = 0; j < (kBitHalf ? 2 : 1); ++j) {
              const bool lower = Fragment::kRowHalf ? (kByRow ? i : j) : row >> 3 & 1;
              const bool second = Fragment::kColHalf ? (kByRow ? j : i) : key >> 3 & 1;
              const bool keep = bits.keep(lower, second, p.dropout_threshold);
              words[w + i * kWordHalf] |= u32(keep) << (b + j * kBitHalf);
            }
        }
      }
    }
  }

  DEVICE bool at(int r, int c) const { return words[kByRow ? r : c] >> (kByRow ? c : r) & 1; }

  // What is dropped becomes 0.
  DEVICE void drop(Fragment& s) const {
    if constexpr (!kDropout) return;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
#pragma unroll
      for (int c = 0; c < Fragment::kCols; ++c)
        if (!at(r, c)) s.at(r, c) = 0;
  }

  // The same, but NaN stays.
  DEVICE void multiply(Fragment& s) const {
    if constexpr (!kDropout) return;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
#pragma unroll
      for (int c = 0; c < Fragment::kCols; ++c) s.at(r, c) *= Real(at(r, c) ? 1 : 0);
  }

  // What is dropped, of numbers that are not negative, becomes negative: so one number says both.
  // Weights are at least +0, as is the cap's slope that they are multiplied by, and rounding to 16
  // bits keeps the sign, of what becomes 0 too. It loses a NaN's: that is dropped by none.
  DEVICE void mark(Fragment& s) const {
    if constexpr (!kDropout) return;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
#pragma unroll
      for (int c = 0; c < Fragment::kCols; ++c)
        if (!at(r, c)) s.at(r, c) = -s.at(r, c);
  }
};

// Weights that dropout drops become 0. The row sums have been taken by then: they are those of all
// weights.
template <class Fragment>
DEVICE void drop_weights(Fragment& s, const Params& p, const Tile& tile, int key0) {
  KeptWeights<Fragment>(p, tile, key0).drop(s);
}
