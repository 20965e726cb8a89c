// Which keys a row may see: those of the sequence, inside the band, that the mask leaves.
#pragma once
#include "attn/score_row.cuh"
#include "base/math.cuh"

// Row i sees keys row_begin(i) .. row_end(i) - 1, as far as the band goes.
DEVICE int row_begin(const Params& p, int row) {
  return kLeft ? max_of(0, row + p.diagonal - p.left) : 0;
}
DEVICE int row_end(const Params& p, int row) {
  return kRight ? min_of(p.seqlen_k, row + p.diagonal + p.right + 1) : p.seqlen_k;
}

// Scores of hidden keys become -inf: those past the end and outside the band, and those for which
// `hides(r, c)`, asked about the others, holds. key0 is the key of column 0.
template <class Fragment, class Hides>
DEVICE void hide(Fragment& s, const Params& p, const Tile& tile, int key0, Hides hides) {
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) {
    const int row = tile.row0 + s.row(r);
    const bool exists = row < p.seqlen_q;  // beyond, its bounds might not fit an int
    const int begin = exists ? row_begin(p, row) - key0 : 0;
    const int end = exists ? row_end(p, row) - key0 : 0;
#pragma unroll
    for (int c = 0; c < Fragment::kCols; ++c) {
      const int col = s.col(c);
      bool visible = col < end;
      if constexpr (kLeft) visible = visible && col >= begin;
      visible = visible && !hides(r, c);
      if (!visible) s.at(r, c) = -infinity();
    }
  }
}

template <class Fragment>
DEVICE void apply_bounds(Fragment& s, const Params& p, const Tile& tile, int key0) {
  hide(s, p, tile, key0, [](int, int) { return false; });
}

template <class Fragment>
DEVICE void apply_mask(Fragment& s, const Params& p, const Tile& tile, int key0) {
  if constexpr (!kMask) return apply_bounds(s, p, tile, key0);
  hide(s, p, tile, key0, [&](int r, int c) {
    const ScoreRow<u8> mask(p.mask, p.mask_stride, p, tile, tile.row0 + s.row(r));
    return !mask.at(key0 + s.col(c));
  });
}
