// FlashAttention-2 backward of float32 on tensor cores, by keys; sm_80 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2; its line numbers stand below.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows); rows 16-byte aligned
//   out   dk [B, Hkv, Tk, D]   dv [B, Hkv, Tk, Dv]
//         dQ without the scale, added to the workspace (then bwd_queries)
//   grid  B * Hkv * ceil(Tk / kBlockN)          block kThreads; a warp owns kBlockN / warps keys
//   smem  one tile each of K, V, Q, dO and dS; lse and D
//
// Numbers are sums of two of TF32 (tile/wide_fragment.cuh). A step that has others is done on CUDA
// cores.
#include "attn/epilogue.cuh"
#include "attn/query_walk.cuh"
#include "attn/row_numbers.cuh"
#include "attn/score_gradients.cuh"
#include "ptx/barrier.cuh"
#include "tile/clear_rows.cuh"
#include "tile/copy_async.cuh"
#include "tile/matrix_unit.cuh"
#include "tile/tf32.cuh"
#include "tile/transposed.cuh"

constexpr int kWarps = kThreads / 32;
constexpr int kKeyTiles = kBlockN / (16 * kWarps);
// dQ of a step: a warp has 32 columns of kRowTiles * 16 rows at a time.
constexpr int kRowTiles = kBlockM / 32 * (kHeadDim / 32) % kWarps == 0 ? 2 : 1;
struct Sums {
  WideFragment<kKeyTiles, kHeadDim / 8, true> dk;
  WideFragment<kKeyTiles, kHeadDimV / 8, true> dv;
};

static_assert(kBlockN == kKeyTiles * 16 * kWarps, "every warp owns whole 16-key tiles");
static_assert(kDType == kFloat32 && kAligned && kStages == 1);

// S^T = K Q^T, so that P^T and dS^T are left operands of the products that end in dV and dK as they
// are. To those who ask, rows are queries and columns keys.
template <class Unit>
using KeyScores = Transposed<typename Unit::template Scores<kKeyTiles, kBlockM / 8>>;

struct Tiles {
  using TileK = SwizzledTile<kBlockN, kHeadDim>;
  using TileV = SwizzledTile<kBlockN, kHeadDimV>;
  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;  // of dO
  using TileS = SwizzledTile<kBlockM, kBlockN>;    // of dS
  static constexpr int kBytes = TileK::kBytes + TileV::kBytes + TileQ::kBytes + TileO::kBytes +
                                TileS::kBytes + RowNumbers::kBytes;

  TileK k;
  TileV v;
  TileQ q;
  TileO dout;
  TileS ds;
  RowNumbers numbers;

  DEVICE explicit Tiles(u32 smem)
      : k{smem},
        v{k.base + TileK::kBytes},
        q{v.base + TileV::kBytes},
        dout{q.base + TileQ::kBytes},
        ds{dout.base + TileO::kBytes},
        numbers(ds.base + TileS::kBytes) {}

  DEVICE void load_keys_async(const BackwardParams& p, const KeyTile& keys) const {
    copy_rows_async(k, keys.k(p), p.k_stride.row, keys.key0(), p.seqlen_k, p.head_dim);
    copy_rows_async(v, keys.v(p), p.v_stride.row, keys.key0(), p.seqlen_k, p.head_dim_v);
  }
  DEVICE void load_queries_async(const BackwardParams& p, const Tile& rows) const {
    copy_rows_async(q, rows.q(p), p.q_stride.row, rows.row0, p.seqlen_q, p.head_dim);
    copy_rows_async(dout, rows.dout(p), p.dout_stride.row, rows.row0, p.seqlen_q, p.head_dim_v);
    numbers.load_async(BackwardRows(p, rows), rows.row0);
    ptx::cp_async_commit_group();
  }

  // Whether all of this thread's share of the keys' numbers split.
  DEVICE bool keys_split() const {
    bool all = true;
    for (int i = 16 * ptx::tid_x(); i < TileK::kBytes + TileV::kBytes; i += 16 * kThreads) {
      f32 x[4];
      load_chunk(x, k.base + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) all &= splits(x[e]);
    }
    return all;
  }

  // Puts dS of this warp's keys where add_queries reads it. Of eight keys the even ones come first:
  // ldmatrix then gives a lane those that matmul_nn takes from it.
  template <class Scores> DEVICE void store(Scores& changes) const {
    const int key = lane() / 4, chunk = 4 * kKeyTiles * warp() + key % 2;
    const TileS own{ds.slab(chunk / 8)};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      auto to = own.origin(changes.row(odd), chunk % 8);
      to.whole += 4 * (key / 2);
#pragma unroll
      for (int r = odd; r < changes.kRows; r += 2)
#pragma unroll
        for (int c = 0; c < changes.kCols; ++c)
          shared<f32>(TileS::at(to, r / 2 * 8, c)) = changes.at(r, c);
    }
  }
};

static_assert(kSmemBytes == Tiles::kBytes, "gpu/config.py");

