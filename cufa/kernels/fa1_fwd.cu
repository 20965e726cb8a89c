// FlashAttention-1 forward on mma.sync tensor cores, float16 and bfloat16, sm_80 and later.
// Source: Dao et al., arXiv:2205.14135, Algorithm 1; its line numbers stand below.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   rows 16-byte aligned
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32, natural log
//   work  O, m and l of every query tile        float32
//   grid  B * H * ranges of query tiles         block kThreads; a warp has kBlockN / warps keys
//   smem  one tile of V, one of Q, one that K and the warps' partial outputs use in turn
#include "attn/drop_weights.cuh"
#include "attn/epilogue_mma.cuh"
#include "attn/query_tiles.cuh"
#include "attn/running_rows.cuh"
#include "attn/score_mod.cuh"
#include "ptx/barrier.cuh"
#include "tile/copy_async.cuh"
#include "tile/key_slices.cuh"
#include "tile/mma_slices.cuh"

using TileQ = SwizzledTile<kBlockM, kHeadDim>;
using TileK = SwizzledTile<kBlockN, kHeadDim>;
using TileV = SwizzledTile<kBlockN, kHeadDimV>;
using Output = OwnRows<kOwnRows / 8, kHeadDimV / 8>;
using Rows = SliceRows<kSlices, kBlockM>;
using Sums = SliceSums<kSlices, Output::kRows, Output::kCols>;
// Whether O_i is loaded long before its use; tiles of few keys are for where registers are few.
constexpr bool kEarly = kBlockN > 64;
constexpr int kTurnBytes = max_of(TileK::kBytes, Sums::kBytes);

static_assert(kSmemBytes == TileV::kBytes + TileQ::kBytes + kTurnBytes + 2 * Rows::kBytes,
              "gpu/config.py");
static_assert(kAligned && kStages == 1);

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa1_fwd(const __grid_constant__ Params p) {
  QueryTiles tiles(p, ptx::ctaid_x());          // which rows, which head, which sequence
  u8* place = ptx::dynamic_smem();
  const TileV v_smem{ptx::smem_address(place)};
  const TileQ q_smem{v_smem.base + TileV::kBytes};
  const TileK k_smem{q_smem.base + TileQ::kBytes};
  place += TileV::kBytes + TileQ::kBytes;
  const Sums outputs{reinterpret_cast<Real*>(place)};
  const Rows tops{reinterpret_cast<Real*>(place + kTurnBytes)};
  const Rows sums{reinterpret_cast<Real*>(place + kTurnBytes + Rows::kBytes)};
  const auto load_q = [&](int i) {
    copy_rows_async(q_smem, tiles.head.q(p), p.q_stride.row, i * kBlockM, p.seqlen_q, p.head_dim);
    ptx::cp_async_commit_group();
  };

  const Real scale = exponent_scale(p), sink = sink_of(p, tiles.head);
  RunningRows<Output> rows;                     // O_i, m_i, l_i of the rows that this warp owns
  for (int i = tiles.begin; i < tiles.end; ++i)
    if (tiles.is_unseen(i)) rows.clear(), rows.finish(p, tiles.tile(i), sink);

  const int end = tiles.keys(tiles.end - 1).last;
  for (int j = tiles.keys(tiles.begin).first; j < end; ++j) {                        // line 5
    tiles.see(j);
    const int key0 = j * kBlockN;
    ptx::bar_sync();                            // all have used block j - 1 and its outputs
    copy_rows_async(k_smem, tiles.head.k(p), p.k_stride.row, key0, p.seqlen_k, p.head_dim);
    copy_rows_async(v_smem, tiles.head.v(p), p.v_stride.row, key0, p.seqlen_k, p.head_dim_v);
    load_q(tiles.first);                        // in one group with K_j and V_j: line 6
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();                            // K_j, V_j and the first Q_i are here
    KeySlice<kHeadDim> k;                       // in registers for all tiles to come
    k.load(k_smem);

    for (int i = tiles.first; i < tiles.last; ++i) {                                 // line 7
      const Tile tile = tiles.tile(i);
      const KeyRange keys = tiles.keys(i);
      SliceScores s;
      matmul_nt(s, q_smem, k);                  // S = Q K^T                         // line 9
      score_mod(s, p, tile, key0);
      if (keys.is_partial(j)) apply_mask(s, p, tile, key0);

      Real top[s.kRows], sum[s.kRows];                                               // line 10
      row_maxima(s, top);
      tops.put(s, top);
      ptx::bar_sync();                          // maxima over all slices are here; Q_i was used
      if (i + 1 < tiles.last) load_q(i + 1);    // runs under all that follows
      tops.max(s, top);
      exponentials_and_sums(s, top, scale, sum);  // S becomes P~
      sums.put(s, sum);
      drop_weights(s, p, tile, key0);           // dropped ones become 0
      const auto weights = narrow(s);
      const auto load_rows = [&] {
        rows.clear();                                                                // line 2
        if (j != keys.first) rows.load(p, tile);                                     // line 8
      };
      if constexpr (kEarly) load_rows();        // arrives under P~ V_j
      Output o;                                 // begins with this slice's part of P~ V_j
#pragma unroll
      for (int n = 0; n < kHeadDimV / 16; ++n) {
        MmaFragment<kBlockM / 16, 2> part;      // 16 columns of it for all rows
        matmul_nn(part, weights, v_smem, n);
        outputs.scatter(o, part, 4 * n);
      }
      ptx::cp_async_wait_group<0>();
      ptx::bar_sync();                          // sums and outputs of all slices are here, Q_i+1
      outputs.gather(o);
      if constexpr (!kEarly) load_rows();

      Real own_top[o.kRows], own_sum[o.kRows];
#pragma unroll
      for (int r = 0; r < o.kRows; ++r) own_top[r] = top[r];  // a warp's own rows come first
      sums.sum(o, own_sum);
      rows.join(own_top, own_sum, o, scale);                                         // lines 11, 12
      if (j == keys.last - 1) rows.finish(p, tile, sink);
      else rows.store(p, tile);                                                      // lines 12, 13
    }
  }
}
