// Which key blocks a query tile needs, and which of them need masking.
#pragma once
#include "attn/mask.cuh"

struct KeyRange {
  int first, last;              // blocks first .. last - 1: no row sees a key of the others
  int whole_first, whole_last;  // whole_first .. whole_last - 1 lie inside every row's bounds

  DEVICE bool is_cut(int n) const { return n < whole_first || n >= whole_last; }
  DEVICE bool is_partial(int n) const { return kMask || is_cut(n); }
};

DEVICE KeyRange visible_keys(const Params& p, const Tile& tile) {
  const int top = tile.row0, bottom = min_of(top + kBlockM, p.seqlen_q) - 1;
  KeyRange range;
  range.first = row_begin(p, top) / kBlockN;
  range.last = ceil_div(max_of(0, row_end(p, bottom)), kBlockN);
  range.whole_first = ceil_div(row_begin(p, bottom), kBlockN);
  range.whole_last = max_of(0, row_end(p, top)) / kBlockN;
  return range;
}

// Of a tile's key blocks those for its rows top .. top + rows - 1: from the last that they see down
// to the tile's first. One at least, so that rows that see no key go the way of all.
DEVICE KeyRange cut_right(const Params& p, const KeyRange& of_tile, int top, int rows) {
  KeyRange keys = of_tile;
  if constexpr (kRight) {
    const int bottom = min_of(top + rows, p.seqlen_q) - 1;
    keys.last = ceil_div(max_of(0, row_end(p, bottom)), kBlockN);
    // Every row is to have seen a key before the blind blocks, for an m. The first row sees least
    // on the right: the block with its last key does not count as whole.
    keys.whole_last = max_of(0, row_end(p, min_of(top, bottom)) - 1) / kBlockN;
  }
  keys.last = max_of(keys.last, keys.first + 1);
  return keys;
}
