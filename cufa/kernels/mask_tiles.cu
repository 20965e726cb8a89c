// Which key blocks a mask hides from a query tile, and which it leaves whole: for kernels that pass
// over the ones and do not mask the others.
//
//   in    mask [B, H, Tq, Tk]  any strides
//   out   workspace            a MaskTile for each key block of each query tile
//   grid  a warp for each of them, one where the mask is repeated
#include "attn/key_range.cuh"
#include "attn/mask_tiles.cuh"
#include "ptx/vote.cuh"
#include "tile/mma_fragment.cuh"

// So many loads a lane are under way at once, and then the warp asks whether it has seen enough.
constexpr int kLoads = 16;

// Reads kRun keys at once, from key0 on, in the tile's first rows.
template <int kRun>
DEVICE MaskTile survey(const Params& p, const Tile& tile, int rows, int key0) {
  constexpr int kRowRuns = kBlockN / kRun;
  bool any = false, all = true;
  for (int first = 0; first < rows * kRowRuns; first += 32 * kLoads) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int run = first + 32 * i + lane();
      const int row = run / kRowRuns, key = key0 + run % kRowRuns * kRun;
      if (row >= rows || key >= p.seqlen_k) continue;
      const ScoreRow<u8> mask(p.mask, p.mask_stride, p, tile, tile.row0 + row);
      const Vec<u8, kRun> seen = mask.template run<kRun>(key);
#pragma unroll
      for (int j = 0; j < kRun; ++j) any |= seen.x[j] != 0, all &= seen.x[j] != 0;
    }
    if (ptx::vote_any(any) && ptx::vote_any(!all)) return kCut;
  }
  return ptx::vote_any(any) ? kWhole : kHidden;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
mask_tiles(const __grid_constant__ Params p) {
  const Strides& to = p.mask_tiles_stride;
  const int blocks = ceil_div(ceil_div(p.seqlen_k, kBlockN), MaskTiles::kPerWord) *
                     MaskTiles::kPerWord;
  const int heads = p.heads.value, tiles = p.tiles.value;
  const int batches = p.tile_count / (heads * tiles);

  Tile tile(p, 0);
  i64 rest = i64(ptx::ctaid_x()) * (kThreads / 32) + warp();
  const auto draw = [&](int count) {
    const int drawn = rest % count;
    rest /= count;
    return drawn;
  };
  const int n = draw(blocks);
  tile.row0 = draw(to.row != 0 ? tiles : 1) * kBlockM;
  tile.head = draw(to.head != 0 ? heads : 1);
  tile.batch = draw(to.batch != 0 ? batches : 1);
  if (rest != 0) return;

  MaskTile found = kHidden;
  const KeyRange seen = visible_keys(p, tile);
  if (to.row == 0 || (seen.first <= n && n < seen.last)) {
    const int rows = to.row == 0 ? 1 : min_of(kBlockM, p.seqlen_q - tile.row0);
    found = has_runs<u8, 4>(p.mask, p.mask_stride, p) ? survey<4>(p, tile, rows, n * kBlockN)
                                                      : survey<1>(p, tile, rows, n * kBlockN);
  }
  if (lane() == 0) MaskTiles(p, tile).bytes()[n] = found;
}
