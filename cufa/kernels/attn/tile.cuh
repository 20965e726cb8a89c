// Which rows of which head of which sequence a block works on.
#pragma once
#include "attn/params.cuh"
#include "base/dtype.cuh"

struct Tile {
  int batch, head, kv_head;
  int row0;  // first query row

  DEVICE Tile(const Params& p, u32 block) {
    const int tile = block % p.tiles, sequence_head = block / p.tiles;
    batch = sequence_head / p.heads;
    head = sequence_head % p.heads;
    kv_head = head / p.group;
    // Later rows of a causal problem see more keys: the longest tiles start first.
    row0 = (kRight ? p.tiles - 1 - tile : tile) * kBlockM;
  }

  DEVICE const Elem* q(const Params& p) const { return matrix(p.q, p.q_stride, head); }
  DEVICE const Elem* k(const Params& p) const { return matrix(p.k, p.k_stride, kv_head); }
  DEVICE const Elem* v(const Params& p) const { return matrix(p.v, p.v_stride, kv_head); }
  DEVICE Elem* o(const Params& p) const { return const_cast<Elem*>(matrix(p.o, p.o_stride, head)); }

 private:
  DEVICE const Elem* matrix(const void* array, const Strides& stride, int h) const {
    return static_cast<const Elem*>(array) + batch * stride.batch + h * stride.head;
  }
};
