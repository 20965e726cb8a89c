// FlashAttention-2 backward on mma.sync tensor cores, by keys; float16 and bfloat16, sm_80 and on.
// Source: Dao, arXiv:2307.08691, Algorithm 2; its line numbers stand below.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows); rows 16-byte aligned
//   out   dk [B, Hkv, Tk, D]   dv [B, Hkv, Tk, Dv]
//         dQ without the scale, added to the workspace as SumTiles (then bwd_queries_mma)
//   grid  B * Hkv * ceil(Tk / kBlockN)          block kThreads, two crews of warps: tile/crews.cuh
//   smem  K and V; Q, dO, lse and D of kStages steps; P of one and dS of two
//
// One crew weighs: S^T, P^T and dV; the other has dP^T, dS^T and dK. Both multiply dS by K, a step
// later: one barrier a step is enough, and one crew's exponentials run under the other's products.
#include "attn/query_rows.cuh"
#include "attn/query_walk.cuh"
#include "attn/score_changes.cuh"
#include "attn/score_mod.cuh"
#include "attn/store_pairs.cuh"
#include "attn/weights.cuh"
#include "tile/crews.cuh"
#include "tile/mma_grid.cuh"

using TileK = SwizzledTile<kBlockN, kHeadDim>;
using TileV = SwizzledTile<kBlockN, kHeadDimV>;
using TileS = SwizzledTile<kBlockN, kBlockM>;    // of dS^T
// Scores that a lane holds at once: 64, or 32 where the compiler, with less to put side by side,
// would not make do with the registers; those of 16 queries beside random words. And of how many
// queries they are, for 32 lanes that have 16 * kKeyTiles keys.
constexpr int kScoresOfLane = kDropout ? 8 * kKeyTiles : kDq && kDk && kDv ? 64 : 32;
constexpr int kQueries = min_of(kBlockM, 32 * kScoresOfLane / (16 * kKeyTiles));
using Scores = KeyScores<kQueries / 8>;
using Sums = KeySums<max_of(kHeadDim, kHeadDimV) / 8>;

// A query tile: its dS is in one of two places, all else that it has in one of kStages.
struct Step : QueryRows {
  static constexpr int kBytes = 2 * TileS::kBytes + kStages * QueryRows::kBytes;

  TileS ds;

  // Step i; all have kBytes from `smem` on.
  DEVICE Step(u32 smem, int i)
      : QueryRows(smem + 2 * TileS::kBytes + i % kStages * kTileBytes,
                  smem + 2 * TileS::kBytes + kStages * kTileBytes +
                      i % kStages * RowNumbers::kBytes),
        ds{smem + i % 2 * TileS::kBytes} {}
};

static_assert(kSmemBytes == TileK::kBytes + TileV::kBytes + Handover::kBytes + Step::kBytes,
              "gpu/config.py");
