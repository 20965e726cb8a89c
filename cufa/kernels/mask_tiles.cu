// A mask for kernels that pass over the key blocks that it hides: attn/mask_tiles.cuh.
//
//   in    mask [B, H, Tq, Tk]  any strides
//   out   workspace            MaskTiles of each query tile, one where the mask is repeated
//   grid  a warp for each block of each of them
#include "attn/key_range.cuh"
#include "attn/mask_tiles.cuh"
#include "ptx/vote.cuh"

// A lane reads four keys of each of so many rows at once, and writes the bits of one.
constexpr int kRows = 8;
// Of lanes: those that read the first four keys of each eight. Of a lane's bits: the first of each
// pair of columns.
constexpr u32 kEven = 0x55555555;

struct Survey {
  const Params& p;
  const Tile& tile;
  const MaskTiles to;
  const int n;
  u32 any = 0, missing = 0;  // of the elements that this lane has read

  // Bit j: whether the mask leaves key + j of a row; none past the end.
  template <bool kRuns> DEVICE u32 read(int row, int key) {
    const ScoreRow<u8> mask(p.mask, p.mask_stride, p, tile, row);
    Vec<u8, 4> found{};
    if (kRuns && key < p.seqlen_k) found = mask.template run<4>(key);
    u32 visible = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!kRuns && key + j < p.seqlen_k) found.x[j] = mask.at(key + j);
      visible |= u32(found.x[j] != 0) << j;
    }
    return visible;
  }

  template <bool kRuns> DEVICE BlockMask run() {
    const int key = n * kBlockN + 4 * lane();
    const int keys = 4 * lane() < kBlockN ? min_of(4, max_of(0, p.seqlen_k - key)) : 0;
    const u32 existing = 0x11111111u * ((1u << keys) - 1);
    for (int row0 = 0; row0 < kBlockM; row0 += kRows) {
      u32 visible = 0;  // four bits for each row
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (4 * lane() < kBlockN) visible |= read<kRuns>(tile.row0 + row0 + i, key) << 4 * i;
      any |= visible;
      missing |= existing & ~visible;
      u32 bits = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Lane q of a quad has columns 2 q and 2 q + 1 of each eight, which two lanes have read.
        u32 votes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) votes[j] = ptx::vote_ballot(visible >> (4 * i + j) & 1);
        const bool second = lane() & 1, upper = lane() & 2;
        const u32 even = (second ? votes[2] : votes[0]) >> upper;
        const u32 odd = (second ? votes[3] : votes[1]) >> upper;
        if (lane() / 4 == i) bits = (even & kEven) | (odd & kEven) << 1;
      }
      to.bits(p, n, row0 + lane() / 4) = bits;
    }
    if (!ptx::vote_any(any != 0)) return kHidden;
    return ptx::vote_any(missing != 0) ? kCut : kWhole;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
mask_tiles(const __grid_constant__ Params p) {
  // The warp's number has a digit for the block and for each axis that the mask varies along.
  i64 rest = i64(ptx::ctaid_x()) * (kThreads / 32) + warp();
  const auto digit = [&](bool varies, int count) {
    if (!varies) return 0;
    const int found = rest % count;
    rest /= count;
    return found;
  };
  const Strides& stride = p.mask_tiles_stride;
  const int heads = p.heads.value, tiles = p.tiles.value;
  Tile tile(p, 0);
  const int n = digit(true, MaskTiles::block_count(p));
  tile.row0 = digit(stride.row != 0, tiles) * kBlockM;
  tile.head = digit(stride.head != 0, heads);
  tile.batch = digit(stride.batch != 0, p.tile_count / (heads * tiles));
  if (rest != 0) return;  // a warp too many in the last block

  Survey survey{p, tile, {p, tile}, n};
  const KeyRange seen = visible_keys(p, tile);
  BlockMask found = kHidden;
  // Rows of other tiles see other keys.
  if (stride.row == 0 ? n * kBlockN < p.seqlen_k : seen.first <= n && n < seen.last)
    found = has_runs<u8, 4>(p.mask, p.mask_stride, p) ? survey.run<true>() : survey.run<false>();
  if (lane() == 0) survey.to[n] = found;
}
