// FlashAttention-2 backward of float32 on tensor cores, by keys; sm_80 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2; its line numbers stand below.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows); rows 16-byte aligned
//   out   dk [B, Hkv, Tk, D]   dv [B, Hkv, Tk, Dv]
//         dQ without the scale, added to the workspace (then bwd_queries)
//   grid  B * Hkv * ceil(Tk / kBlockN)          block kThreads; kShare warps own 16 keys together
//   smem  one tile each of K, V, Q, dO, P and dS; lse and D
//
// Numbers are sums of two of TF32 (tile/wide_fragment.cuh). A block that meets others does all of
// its work on CUDA cores.
#include "attn/epilogue.cuh"
#include "attn/query_rows.cuh"
#include "attn/query_walk.cuh"
#include "attn/score_gradients.cuh"
#include "tile/key_rows.cuh"
#include "tile/matrix_unit.cuh"
#include "tile/tf32.cuh"
#include "tile/transposed.cuh"

// Warps that own the same keys share the work: of scores each has its part of the queries, of the
// sums every kShare-th slab of 32 columns.
constexpr int kWarps = kThreads / 32, kKeyWarps = kBlockN / 16, kShare = kWarps / kKeyWarps;
constexpr int kQueries = kBlockM / kShare;
static_assert(kWarps == kShare * kKeyWarps && kKeyWarps < 16 && kQueries % 16 == 0);
static_assert(kDType == kFloat32 && kAligned && kStages == 1);

DEVICE int share() { return warp() / kKeyWarps; }

// S^T = K Q^T, so that P^T and dS^T are left operands of the products that end in dV and dK: of all
// queries, or of a warp's share. To those who ask, rows are queries and columns keys.
template <class Unit, int kCount>
struct KeyScores : Transposed<KeyRows<typename Unit::template Scores<1, kCount / 8>, kKeyWarps>> {
  using Base = Transposed<KeyRows<typename Unit::template Scores<1, kCount / 8>, kKeyWarps>>;
  DEVICE static int row(int r) { return (kCount < kBlockM ? kCount * share() : 0) + Base::row(r); }
};

// A warp's sums over queries: slabs share(), share() + kShare, ...
using Slab = KeyRows<WideFragment<1, 4, true>, kKeyWarps>;
DEVICE constexpr int own_slabs(int cols) { return ceil_div(cols / 32, kShare); }
struct Sums {
  Slab dk[own_slabs(kHeadDim)], dv[own_slabs(kHeadDimV)];
};

struct Tiles : QueryRows {
  using TileK = SwizzledTile<kBlockN, kHeadDim>;
  using TileV = SwizzledTile<kBlockN, kHeadDimV>;
  using TileS = SwizzledTile<kBlockM, kBlockN>;    // of P and of dS
  static constexpr int kKeyBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kBytes = kKeyBytes + 2 * TileS::kBytes + QueryRows::kBytes;

  TileK k;
  TileV v;
  TileS weights, changes;  // P and dS

  DEVICE explicit Tiles(u32 smem)
      : QueryRows(smem + kKeyBytes, smem + kBytes - RowNumbers::kBytes),
        k{smem},
        v{k.base + TileK::kBytes},
        weights{dout.base + TileO::kBytes},
        changes{weights.base + TileS::kBytes} {}

  DEVICE void load_keys_async(const BackwardParams& p, const KeyTile& keys) const {
    copy_rows_async(k, keys.k(p), p.k_stride.row, keys.key0(), p.seqlen_k, p.head_dim);
    copy_rows_async(v, keys.v(p), p.v_stride.row, keys.key0(), p.seqlen_k, p.head_dim_v);
    ptx::cp_async_commit_group();
  }

  // Whether all of this thread's share of the keys' numbers split.
  DEVICE bool keys_split() const {
    bool all = true;
    for (int i = 16 * ptx::tid_x(); i < kKeyBytes; i += 16 * kThreads) {
      f32 x[4];
      load_chunk(x, k.base + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) all &= splits(x[e]);
    }
    return all;
  }
};

static_assert(kSmemBytes == Tiles::kBytes, "gpu/config.py");

