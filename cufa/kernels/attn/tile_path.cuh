// Which tile is next: from the thread that loads to the warps that compute, and their verdict back.
#pragma once
#include "attn/key_range.cuh"
#include "attn/mask_tiles.cuh"
#include "ptx/atom.cuh"
#include "ptx/barrier.cuh"
#include "tile/pipeline.cuh"

enum class JobKind : int {
  kTile,
  kAgain,    // a tile once more, with no block blind
  kNothing,  // no tile is left, but some may be needed again
  kEnd,
};

struct Job {
  JobKind kind;
  // Of kTile and kAgain alone:
  Tile tile;
  KeyRange keys;
  MaskTiles mask;  // if there is a mask

  DEVICE static bool is_tile(JobKind kind) {
    return kind == JobKind::kTile || kind == JobKind::kAgain;
  }

  // Block n of keys; and the one that is taken after it: the last before it that the mask does not
  // hide, which may lie before keys.first.
  DEVICE KeyBlock block(int n) const { return {n, kMask ? mask[n] : kWhole}; }
  DEVICE KeyBlock before(int n) const {
    if constexpr (kMask) return mask.last(n - 1);
    else return {n - 1, kWhole};
  }
};

// Slots of shared memory, in turn, each with a job and, for each of kWarps warps, whether it has
// given up on it. If any has, the producer sends the same tile once more when the slot is next. So
// a row's result depends on the numbers alone, not on which block computed it when.
template <int kWarps> struct TilePath {
  static constexpr int kSlots = 4;  // fewer hold short tiles up
  struct Slot {
    Job job;
    u32 gave_up[kWarps];
  };
  using Slots = Pipeline<kSlots>;
  static constexpr int kBytes = Slots::kBarrierBytes + kSlots * sizeof(Slot);

  // Two counts over the same barriers, as a consumer receives a job before it gives back the one
  // before: of jobs that are sent or received, and of those that are computed.
  Slots sent, done;
  Slot* slots;

  // kBytes of shared memory from `memory` on, whose address is `address`.
  DEVICE TilePath(u8* memory, u32 address)
      : sent(address),
        done(address),
        slots(reinterpret_cast<Slot*>(memory + Slots::kBarrierBytes)) {}

  DEVICE void init() const { sent.init(32 * kWarps); }

  // By the producer: load(kind, job) is called for each job, as soon as consumers know of it. A
  // block's first tile has the block's number; it draws the next one once for each tile that it
  // takes. So blocks draw as often as there are tiles, and the count that they share, which wraps
  // there, ends at 0, where the next launch begins.
  template <class Load> DEVICE void produce(const Params& p, Load load) {
    u32 next = ptx::ctaid_x();
    for (int idle = 0; idle <= kSlots;) {  // until every slot has come back without a tile
      sent.wait_empty();
      Slot& slot = slots[sent.stage()];
      JobKind kind = idle < kSlots ? JobKind::kNothing : JobKind::kEnd;
      if (sent.count >= kSlots && any_gave_up(slot)) {  // before, nobody has written there
        kind = JobKind::kAgain;  // the tile is still there
      } else if (next < p.tile_count) {
        kind = JobKind::kTile;
        slot.job.tile = Tile::in_turn(p, next);
        if constexpr (kMask) slot.job.mask = MaskTiles(p, slot.job.tile);
        slot.job.keys = key_blocks(p, slot.job.tile, slot.job.mask);
        next = ptx::nctaid_x() + ptx::atom_inc(p.tickets, p.tile_count - 1);
      }
      slot.job.kind = kind;
      ptx::mbarrier_arrive(sent.full());
      ++sent.count;
      idle = Job::is_tile(kind) ? 0 : idle + 1;
      load(kind, slot.job);
    }
  }

  // By a consumer warp: waits for the next job, which is `due` once those before are given back.
  DEVICE JobKind next() {
    sent.wait_full();
    const int kind = uniform(int(slots[sent.stage()].job.kind));
    ++sent.count;
    return JobKind(kind);
  }

  // The job of the last `next`.
  DEVICE const Job& latest() const { return slots[(sent.count - 1) % kSlots].job; }

  // The earliest job that is not given back; whether this warp gave up on it the first time, if it
  // is a kAgain; and its end.
  DEVICE const Job& due() const { return slots[done.stage()].job; }
  DEVICE bool gave_up() const { return slots[done.stage()].gave_up[warp()]; }
  DEVICE void give_back(bool give_up) {
    ptx::bar_warp_sync();  // all lanes have read the slot
    if (lane() == 0) slots[done.stage()].gave_up[warp()] = give_up;
    // Every lane for itself: that one arrives for what others have read, compute-sanitizer takes
    // for a race with the producer's next write.
    ptx::mbarrier_arrive(done.empty());
    ++done.count;
  }

 private:
  DEVICE static KeyRange key_blocks(const Params& p, const Tile& tile, const MaskTiles& mask) {
    KeyRange seen = visible_keys(p, tile);
    // A mask has no block past the end, where causal="top_left" may put what a window begins with.
    if constexpr (kMask) seen.first = min_of(seen.first, ceil_div(p.seqlen_k, kBlockN) - 1);
    KeyRange keys = cut_right(p, seen, tile.row0, kBlockM);
    if constexpr (kMask)
      keys.last = max_of(keys.first, mask.last(keys.last - 1).n) + 1;
    return keys;
  }

  DEVICE static bool any_gave_up(const Slot& slot) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) any |= slot.gave_up[i];
    return any;
  }
};
