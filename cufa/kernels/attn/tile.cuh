// Which rows of which head of which sequence a block works on.
#pragma once
#include "attn/params.cuh"
#include "base/dtype.cuh"

struct Tile {
  int batch, head, kv_head;
  int row0;  // first query row

  // Thread block number `block`, if each has `rows` rows.
  DEVICE Tile(const Params& p, u32 block, int rows = kBlockM) {
    const int sequence_head = p.tiles.quotient(block);
    const int tile = block - sequence_head * p.tiles.value;
    // Later rows of a causal problem see more keys: the longest tiles start first.
    row0 = (kRight ? p.tiles.value - 1 - tile : tile) * rows;
    place(p, sequence_head);
  }

  // Tile `number` of all, in the order in which blocks that stay take them. Where the longest come
  // first, it is in sections of heads, so that the keys and values in use still fit the L2 cache.
  DEVICE static Tile in_turn(const Params& p, u32 number) {
    if constexpr (!kRight) return Tile(p, number);
    const int section = p.section_tiles.quotient(number);
    const int within = number - section * p.section_tiles.value;
    const int rank = p.section.quotient(within);  // of the tile in its head
    Tile tile;
    tile.place(p, section * p.section.value + within - rank * p.section.value);
    tile.row0 = (p.tiles.value - 1 - rank) * kBlockM;
    return tile;
  }

  DEVICE const Elem* q(const Params& p) const { return matrix(p.q, p.q_stride, head); }
  DEVICE const Elem* k(const Params& p) const { return matrix(p.k, p.k_stride, kv_head); }
  DEVICE const Elem* v(const Params& p) const { return matrix(p.v, p.v_stride, kv_head); }
  DEVICE Elem* o(const Params& p) const { return const_cast<Elem*>(matrix(p.o, p.o_stride, head)); }

 private:
  Tile() = default;

  DEVICE void place(const Params& p, int sequence_head) {
    batch = p.heads.quotient(sequence_head);
    head = sequence_head - batch * p.heads.value;
    kv_head = p.group.quotient(head);
  }

  DEVICE const Elem* matrix(const void* array, const Strides& stride, int h) const {
    return static_cast<const Elem*>(array) + batch * stride.batch + h * stride.head;
  }
};