static_assert(kAligned && (kStages == 1 || kStages == 2));
static_assert(kCrew * (kBlockM / kQueries) < 16, "each pair of partners has a barrier for a part");

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd(const __grid_constant__ BackwardParams p) {
  const KeyTile keys(p, ptx::ctaid_x());          // which keys, which head, which sequence
  const int key0 = keys.key0();
  const TileK k_smem{ptx::smem_address(ptx::dynamic_smem())};
  const TileV v_smem{k_smem.base + TileK::kBytes};
  const u32 handed = v_smem.base + TileV::kBytes, steps = handed + Handover::kBytes;
  const Handover handover{&shared<Vec<u32, 4>>(handed)};
  const auto add_dq = [&](const Step& of, const Tile& rows) {
    if constexpr (!kDq) return;
    f32* const sums = BackwardRows(p, rows).dq_sums + i64(rows.row0) * kHeadDim;
    MmaGrid<kBlockM, kHeadDim> dq;
#pragma unroll 1
    for (int part = 0; part < dq.kParts; ++part) {
      matmul_tn(dq, of.ds, k_smem, part);         // dQ += dS K                         // line 15
      add_to(sums, dq, part);
    }
  };

  const bool weighs = ptx::vote_any(warp() < kCrew);  // which crew this warp is in
  const Real scale = exponent_scale(p);
  Sums sums;                                      // dV of those who weigh, dK of the others
  sums.clear();
  int i = 0;
  Tile before = Tile::of(0, 0, 0, 0);             // the rows of step i - 1
  QueryWalk walk(p, keys);                        // tiles that see none of the keys are left out
  if (!walk.is_over()) {
    copy_rows_async(k_smem, keys.k(p), p.k_stride.row, key0, p.seqlen_k, p.head_dim);   // line 6
    copy_rows_async(v_smem, keys.v(p), p.v_stride.row, key0, p.seqlen_k, p.head_dim_v);
    Step(steps, 0).load_async(p, walk.rows());    // in one group with K and V
  }
  for (; !walk.is_over(); ++i) {                                                        // line 8
    const Step now(steps, i), other(steps, i + 1);  // dS of step i - 1 is in the same place
    const Tile rows = walk.rows();
    if (kStages == 1 && i > 0) {
      ptx::bar_sync();                            // Q and dO of the step before were used
      now.load_async(p, rows);
    }
    now.wait();                                   // so is dS of the step before; its Q was used
    walk.advance();
    if (kStages == 2 && !walk.is_over()) other.load_async(p, walk.rows());  // under what follows

#pragma unroll 1  // side by side they take more registers than there are
    for (int row = 0; row < kBlockM; row += kQueries) {
      Scores s;
      s.clear();
      if (weighs) {
        const Tile part = Tile::of(rows.batch, rows.head, rows.kv_head, rows.row0 + row);
        add_nt<true>(s.x, k_smem, first_key<kCrew>(), now.q, row);    // S^T = K Q^T      // line 10
        Scores slope;
        if constexpr (kSoftcap) slope_of_cap(slope, s, p);
        score_mod(s, p, part, key0);
        if (kMask || !walk.are_whole(part.row0, kQueries)) apply_mask(s, p, part, key0);
        weigh(s, now.numbers.lse + row, scale);                      // S becomes P     // line 11
        KeptWeights<Scores>(p, part, key0).mark(s);                  // dropped ones, by a minus
        auto weights = narrow(s);
        if constexpr (kSoftcap) multiply(s, slope);                  // dS's other factor
        handover.give(kSoftcap ? narrow(s) : weights, row / 16);
        Handover::meet(row / kQueries);
        drop_marked(weights);
        if constexpr (kDv) add_nn<true>(sums.x, weights, now.dout, row);  // dV += P^T dO // line 12
        if (row + kQueries == kBlockM && i > 0) add_dq(other, before);
      } else {
        if (row == 0 && i > 0) add_dq(other, before);
        add_nt<true>(s.x, v_smem, first_key<kCrew>(), now.dout, row);  // dP^T = V dO^T   // line 13
        Handover::meet(row / kQueries);                              // P is here
        const auto changes =
            score_changes(s, handover, p, now.numbers.delta + row, row / 16);           // line 14
        if constexpr (kDq) store_operand(now.ds, changes, row / 16);
        if constexpr (kDk) add_nn<true>(sums.x, changes, now.q, row);  // dK += dS^T Q  // line 16
      }
    }
    before = rows;
  }
  ptx::bar_sync();                                // dS of the last step is here
  if (i > 0) add_dq(Step(steps, i - 1), before);

  if (weighs) {                                                                         // line 18
    if constexpr (kDropout) {
#pragma unroll
      for (int r = 0; r < Sums::kRows; ++r) scale_row(sums, r, kept_scale(p));
    }
    if constexpr (kDv)
      store_pairs(sums, keys.dv(p), p.dv_stride.row, key0, p.seqlen_k, p.head_dim_v);
  } else if constexpr (kDk) {
#pragma unroll
    for (int r = 0; r < Sums::kRows; ++r) scale_row(sums, r, Real(p.scale));
    store_pairs(sums, keys.dk(p), p.dk_stride.row, key0, p.seqlen_k, p.head_dim);
  }
}
