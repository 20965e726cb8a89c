// A mask as mask_tiles.cu leaves it for kernels that pass over key blocks: for each query tile what
// it hides of each block, and a bit for each element.
#pragma once
#include "attn/tile.cuh"
#include "ptx/clz.cuh"
#include "tile/mma_fragment.cuh"

// What the mask leaves of a block for the rows of a tile. Keys and rows past the end do not count.
enum BlockMask : u8 {
  kHidden = 0,  // no row sees a key
  kCut,
  kWhole,  // every row sees all keys
};

struct KeyBlock {
  int n;
  BlockMask mask;
};

// In the workspace, of one tile: a BlockMask for each block, eight to a word of 64 bits; then the
// bits of each block, which nobody reads of hidden ones. Tiles that differ only along axes that the
// mask is repeated along have the same memory.
struct MaskTiles {
  static constexpr int kPerWord = 8;
  // A lane's columns of one row of a block are the lowest kColumns bits of a u32. A block has one
  // for each row and each lane of a quad.
  static constexpr int kColumns = kBlockN / 4, kPerBlock = 4 * kBlockM;
  static_assert(!kMask || kColumns <= 32);

  u64* words;

  MaskTiles() = default;
  DEVICE MaskTiles(const Params& p, const Tile& tile)
      : words(static_cast<u64*>(p.workspace) + tile.batch * p.mask_tiles_stride.batch +
              tile.head * p.mask_tiles_stride.head +
              tile.row0 / kBlockM * p.mask_tiles_stride.row) {}

  DEVICE static int block_count(const Params& p) {
    return ceil_div(ceil_div(p.seqlen_k, kBlockN), kPerWord) * kPerWord;
  }

  DEVICE BlockMask& operator[](int n) const { return reinterpret_cast<BlockMask*>(words)[n]; }

  // Of row `row` of the tile, and this lane of a quad.
  DEVICE u32& bits(const Params& p, int n, int row) const {
    u32* all = reinterpret_cast<u32*>(words + block_count(p) / kPerWord);
    return all[i64(n) * kPerBlock + 4 * row + lane() % 4];
  }

  // The last block up to n, itself included, that is not hidden; of number -1 if all are.
  DEVICE KeyBlock last(int n) const {
    // Most often it is n, which takes few instructions to see.
    if (n >= 0 && (*this)[n] != kHidden) return {n, (*this)[n]};
    while (n >= 0) {
      const int above = kPerWord - 1 - n % kPerWord;  // blocks of the word that come after n
      const u64 found = words[n / kPerWord] << 8 * above;
      if (found != 0) {
        const int hidden = ptx::clz(found) / 8;
        return {n - hidden, BlockMask(found << 8 * hidden >> 56)};
      }
      n -= kPerWord - above;
    }
    return {-1, kHidden};
  }
};
