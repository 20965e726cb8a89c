// The gradient of the bias: sums of dS over what the bias is repeated along. No sum depends on the
// order of blocks. Every dtype, any alignment, sm_70 and later.
// Source: Dao, arXiv:2307.08691, Algorithm 2, lines 11 to 14.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   dout [B, H, Tq, Dv]
//         lse and D of each row, in the workspace (bwd_rows)
//   out   dbias [B, H, Tq, Tk] with 1 for any of them
//   grid  tiles of dbias, of kBlockM rows or one, and kBlockN keys or one
//   block kThreads; half a warp owns kRowsQ rows
//   smem  BackwardTiles, in the accumulator's type
#include "attn/backward_simt.cuh"

struct Range {
  int first, last;

  // The block's own of `count`, or all of them where dbias has one for all.
  DEVICE Range(bool varies, int count, u32& rest) {
    first = varies ? rest % count : 0;
    last = varies ? first + 1 : count;
    if (varies) rest /= count;
  }
};

// Sums of a tile over its keys, into the first column, and over its rows, into the first row.
DEVICE void sum_keys(PaddedTile<kBlockM, kBlockN> x) {
  for (int row = ptx::tid_x(); row < kBlockM; row += kThreads)
    for (int col = 1; col < kBlockN; ++col) x.at(row, 0) += x.at(row, col);
  ptx::bar_sync();
}
DEVICE void sum_rows(PaddedTile<kBlockM, kBlockN> x, int cols) {
  for (int col = ptx::tid_x(); col < cols; col += kThreads)
    for (int row = 1; row < kBlockM; ++row) x.at(0, col) += x.at(row, col);
  ptx::bar_sync();
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa2_bwd_dbias_simt(const __grid_constant__ BackwardParams p) {
  const ScoreStrides& stride = p.dbias_stride;
  u32 rest = ptx::ctaid_x();
  const Range blocks(stride.key != 0, ceil_div(p.seqlen_k, kBlockN), rest);
  const Range tiles(stride.row != 0, ceil_div(p.seqlen_q, kBlockM), rest);
  const Range heads(stride.head != 0, p.heads.value, rest);
  const Range batches(stride.batch != 0, p.batch, rest);
  const BackwardTiles smem(ptx::dynamic_smem());
  Scores sum;
  sum.clear();

  for (int batch = batches.first; batch < batches.last; ++batch)
    for (int head = heads.first; head < heads.last; ++head)
      for (int i = tiles.first; i < tiles.last; ++i) {
        const Tile tile = Tile::of(batch, head, p.group.quotient(head), i * kBlockM);
        const KeyRange keys = visible_keys(p, tile);
        const int last = min_of(keys.last, blocks.last);
        for (int n = max_of(keys.first, blocks.first); n < last; ++n) {
          smem.load_queries(p, tile);
          smem.load_keys(p, tile, n * kBlockN);
          ptx::bar_sync();                         // all four are here
          Scores s, ds;
          smem.gradients<Back::kBias>(s, ds, p, tile, keys, n);
#pragma unroll
          for (int r = 0; r < Scores::kRows; ++r)
#pragma unroll
            for (int c = 0; c < Scores::kCols; ++c) sum.at(r, c) += ds.at(r, c);
          ptx::bar_sync();                         // all have used them
        }
      }

  store_tile(smem.scores, sum);
  ptx::bar_sync();                                 // the sums of the tile are here
  if (stride.key == 0) sum_keys(smem.scores);
  if (stride.row == 0) sum_rows(smem.scores, stride.key == 0 ? 1 : kBlockN);
  const int row0 = tiles.first * kBlockM, key0 = blocks.first * kBlockN;
  const int rows = stride.row == 0 ? 1 : min_of(kBlockM, p.seqlen_q - row0);
  const int cols = stride.key == 0 ? 1 : min_of(kBlockN, p.seqlen_k - key0);
  auto* dbias = static_cast<Storage<kResult>::type*>(p.dbias) + batches.first * stride.batch +
                heads.first * stride.head + row0 * stride.row + key0 * stride.key;
  for (int i = ptx::tid_x(); i < rows * kBlockN; i += kThreads) {
    const int row = i / kBlockN, col = i % kBlockN;
    if (col < cols)
      dbias[row * stride.row + col * stride.key] = from_real<kResult>(smem.scores.at(row, col));
  }
}
