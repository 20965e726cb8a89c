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

// Scores of hidden keys become -inf. key0 is the key of column 0; mask_at(r, c), called for keys
// that exist, is what the mask says of an element.
template <class Fragment, class At>
DEVICE void apply_mask(Fragment& s, const Params& p, const Tile& tile, int key0, At mask_at) {
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
      if constexpr (kMask) visible = visible && mask_at(r, c);
      if (!visible) s.at(r, c) = -infinity();
    }
  }
}

// The same of a mask that is read here.
template <class Fragment>
DEVICE void apply_mask(Fragment& s, const Params& p, const Tile& tile, int key0) {
  apply_mask(s, p, tile, key0, [&](int r, int c) {
    return ScoreRow<u8>(p.mask, p.mask_stride, p, tile, tile.row0 + s.row(r)).at(key0 + s.col(c));
  });
}
