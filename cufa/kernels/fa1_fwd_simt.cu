// FlashAttention-1 forward on CUDA cores: every dtype, any alignment, sm_70 and later.
// Source: Dao et al., arXiv:2205.14135, Algorithm 1; its line numbers stand below.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32 (float64 for float64), natural log
//   work  O, m and l of every query tile        likewise
//   grid  B * H * ranges of query tiles         block kThreads; half of them have half of the keys
//   smem  one tile of K, V, Q and, for each half, P; the outputs that the halves exchange
#include "attn/drop_weights.cuh"
#include "attn/query_tiles.cuh"
#include "attn/running_rows.cuh"
#include "attn/score_mod.cuh"
#include "ptx/barrier.cuh"
#include "tile/key_slices.cuh"
#include "tile/simt_slices.cuh"

using TileQ = PaddedTile<kBlockM, kHeadDim>;
using TileK = PaddedTile<kBlockN, kHeadDim>;
using TileV = PaddedTile<kBlockN, kHeadDimV>;
using TileP = PaddedTile<kSlices * kBlockM, kSlice>;
using Scores = SimtFragment<kRows, kSlice / kColumnLanes, 1>;
constexpr int kRun = kHeadDimV / kColumnLanes % kRealVec == 0 ? kRealVec : 2;
using Partial = SimtFragment<kRows, kHeadDimV / kColumnLanes, kRun>;
using Output = OwnRows<kHeadDimV / kColumnLanes, kRun>;
using Rows = SliceRows<kSlices, kBlockM>;
using Sums = SliceSums<kSlices, Output::kRows, Output::kCols>;

static_assert(kSmemBytes == TileQ::kBytes + TileK::kBytes + TileV::kBytes + TileP::kBytes +
                                Sums::kBytes + 2 * Rows::kBytes,
              "gpu/config.py");
static_assert(kStages == 1);

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa1_fwd_simt(const __grid_constant__ Params p) {
  QueryTiles tiles(p, ptx::ctaid_x());          // which rows, which head, which sequence
  u8* place = ptx::dynamic_smem();
  const auto next = [&](int bytes) {
    Real* here = reinterpret_cast<Real*>(place);
    place += bytes;
    return here;
  };
  const TileQ q_smem{next(TileQ::kBytes)};
  const TileK k_smem{next(TileK::kBytes)};
  const TileV v_smem{next(TileV::kBytes)};
  const TileP p_smem{next(TileP::kBytes)};
  const Sums outputs{next(Sums::kBytes)};
  const Rows tops{next(Rows::kBytes)}, sums{next(Rows::kBytes)};

  const Real scale = exponent_scale(p), sink = sink_of(p, tiles.head);
  RunningRows<Output> rows;                     // O_i, m_i, l_i of the rows that this thread owns
  for (int i = tiles.begin; i < tiles.end; ++i)
    if (tiles.is_unseen(i)) rows.clear(), rows.finish(p, tiles.tile(i), sink);

  const int end = tiles.keys(tiles.end - 1).last;
  for (int j = tiles.keys(tiles.begin).first; j < end; ++j) {                        // line 5
    tiles.see(j);
    const int key0 = j * kBlockN;
    copy_rows(k_smem, tiles.head.k(p), p.k_stride.row, key0, p.seqlen_k, p.head_dim);
    copy_rows(v_smem, tiles.head.v(p), p.v_stride.row, key0, p.seqlen_k, p.head_dim_v);

    for (int i = tiles.first; i < tiles.last; ++i) {                                 // line 7
      const Tile tile = tiles.tile(i);
      const KeyRange keys = tiles.keys(i);
      copy_rows(q_smem, tile.q(p), p.q_stride.row, tile.row0, p.seqlen_q, p.head_dim);
      rows.clear();                                                                  // line 2
      if (j != keys.first) rows.load(p, tile);                                       // line 8
      ptx::bar_sync();                          // Q_i is here, and K_j and V_j for the first
      Scores s;
      matmul_nt(s, as_numbered(q_smem), own_keys(k_smem));  // S = Q K^T             // line 9
      Tile numbered = tile;                     // rows as the fragment numbers them
      numbered.row0 -= slice() * kBlockM;
      score_mod(s, p, numbered, key0 + slice() * kSlice);
      if (keys.is_partial(j)) apply_mask(s, p, numbered, key0 + slice() * kSlice);

      Real top[kRows], sum[kRows];                                                   // line 10
      row_maxima(s, top);
      tops.put(s, top);
      ptx::bar_sync();                          // maxima of both halves are here; Q_i was used
      tops.max(s, top);
      exponentials_and_sums(s, top, scale, sum);  // S becomes P~
      sums.put(s, sum);
      drop_weights(s, p, numbered, key0 + slice() * kSlice);
      store_tile(p_smem, s);
      ptx::bar_warp_sync();                     // P~ of the rows of half a warp is here
      Partial part;                             // this half's part of P~ V_j
      part.clear();
      matmul_nn(part, p_smem, own_keys(v_smem));
      own_rows_first(part);
      Output o;
      outputs.scatter(o, part, 0);
      ptx::bar_sync();                          // sums and outputs of both halves are here
      outputs.gather(o);

      Real own_top[o.kRows], own_sum[o.kRows];
#pragma unroll
      for (int r = 0; r < o.kRows; ++r)
        own_top[r] = slice() ? top[r + kRows - kOwnRows] : top[r];
      sums.sum(o, own_sum);
      rows.join(own_top, own_sum, o, scale);                                         // lines 11, 12
      if (j == keys.last - 1) rows.finish(p, tile, sink);
      else rows.store(p, tile);                                                      // lines 12, 13
    }
  }
}
