// The query tiles of a thread block that keeps one key block and walks over queries, and which of
// them see it: key_range.cuh's answers, the other way round.
#pragma once
#include "attn/key_range.cuh"

struct QueryTiles {
  const Params& p;
  const Tile head;  // its rows begin with the block's first
  const int begin, end;
  int first, last;  // tiles first .. last - 1 see the key block that `see` was last told

  DEVICE QueryTiles(const Params& params, u32 block)
      : p(params),
        head(params, block, params.rows_per_block),
        begin(head.row0 / kBlockM),
        end(ceil_div(min_of(head.row0 + params.rows_per_block, params.seqlen_q), kBlockM)),
        first(begin),
        last(begin) {}

  DEVICE Tile tile(int i) const {
    Tile t = head;
    t.row0 = i * kBlockM;
    return t;
  }
  DEVICE KeyRange keys(int i) const { return visible_keys(p, tile(i)); }

  // Whether no row of a tile sees any key.
  DEVICE bool is_unseen(int i) const { return keys(i).first >= keys(i).last; }

  // Key blocks come in order: both ends of what a tile sees, and so both ends of this range, only
  // move on.
  DEVICE void see(int j) {
    while (first < end && keys(first).last <= j) ++first;
    while (last < end && keys(last).first <= j) ++last;
  }
};
