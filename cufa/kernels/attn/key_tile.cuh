// The key tile that a block owns in the backward pass, and the query tiles that see it:
// key_range.cuh's answers, the other way round.
#pragma once
#include "attn/key_range.cuh"

struct QueryRange {
  int first, last;  // tiles first .. last - 1: no row of the others sees a key of the block
};

struct KeyTile {
  int batch, kv_head;
  int index;  // keys index * kBlockN and on

  // Thread block number `block`. Where causal, the first keys are seen by most rows: the longest
  // blocks start first.
  DEVICE KeyTile(const BackwardParams& p, u32 block) {
    const int sequence_head = p.tiles.quotient(block);
    index = block - sequence_head * p.tiles.value;
    batch = p.kv_heads.quotient(sequence_head);
    kv_head = sequence_head - batch * p.kv_heads.value;
  }

  DEVICE int key0() const { return index * kBlockN; }

  // Tile i of the rows of a query head: number `member` of those that share the keys.
  DEVICE Tile queries(const Params& p, int member, int i) const {
    return Tile::of(batch, kv_head * p.group.value + member, kv_head, i * kBlockM);
  }

  DEVICE QueryRange rows_that_see(const Params& p) const {
    const int last_key = min_of(key0() + kBlockN, p.seqlen_k) - 1;
    const int begin = kRight ? max_of(0, key0() - p.diagonal - p.right) : 0;
    const int end =
        kLeft ? min_of(p.seqlen_q, last_key - p.diagonal + p.left + 1) : p.seqlen_q;
    return {begin / kBlockM, ceil_div(max_of(0, end), kBlockM)};
  }

  DEVICE const Elem* k(const Params& p) const { return matrix(p.k, p.k_stride); }
  DEVICE const Elem* v(const Params& p) const { return matrix(p.v, p.v_stride); }
  DEVICE Elem* dk(const BackwardParams& p) const {
    return const_cast<Elem*>(matrix(p.dk, p.dk_stride));
  }
  DEVICE Elem* dv(const BackwardParams& p) const {
    return const_cast<Elem*>(matrix(p.dv, p.dv_stride));
  }

 private:
  DEVICE const Elem* matrix(const void* array, const Strides& stride) const {
    return static_cast<const Elem*>(array) + batch * stride.batch + kv_head * stride.head;
  }
};
