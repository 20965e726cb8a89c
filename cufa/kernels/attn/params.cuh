// The one argument of every kernel. Mirrored in gpu/params.py; strides count elements.
#pragma once
#include "base/config.cuh"
#include "ptx/tma.cuh"

struct Strides {
  i64 batch, head, row;
};

struct ScoreStrides {
  i64 batch, head, row, key;
};

// What block numbers are divided by, without a division: its result would be a number for each
// thread where this is one for the block, which costs the large tiles their last registers.
// Source: Granlund and Montgomery, PLDI 1994, theorem 4.2; n and value are below 2^31.
struct Divisor {
  i32 value;
  u32 multiplier;
  i32 shift;

  DEVICE int quotient(u32 n) const { return int(u64(n) * multiplier >> shift); }
};

struct Params {
  ptx::TensorMap q_map, k_map, v_map;  // of kernels that load them by TMA

  const void *q, *k, *v;
  void *o, *lse;
  const void *mask, *bias, *alibi_slopes, *sink;
  void* workspace;
  u32* tickets;  // one, 0 before and after a launch

  Strides q_stride, k_stride, v_stride, o_stride;
  ScoreStrides mask_stride, bias_stride;
  Strides mask_tiles_stride;  // in words of the workspace, by query tiles
  i64 alibi_stride_batch, alibi_stride_head, sink_stride_head;

  f64 scale, softcap, scale_over_softcap;

  Divisor heads, group;  // query heads, and how many of them share a key/value head
  Divisor tiles;         // query tiles of one head, or ranges of them: what blocks it has
  i32 seqlen_q, seqlen_k;
  i32 head_dim, head_dim_v;
  i32 rows_per_block;         // a multiple of kBlockM, where blocks have ranges of tiles
  i32 diagonal, left, right;  // row i sees keys i + diagonal - left .. i + diagonal + right

  // Where blocks take tiles as they come
  i32 tile_count;  // of all heads
  i32 section;     // so many heads that their keys and values fit L2 together

  // Dropout
  u64 dropout_seed;
  f64 kept_scale;         // 1 / (1 - p), of weights that are kept
  u32 dropout_threshold;  // what their words are at least
};
static_assert(sizeof(Params) == kParamsBytes, "gpu/params.py mirrors this struct");

// Of the backward pass; o and lse above are what the forward pass has left, and the workspace is
// attn/backward_rows.cuh's.
struct BackwardParams : Params {
  const void *dout, *dlse;             // dlse may be null: 0
  void *dq, *dk, *dv, *dbias, *dsink;  // null: not wanted

  Strides dout_stride, dq_stride, dk_stride, dv_stride;
  ScoreStrides dbias_stride;  // 0 along axes that the bias is repeated along

  Divisor kv_heads;
  i32 batch;
  i32 padded_rows;  // of a head in the workspace, seqlen_q of which exist; a multiple of 128
};
static_assert(sizeof(BackwardParams) == kBackwardParamsBytes, "gpu/params.py mirrors this too");
