// bar.sync, bar.red, bar.arrive, bar.warp.sync, and meetings of a warp or a warpgroup.
#include <array>
#include <cstring>

#include "block.h"

namespace emu {
namespace {

// What one lane brings to a barrier.
struct Arrival {
  Thread* thread;
  int id, threads;
  bool waits, done;
  bool any = false;  // bar.red.or: its operand, then the result
};

struct Barrier {
  int expected = 0, arrived = 0;
  bool any = false;
  std::vector<Arrival*> waiting;
  Clock clock;
};

struct Meeting {
  const char* op = nullptr;
  const void* pc = nullptr;
  int first_thread = 0, arrived = 0;
  uint32_t warps = 0;  // of the warpgroup, a bit for each that is here
  std::array<void*, 128> args;
};

Barrier barriers[16];
std::vector<Meeting> warps, warpgroups;

void release_all(Barrier& b) {
  count("bar.sync");
  for (Arrival* a : b.waiting) {
    acquire(*a->thread, b.clock);
    a->done = true, a->any = b.any;
    // `meet` wakes the warp that came last.
    if (a->thread->waits && a->thread->id / 32 != self->id / 32) wake(*a->thread);
  }
  b = {};
}

// A whole warp arrives: bar.sync and bar.arrive are .aligned.
void arrive(void* const* lanes) {
  const auto& first = *static_cast<Arrival*>(lanes[0]);
  const int id = first.id, threads = first.threads ? first.threads : block.n_threads;
  if (id < 0 || id > 15) fail(Kind::protocol, "barrier %d: there are 16, from 0 on", id);
  if (threads % 32 || threads > block.n_threads)
    fail(Kind::protocol,
         "barrier %d for %d threads: not a multiple of 32, or more than the block has", id,
         threads);
  Barrier& b = barriers[id];
  if (b.arrived && b.expected != threads)
    fail(Kind::divergence, "barrier %d: thread %d counts %d threads, others %d", id, self->id,
         threads, b.expected);
  b.expected = threads;
  for (int i = 0; i < 32; ++i) {
    auto& mine = *static_cast<Arrival*>(lanes[i]);
    if (mine.id != id || mine.threads != first.threads)
      fail(Kind::divergence,
           "threads %d and %d of a warp come to barrier %d for %d threads and to %d "
           "for %d",
           first.thread->id, mine.thread->id, id, threads, mine.id, mine.threads);
    release_to(b.clock, *mine.thread);
    b.any |= mine.any;
    if (mine.waits) b.waiting.push_back(&mine);
  }
  if ((b.arrived += 32) >= threads) release_all(b);
}

}  // namespace

void bar_sync(int id, int threads) {
  static const char* names[16] = {"bar.sync 0",  "bar.sync 1",  "bar.sync 2",  "bar.sync 3",
                                  "bar.sync 4",  "bar.sync 5",  "bar.sync 6",  "bar.sync 7",
                                  "bar.sync 8",  "bar.sync 9",  "bar.sync 10", "bar.sync 11",
                                  "bar.sync 12", "bar.sync 13", "bar.sync 14", "bar.sync 15"};
  const Doing doing(names[id & 15], __builtin_return_address(0));
  Arrival mine{self, id, threads, true, false};
  meet(32, &mine, arrive);
  while (!mine.done) wait();
}

bool bar_red_or(bool x, int id, int threads) {
  const Doing doing("bar.red.or", __builtin_return_address(0));
  Arrival mine{self, id, threads, true, false, x};
  meet(32, &mine, arrive);
  while (!mine.done) wait();
  return mine.any;
}

void bar_arrive(int id, int threads) {
  const Doing doing("bar.arrive", __builtin_return_address(0));
  Arrival mine{self, id, threads, false, false};
  meet(32, &mine, arrive);
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
  Meeting &of_warp = warps[self->id / 32], &of_group = warpgroups[self->id / 128];
  Meeting &m = size == 32 ? of_warp : of_group, &other = size == 32 ? of_group : of_warp;
  const int first = self->id / size * size;
  const uint32_t warp = 1u << self->id / 32 % 4;
  const auto fail_diverged = [&](const Meeting& there) {
    fail(Kind::divergence, "threads %d..%d diverge: thread %d is at %s, thread %d at %s @%p", first,
         first + size - 1, self->id, self->op, there.first_thread, there.op, there.pc);
  };
  if (first + size > block.n_threads)
    fail(Kind::divergence, "%s needs %d threads; the block has %d from thread %d on", self->op,
         size, block.n_threads - first, first);
  if (m.arrived == 0) m.op = self->op, m.pc = self->pc, m.first_thread = self->id;
  if (m.pc != self->pc || (m.op != self->op && strcmp(m.op, self->op))) fail_diverged(m);
  if (other.warps & warp) fail_diverged(other);
  m.args[self->id - first] = args;
  m.warps |= warp;
  if (++m.arrived < size) return wait();
  m.arrived = 0, m.warps = 0;
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
