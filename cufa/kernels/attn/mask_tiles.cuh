// What a mask leaves of the key blocks of each query tile, as mask_tiles.cu finds it beforehand.
#pragma once
#include "attn/tile.cuh"
#include "ptx/clz.cuh"

// A byte for each block.
enum MaskTile : u8 {
  kHidden = 0,  // no row sees a key
  kCut = 1,
  kWhole,  // every row sees all that exist
};

// The blocks of one query tile, eight to a word. Tiles that differ only along axes that the mask is
// repeated along have the same words.
struct MaskTiles {
  static constexpr int kPerWord = 8;

  u64* words;

  DEVICE MaskTiles(const Params& p, const Tile& tile)
      : words(static_cast<u64*>(p.workspace) + tile.batch * p.mask_tiles_stride.batch +
              tile.head * p.mask_tiles_stride.head +
              tile.row0 / kBlockM * p.mask_tiles_stride.row) {}

  DEVICE u8* bytes() const { return reinterpret_cast<u8*>(words); }
  DEVICE bool is_whole(int n) const { return bytes()[n] == kWhole; }

  // The last block up to n that is not hidden; negative if all are.
  DEVICE int last(int n) const {
    while (n >= 0) {
      const int above = kPerWord - 1 - n % kPerWord;  // blocks of the word that come after n
      const u64 found = words[n / kPerWord] << 8 * above;
      if (found != 0) return n - ptx::clz(found) / 8;
      n -= kPerWord - above;
    }
    return n;
  }
};
