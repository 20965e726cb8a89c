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
