// Which tile is next: from the thread that loads to the warps that compute, and their verdict back.
#pragma once
#include "attn/params.cuh"
#include "ptx/atom.cuh"
#include "ptx/barrier.cuh"
#include "tile/pipeline.cuh"

// A tile by its number; or none for now; or none any more.
struct Job {
  u32 word;

  static constexpr u32 kExactly = 1u << 31, kNothing = ~0u, kEnd = ~0u - 1;

  DEVICE bool is_tile() const { return word < kEnd; }
  DEVICE bool is_end() const { return word == kEnd; }
  DEVICE bool exactly() const { return word & kExactly; }  // a second time, without shortcuts
  DEVICE u32 number() const { return word & ~kExactly; }
};

// Slots of shared memory, in turn, each with a job and for each of kWarps warps whether it has given
// up on it. When a slot is next again, the producer sends the same tile once more if any has. So
// what a row's result is made of depends on the numbers alone, not on who computed it when.
template <int kWarps> struct TilePath {
  static constexpr int kSlots = 4;
  using Turns = Pipeline<kSlots>;
  static constexpr int kBytes = Turns::kBytes + kSlots * (1 + kWarps) * sizeof(u32);

  Turns sent, done;  // of the jobs sent or received, and of those that are computed
  u32* slots;

  // kBytes of shared memory from `memory` on, whose address is `address`.
  DEVICE TilePath(u8* memory, u32 address)
      : sent(address), done(address), slots(reinterpret_cast<u32*>(memory + Turns::kBytes)) {}

  DEVICE void init() const { sent.init(kWarps); }

  // By the producer: load(job) is called for each job, as soon as consumers know of it. A block
  // draws the next tile's number once for each tile that it takes, so that the count that blocks
  // share ends at 0, where the next launch begins.
  template <class Load> DEVICE void produce(const Params& p, Load load) {
    u32 next = ptx::ctaid_x();
    for (int idle = 0; idle <= kSlots;) {  // until every slot has come back without a tile
      sent.wait_empty();
      Job job{Job::kNothing};
      if (sent.turn >= kSlots && any_gave_up()) {
        job.word = *slot(sent) | Job::kExactly;
      } else if (next < p.tile_count) {
        job.word = next;
        next = ptx::nctaid_x() + ptx::atom_inc(p.tickets, p.tile_count - 1);
      } else if (idle == kSlots) {
        job.word = Job::kEnd;
      }
      *slot(sent) = job.word;
      ptx::mbarrier_arrive(sent.full());
      ++sent.turn;
      idle = job.is_tile() ? 0 : idle + 1;
      load(job);
    }
  }

  // By a consumer warp.
  DEVICE Job next() {
    sent.wait_full();
    const u32 word = ptx::shfl_idx(*slot(sent), 0);  // one for the warp
    ++sent.turn;
    return {word};
  }

  // Whether the warp has given up on the job that is due, the time before.
  DEVICE bool gave_up() const { return *verdict(); }

  // The job that is due is done.
  DEVICE void give_back(bool give_up) {
    ptx::bar_warp_sync();  // all lanes have read the slot
    if (lane() == 0) *verdict() = give_up;
    done.give_back();
  }

 private:
  DEVICE u32* slot(const Turns& turns) const { return slots + turns.stage() * (1 + kWarps); }
  DEVICE u32* verdict() const { return slot(done) + 1 + warp(); }
  DEVICE bool any_gave_up() const {
    bool any = false;
    for (int i = 0; i < kWarps; ++i) any |= slot(sent)[1 + i];
    return any;
  }
};
