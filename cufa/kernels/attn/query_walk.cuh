// The query tiles that see the keys of a block, one after another: those of one head, then of the
// next that shares the keys.
#pragma once
#include "attn/key_tile.cuh"

struct QueryWalk {
  const Params& p;
  const KeyTile& keys;
  const QueryRange of_head;
  int member, tile;

  DEVICE QueryWalk(const Params& params, const KeyTile& key_tile)
      : p(params),
        keys(key_tile),
        of_head(key_tile.rows_that_see(params)),
        member(of_head.first < of_head.last ? 0 : params.group.value),
        tile(of_head.first) {}

  DEVICE bool is_over() const { return member == p.group.value; }
  DEVICE Tile rows() const { return keys.queries(p, member, tile); }
  DEVICE void advance() {
    if (++tile == of_head.last) tile = of_head.first, ++member;
  }

  // Whether all of rows row0 .. row0 + rows - 1 exist and see every key. Those past the end must be
  // hidden: they are 0, and 0 times an infinite key is NaN.
  DEVICE bool are_whole(int row0, int rows) const {
    const int key0 = keys.key0();
    return row0 + rows <= p.seqlen_q && key0 + kBlockN <= row_end(p, row0) &&
           row_begin(p, row0 + rows - 1) <= key0;
  }
};
