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

  // Tile `number`, in the order in which blocks that stay take them: head by head, but where later
  // rows see more keys section by section of p.section heads. In each the longest tiles of all its
  // heads come first, so that those in work at the end are short.
  DEVICE static Tile in_turn(const Params& p, int number) {
    if constexpr (!kRight) return Tile(p, number);
    const int heads = p.tile_count / p.tiles.value;  // of all sequences
    const int first = number / (p.section * p.tiles.value) * p.section;
    const int width = min_of(p.section, heads - first), place = number - first * p.tiles.value;
    Tile tile;
    tile.row0 = (p.tiles.value - 1 - place / width) * kBlockM;
    tile.place(p, first + place % width);
    return tile;
  }

  // Rows row0 and on of a head that is known.
  DEVICE static Tile of(int batch, int head, int kv_head, int row0) {
    Tile tile;
    tile.batch = batch, tile.head = head, tile.kv_head = kv_head, tile.row0 = row0;
    return tile;
  }

  DEVICE const Elem* q(const Params& p) const { return matrix(p.q, p.q_stride, head); }
  DEVICE const Elem* k(const Params& p) const { return matrix(p.k, p.k_stride, kv_head); }
  DEVICE const Elem* v(const Params& p) const { return matrix(p.v, p.v_stride, kv_head); }
  DEVICE Elem* o(const Params& p) const { return const_cast<Elem*>(matrix(p.o, p.o_stride, head)); }
  DEVICE const Elem* dout(const BackwardParams& p) const {
    return matrix(p.dout, p.dout_stride, head);
  }
  DEVICE Elem* dq(const BackwardParams& p) const {
    return const_cast<Elem*>(matrix(p.dq, p.dq_stride, head));
  }

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
