// Dropout on a fragment of weights.
#pragma once
#include "attn/dropout.cuh"
#include "attn/tile.cuh"

// What makes up for the weights that are dropped: the output is multiplied by it, at its end.
DEVICE Real kept_scale(const Params& p) { return kDropout ? Real(p.kept_scale) : Real(1); }

// Weights that dropout drops become 0. The row sums have been taken by then: they are those of all
// weights. key0 is the key of column 0.
//
// One counter serves two rows and two columns, where a thread holds them. In a loop, and bit by bit
// first, since random words for all of a fragment at once would need more registers than there are.
template <class Fragment>
DEVICE void drop_weights(Fragment& s, const Params& p, const Tile& tile, int key0) {
  if constexpr (!kDropout) return;
  constexpr int kRows = Fragment::kRows, kCols = Fragment::kCols;
  constexpr int kRowStep = Fragment::kRowPairs ? 2 : 1, kColStep = Fragment::kColPairs ? 2 : 1;
  constexpr int kTurn = kColStep * kColStep;  // columns: two pairs, side by side
  static_assert(kCols <= 32 && kCols % kTurn == 0 && kRows % kRowStep == 0);

  u32 kept[kRows];  // bit c for column c
#pragma unroll
  for (int r = 0; r < kRows; ++r) kept[r] = 0;
#pragma unroll 1
  for (int first = kCols - kTurn; first >= 0; first -= kTurn) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] <<= kTurn;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowStep)
#pragma unroll
      for (int c = 0; c < kColStep; ++c) {
        const int row = tile.row0 + s.row(r), key = key0 + s.col(first + c);
        const DropoutBits bits = dropout_bits(p.dropout_seed, tile.batch, tile.head, row, key);
#pragma unroll
        for (int down = 0; down < kRowStep; ++down)
#pragma unroll
          for (int right = 0; right < kColStep; ++right) {
            const bool lower = kRowStep == 2 ? down : row >> 3 & 1;
            const bool second = kColStep == 2 ? right : key >> 3 & 1;
            const bool keep = bits.keep(lower, second, p.dropout_threshold);
            kept[r + down] |= u32(keep) << (c + 2 * right);
          }
      }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c)
      if (!(kept[r] >> c & 1)) s.at(r, c) = 0;
}