// P or dS of this warp's keys, in shared memory. Of eight keys the even ones lie in the first 16
// bytes, the odd ones in the next: so ldmatrix gives a lane of add_queries those that matmul_nn
// takes from it.
template <class Scores, class Use>
DEVICE void each_place(Tiles::TileS tile, Scores& s, Use use) {
  constexpr int kPitch = min_of(kBlockN, Tiles::TileS::kSlabCols);  // numbers of a row of a slab
  const int key = lane() / 4, chunk = first_key<kKeyWarps>() / 4 + key % 2;
  const Tiles::TileS own{tile.slab(chunk / 8)};
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    auto from = own.origin(s.row(odd), chunk % 8);
    from.whole += 4 * (key / 2), from.last += 4 * (key / 2);
#pragma unroll
    for (int c = 0; c < s.kCols; ++c) {
      f32* const column = &shared<f32>(Tiles::TileS::at(from, 0, c));
#pragma unroll
      for (int r = odd; r < s.kRows; r += 2)
        use(column[r / 2 * 8 * kPitch], s.at(r, c));
    }
  }
}
template <class Scores> DEVICE void store(Tiles::TileS tile, Scores& s) {
  each_place(tile, s, [](f32& place, f32& x) { place = x; });
}
template <class Scores> DEVICE void load(Scores& s, Tiles::TileS tile) {
  // Else the compiler would keep in registers what it has loaded once.
  each_place(tile, s, [](volatile f32& place, f32& x) { x = place; });
}

// This warp's sums += weights^T x: dV += P^T dO, dK += dS^T Q.
template <class Unit, int kOwn, int kCols>
DEVICE void add_product(Slab (&sums)[kOwn], Tiles::TileS weights, SwizzledTile<kBlockM, kCols> x) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int slab = i * kShare + share();
    if (slab >= kCols / 32) continue;
    KeyScores<Unit, kBlockM> own;                 // once more for each slab, to save registers
    load(own, weights);
    matmul_nn(sums[i], own, SwizzledTile<kBlockM, 32>{x.slab(slab)});
  }
}

// What a step adds to dV and dK; leaves dS in shared memory.
template <class Unit>
DEVICE void add_keys(Sums& sums, const Tiles& smem, const BackwardParams& p,
                     const QueryWalk& walk) {
  using Scores = KeyScores<Unit, kQueries>;
  const Tile rows = walk.rows();
  const int key0 = walk.keys.key0();
  const int shift = first_key<kKeyWarps>() - 16 * warp();  // matmul_nt takes 16 * warp() and on
  const int down = kQueries * share();
  Scores s, ds;
  matmul_nt(s, smem.k.from_row(shift), smem.q.from_row(down));  // S^T = K Q^T            // line 10
  const auto hide = [&](Scores& x) {
    if (kMask || !walk.are_whole(rows.row0, kBlockM)) apply_mask(x, p, rows, key0);
  };
  score_gradients<Back::kProduct>(                // S becomes P, dP becomes dS  // lines 11 and 14
      s, ds, p, rows, key0, smem.numbers.lse, smem.numbers.delta, hide,
      [&](Scores& x) {                            // dP^T = V dO^T                      // line 13
        matmul_nt(x, smem.v.from_row(shift), smem.dout.from_row(down));
      });
  store(smem.weights, s);
  store(smem.changes, ds);
  if constexpr (kShare > 1)                       // those of the same keys have stored
    ptx::bar_sync(1 + warp() % kKeyWarps, 32 * kShare);
  if constexpr (kDv) add_product<Unit>(sums.dv, smem.weights, smem.dout);               // line 12
  if constexpr (kDk) add_product<Unit>(sums.dk, smem.changes, smem.q);                  // line 16
}

