// bar.sync, bar.arrive, bar.warp.sync, and meetings of a warp or a warpgroup.
#include <array>
#include <cstring>

#include "block.h"

namespace emu {
namespace {

struct Barrier {
  int expected = 0, arrived = 0;
  std::vector<int> waiting;
  Clock clock;
};

struct Meeting {
  const char* op = nullptr;
  const void* pc = nullptr;
  int first_thread = 0, arrived = 0;
  std::array<void*, 128> args;
};

Barrier barriers[16];
std::vector<Meeting> warps, warpgroups;

// True if the running thread completed the barrier.
bool arrive(int id, int threads, bool and_wait) {
  if (id < 0 || id > 15) fail(Kind::protocol, "barrier %d: there are 16, from 0 on", id);
  if (threads == 0) threads = block.n_threads;
  if (threads % 32 || threads > block.n_threads)
    fail(Kind::protocol, "barrier %d for %d threads: not a multiple of 32, or more than the block has",
         id, threads);
  Barrier& b = barriers[id];
  if (b.arrived && b.expected != threads)
    fail(Kind::divergence, "barrier %d: thread %d counts %d threads, others %d", id, self->id,
         threads, b.expected);
  b.expected = threads;
  release_to(b.clock);
  if (and_wait) b.waiting.push_back(self->id);
  if (++b.arrived < threads) return false;
  count("bar.sync");
  for (int t : b.waiting) {
    acquire(block.threads[t], b.clock);
    if (t != self->id) wake(block.threads[t]);
  }
  b = {};
  return true;
}

}  // namespace

void bar_sync(int id, int threads) {
  static const char* names[16] = {
      "bar.sync 0",  "bar.sync 1",  "bar.sync 2",  "bar.sync 3", "bar.sync 4",  "bar.sync 5",
      "bar.sync 6",  "bar.sync 7",  "bar.sync 8",  "bar.sync 9", "bar.sync 10", "bar.sync 11",
      "bar.sync 12", "bar.sync 13", "bar.sync 14", "bar.sync 15"};
  const Doing doing(names[id & 15], __builtin_return_address(0));
  if (!arrive(id, threads, true)) wait();
}

void bar_arrive(int id, int threads) {
  const Doing doing("bar.arrive", __builtin_return_address(0));
  arrive(id, threads, false);
}

void bar_warp_sync() {
  const Doing doing("bar.warp.sync", __builtin_return_address(0));
  meet(32, nullptr, [](void* const*) {
    Thread* lanes = &block.threads[self->id / 32 * 32];
    Clock clock(block.n_agents, 0);
    for (int i = 0; i < 32; ++i) {
      join(clock, lanes[i].seen);
      ++lanes[i].seen[lanes[i].id];
    }
    for (int i = 0; i < 32; ++i) acquire(lanes[i], clock);
  });
}

void meet(int size, void* args, void (*perform)(void* const* lanes)) {
  Meeting& m = size == 32 ? warps[self->id / 32] : warpgroups[self->id / 128];
  const int first = self->id / size * size;
  if (first + size > block.n_threads)
    fail(Kind::divergence, "%s needs %d threads; the block has %d from thread %d on", self->op, size,
         block.n_threads - first, first);
  if (m.arrived == 0) m.op = self->op, m.pc = self->pc, m.first_thread = self->id;
  if (strcmp(m.op, self->op) || m.pc != self->pc)
    fail(Kind::divergence, "threads %d..%d diverge: thread %d is at %s, thread %d at %s @%p", first,
         first + size - 1, self->id, self->op, m.first_thread, m.op, m.pc);
  m.args[self->id - first] = args;
  if (++m.arrived < size) return wait();
  m.arrived = 0;
  count(self->op);
  perform(m.args.data());
  for (int i = first; i < first + size; ++i)
    if (i != self->id) wake(block.threads[i]);
}

void begin_barriers() {
  for (Barrier& b : barriers) b = {};
  warps.assign(block.n_warps, {});
  warpgroups.assign(block.n_warpgroups, {});
}

}  // namespace emu