// What a step adds to dV and dK; leaves dS in shared memory.
template <class Unit>
DEVICE void add_keys(Sums& sums, const Tiles& smem, const BackwardParams& p, const Tile& rows,
                     int key0, bool whole) {
  KeyScores<Unit> s, ds;
  matmul_nt(s, smem.k, smem.q);                   // S^T = K Q^T                        // line 10
  const auto hide = [&](KeyScores<Unit>& x) {
    if (kMask || !whole) apply_mask(x, p, rows, key0);
  };
  score_gradients<Back::kProduct>(                // S becomes P, dP becomes dS  // lines 11 and 14
      s, ds, p, rows, key0, smem.numbers.lse, smem.numbers.delta, hide,
      [&](KeyScores<Unit>& x) { matmul_nt(x, smem.v, smem.dout); });  // dP^T = V dO^T  // line 13
  if constexpr (kDq) smem.store(ds);
  if constexpr (kDv) matmul_nn(sums.dv, s, smem.dout);  // dV += P^T dO                      // line 12
  if constexpr (kDk) matmul_nn(sums.dk, ds, smem.q);    // dK += dS^T Q                      // line 16
}

// What it adds to dQ, once all of dS is there.
template <class Unit> DEVICE void add_queries(const Tiles& smem, f32* sums) {
  using Changes = typename Unit::template Scores<kRowTiles, kBlockN / 8>;
  constexpr int kAcross = kHeadDim / 32;
#pragma unroll 1
  for (int i = warp(); i < kBlockM / (16 * kRowTiles) * kAcross; i += kWarps) {
    const int row0 = i / kAcross * 16 * kRowTiles, slab = i % kAcross;
    const RowReader<true, kBlockM, kBlockN> rows(smem.ds, row0);
    Changes ds;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        f32 x[2][2][2];
        rows.load(x, 16 * m, k);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          ds.x[m][2 * k + e / 4][e % 4] = x[e / 4][e % 2][e / 2 % 2];
      }
    WideFragment<kRowTiles, 4, true> dq;
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

// All that it does. `prefetch()` is called once Q and dO were used.
template <class Unit, class Prefetch>
DEVICE void step(Sums& sums, const Tiles& smem, const BackwardParams& p, const Tile& rows, int key0,
                 bool whole, Prefetch prefetch) {
  add_keys<Unit>(sums, smem, p, rows, key0, whole);
  ptx::bar_sync();                                // dS is here; Q and dO were used
  prefetch();
  if constexpr (kDq)
    add_queries<Unit>(smem, BackwardRows(p, rows).dq_sums + i64(rows.row0) * kHeadDim);
}

// On CUDA cores, and called: inside the loop it would take registers from what is done there.
CALLED void exact_step(Sums& sums, Tiles smem, const BackwardParams& p, Tile rows, int key0,
                       bool whole) {
  step<CudaCores>(sums, smem, p, rows, key0, whole, [] {});
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_tf32(const __grid_constant__ BackwardParams p) {
  const KeyTile keys(p, ptx::ctaid_x());          // which keys, which head, which sequence
  const int key0 = keys.key0();
  const Tiles smem(ptx::smem_address(ptx::dynamic_smem()));
  Sums sums;
  sums.dk.clear();
  sums.dv.clear();
  bool exact = false;
  QueryWalk walk(p, keys);                        // tiles that see none of the keys are left out
  if (!walk.is_over()) {
    smem.load_keys_async(p, keys);                                                      // line 6
    smem.load_queries_async(p, walk.rows());      // in one group with K and V
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();
    exact = ptx::bar_red_or(!smem.keys_split());
  }
  while (!walk.is_over()) {                                                             // line 8
    const Tile rows = walk.rows();
    const bool whole = walk.are_whole(rows.row0, kBlockM);
    ptx::cp_async_wait_group<0>();
    // All are here: Q and dO, and dS of the step before was used. Rows past the end are empty too.
    bool on_cuda_cores = exact;
    if (ptx::bar_red_or(smem.numbers.finds_empty_row() || smem.numbers.finds_unsplit_row())) {
      clear_rows(smem.dout, [&](int row) { return smem.numbers.is_empty(row); });  // 0 * NaN is NaN
      on_cuda_cores |= ptx::bar_red_or(smem.numbers.finds_unsplit_row());  // and are 0 for all
    }
    walk.advance();
    const auto prefetch = [&] {                   // runs under dQ
      if (!walk.is_over()) smem.load_queries_async(p, walk.rows());
    };
    if (on_cuda_cores) {
      Sums copy = sums;                           // what has an address is in no register
      exact_step(copy, smem, p, rows, key0, whole);
      sums = copy;
      prefetch();
    } else {
      step<TensorCores<true>>(sums, smem, p, rows, key0, whole, prefetch);
    }
  }

  if constexpr (kDk) {                                                                  // line 18
#pragma unroll
    for (int r = 0; r < sums.dk.kRows; ++r) scale_row(sums.dk, r, Real(p.scale));
    store_rows(sums.dk, key0, p.seqlen_k, p.head_dim,
               [&](int row) { return keys.dk(p) + row * p.dk_stride.row; });
  }
  if constexpr (kDv) {
    if constexpr (kDropout) {
#pragma unroll
      for (int r = 0; r < sums.dv.kRows; ++r) scale_row(sums.dv, r, kept_scale(p));
    }
    store_rows(sums.dv, key0, p.seqlen_k, p.head_dim_v,
               [&](int row) { return keys.dv(p) + row * p.dv_stride.row; });
  }
}