// What it adds to dQ, once all of dS is there: a warp has 16 rows of a slab at a time.
template <class Unit> DEVICE void add_queries(const Tiles& smem, f32* sums) {
  using Changes = typename Unit::template Scores<1, kBlockN / 8>;
  constexpr int kSlabs = kHeadDim / 32;
#pragma unroll 1
  for (int i = warp(); i < kBlockM / 16 * kSlabs; i += kWarps) {
    const int row0 = i / kSlabs * 16, slab = i % kSlabs;
    const RowReader<true, kBlockM, kBlockN> rows(smem.changes, row0);
    Changes ds;
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
      f32 x[2][2][2];
      rows.load(x, 0, k);
#pragma unroll
      for (int e = 0; e < 8; ++e) ds.x[0][2 * k + e / 4][e % 4] = x[e / 4][e % 2][e / 2 % 2];
    }
    WideFragment<1, 4, true> dq;
    dq.clear();
    matmul_nn(dq, ds, SwizzledTile<kBlockN, 32>{smem.k.slab(slab)});  // dQ += dS K     // line 15
#pragma unroll
    for (int r = 0; r < dq.kRows; ++r) {
      f32* const to = sums + (row0 + lane() / 4 + 8 * r) * kHeadDim + 32 * slab;
#pragma unroll
      for (int c = 0; c < dq.kCols; c += 4)
        add_run(to + dq.col(c), {dq.at(r, c), dq.at(r, c + 1), dq.at(r, c + 2), dq.at(r, c + 3)});
    }
  }
}

// Whether all of this thread's share of the rows of some tiles split.
DEVICE bool rows_split(const BackwardParams& p, QueryWalk walk) {
  bool all = true;
  for (; !walk.is_over(); walk.advance()) {
    const Tile rows = walk.rows();
    for (int i = ptx::tid_x(); i < kBlockM; i += kThreads)
      all &= BackwardRows(p, rows).splits[rows.row0 + i] != 0;
  }
  return all;
}

// Whether tensor cores may do what a block has to.
DEVICE bool block_splits(const BackwardParams& p) {
  const KeyTile keys(p, ptx::ctaid_x());
  const Tiles smem(ptx::smem_address(ptx::dynamic_smem()));
  smem.load_keys_async(p, keys);
  ptx::cp_async_wait_group<0>();
  ptx::bar_sync();                                // K and V are here
  return !ptx::bar_red_or(!smem.keys_split() || !rows_split(p, QueryWalk(p, keys)));
}

template <int kOwn>
DEVICE void store_sums(Slab (&sums)[kOwn], Real scale, int row0, int rows, int cols, Elem* to,
                       i64 stride) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int col0 = 32 * (i * kShare + share());
#pragma unroll
    for (int r = 0; r < sums[i].kRows; ++r) scale_row(sums[i], r, scale);
    store_rows(sums[i], row0, rows, cols - col0,
               [&](int row) { return to + row * stride + col0; });
  }
}

// All that a block has to do.
template <class Unit> DEVICE void propagate(const BackwardParams& p) {
  const KeyTile keys(p, ptx::ctaid_x());          // which keys, which head, which sequence
  const Tiles smem(ptx::smem_address(ptx::dynamic_smem()));
  QueryWalk walk(p, keys);                        // tiles that see none of the keys are left out
  Sums sums;
  for (Slab& slab : sums.dk) slab.clear();
  for (Slab& slab : sums.dv) slab.clear();
  if (!walk.is_over()) smem.load_async(p, walk.rows());
  while (!walk.is_over()) {                                                             // line 8
    smem.wait();                                  // dS of the step before was used
    add_keys<Unit>(sums, smem, p, walk);
    ptx::bar_sync();                              // dS is here; Q and dO were used
    const Tile rows = walk.rows();
    walk.advance();
    if (!walk.is_over()) smem.load_async(p, walk.rows());  // runs under dQ
    if constexpr (kDq)
      add_queries<Unit>(smem, BackwardRows(p, rows).dq_sums + i64(rows.row0) * kHeadDim);
  }

  if constexpr (kDk)                                                                    // line 18
    store_sums(sums.dk, Real(p.scale), keys.key0(), p.seqlen_k, p.head_dim, keys.dk(p),
               p.dk_stride.row);
  if constexpr (kDv)
    store_sums(sums.dv, kept_scale(p), keys.key0(), p.seqlen_k, p.head_dim_v, keys.dv(p),
               p.dv_stride.row);
}

CALLED void propagate_exactly(const BackwardParams& p) { propagate<CudaCores>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_tf32(const __grid_constant__ BackwardParams p) {
  if (block_splits(p)) propagate<TensorCores<true>>(p);
  else propagate_exactly(p);
}
