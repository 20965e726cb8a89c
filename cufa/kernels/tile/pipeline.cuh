// Buffers in shared memory that one producer thread fills and consumer warps use, in turn.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "tile/mma_fragment.cuh"

// Which buffer is next, and the two mbarriers of each: `full` completes when what it holds is
// there, `empty` when every consumer has given it back. Either side has a Pipeline of its own
// and goes through the buffers in the same order.
template <int kStages> struct Pipeline {
  static constexpr int kBarrierBytes = 2 * 8 * kStages;

  static_assert((kStages & (kStages - 1)) == 0, "count may wrap");

  u32 barriers;  // full of each stage, then empty of each
  u32 count = 0;  // of buffers that this side has passed on

  DEVICE explicit Pipeline(u32 address) : barriers(address) {}

  // By one thread, before any use. A buffer is given back by so many arrivals.
  DEVICE void init(int arrivals) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers + 8 * i, 1);
      ptx::mbarrier_init(barriers + 8 * (kStages + i), arrivals);
    }
  }

  DEVICE u32 stage() const { return count % kStages; }
  DEVICE u32 round() const { return count / kStages & 1; }
  DEVICE u32 full() const { return barriers + 8 * stage(); }
  DEVICE u32 empty() const { return barriers + 8 * (kStages + stage()); }
  DEVICE void wait_full() const { wait(full(), round()); }
  DEVICE void wait_empty() const { wait(empty(), round() ^ 1); }  // at once in the first round

  // By a consumer warp whose lanes have all read: on to the next buffer. Every warp speaks for
  // itself, so that none can fall a whole round behind and wait for a phase that is over.
  DEVICE void give_back() {
    if (lane() == 0) ptx::mbarrier_arrive(empty());
    ++count;
  }

 private:
  DEVICE static void wait(u32 barrier, int parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
  }
};

// Tiles of which TMA brings the first kLoadedSlabs; what lies behind those is not touched.
template <class Tile, int kStages, int kLoadedSlabs = Tile::kWholeSlabs>
struct TilePipeline : Pipeline<kStages> {
  u32 tiles;

  DEVICE TilePipeline(u32 tiles, u32 barriers) : Pipeline<kStages>(barriers), tiles(tiles) {}

  // A product takes matrix descriptors from uniform registers, and would wait for each of them to
  // be moved there.
  DEVICE Tile tile() const {
    return {u32(uniform(tiles + this->stage() * Tile::kBytes))};
  }

  // By the producer: rows row0 and on of a matrix; zeros past its last row and its last column.
  DEVICE void load(const ptx::TensorMap& map, int row0, int head, int batch) {
    const Tile to{tiles + this->stage() * Tile::kBytes};
    this->wait_empty();
    ptx::mbarrier_arrive_expect_tx(this->full(), kLoadedSlabs * Tile::kSlabBytes);
#pragma unroll
    for (int i = 0; i < kLoadedSlabs; ++i)
      ptx::cp_async_bulk_tensor_4d_load(to.slab(i), map, i * Tile::kSlabCols, row0, head, batch,
                                        this->full());
    ++this->count;
  }
};
