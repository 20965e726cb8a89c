// mbarrier objects (PTX ISA, "Parallel synchronization and communication instructions: mbarrier"),
// and the fences of the async proxy.
#include "mbarrier.h"

#include <map>
#include <string>

#include "block.h"
#include "shared.h"

namespace emu {
namespace {

struct Mbarrier {
  int expected = 0, pending = 0;  // arrivals
  int64_t pending_bytes = 0;
  int phase = 0;
  Clock gathered, released;  // by arrivals in this phase; by the last phase that was completed
  std::vector<int> waiting;
  int agent = 0, init_thread = 0;
  Moment init_moment = 0;
  bool init_fenced = false;
  const void* landed = nullptr;  // where the latest load was issued that nobody has waited for yet
  int landed_in = 0;             // which phase
  std::string wait_name;
};

std::map<uint32_t, Mbarrier> mbarriers;

Mbarrier& find(uint32_t bar) {
  const uint32_t offset = shared_offset(bar, 8, 8);
  const auto found = mbarriers.find(bar);
  if (found == mbarriers.end())
    fail(Kind::protocol, "thread %d: %s at shared memory +%u, which is no initialised mbarrier",
         self->id, self->op, offset);
  Mbarrier& b = found->second;
  if (!knows(self->seen, b.init_thread, b.init_moment))
    fail(Kind::race,
         "thread %d: %s on the mbarrier at +%u, which thread %d initialised; nothing orders "
         "the two",
         self->id, self->op, offset, b.init_thread);
  return b;
}

void complete_if_due(Mbarrier& b) {
  if (b.pending || b.pending_bytes) return;
  b.pending = b.expected, ++b.phase;
  b.released = std::move(b.gathered), b.gathered.clear();
  for (int t : b.waiting) wake(block.threads[t]);
  b.waiting.clear();
}

}  // namespace

void mbarrier_init(uint32_t bar, int expected) {
  const Doing doing("mbarrier.init", __builtin_return_address(0));
  const uint32_t offset = shared_offset(bar, 8, 8);
  if (mbarriers.count(bar))
    fail(Kind::protocol, "the mbarrier at +%u is initialised twice", offset);
  if (mbarriers.size() >= size_t(kMaxMbarriers))
    fail(Kind::protocol, "more than %d mbarriers: kMaxMbarriers in block.h must grow",
         kMaxMbarriers);
  if (expected < 1) fail(Kind::protocol, "an mbarrier for %d arrivals", expected);
  write_shared(offset, 8, *self);
  set_mbarrier(offset);
  const int agent = mbarrier_agent(int(mbarriers.size()));
  Mbarrier& b = mbarriers[bar];
  b.expected = b.pending = expected, b.agent = agent;
  b.init_thread = self->id, b.init_moment = self->seen[self->id];
  b.wait_name = "mbarrier.try_wait +" + std::to_string(offset);
}

void mbarrier_arrive(uint32_t bar, int expected_bytes) {
  const Doing doing(expected_bytes ? "mbarrier.arrive.expect_tx" : "mbarrier.arrive",
                    __builtin_return_address(0));
  Mbarrier& b = find(bar);
  release_to(b.gathered);
  b.pending_bytes += expected_bytes;
  if (--b.pending < 0)
    fail(Kind::protocol, "thread %d: more arrivals than the mbarrier at +%u expects (%d)", self->id,
         shared_offset(bar, 8, 8), b.expected);
  complete_if_due(b);
}

bool mbarrier_try_wait_parity(uint32_t bar, int parity) {
  const Doing doing("mbarrier.try_wait", __builtin_return_address(0));
  if (parity != 0 && parity != 1)
    fail(Kind::protocol, "thread %d: mbarrier.try_wait.parity of parity %d", self->id, parity);
  Mbarrier& b = find(bar);
  self->op = b.wait_name.c_str();
  while ((b.phase & 1) == parity) {
    b.waiting.push_back(self->id);
    wait();
  }
  acquire(*self, b.released);
  if (b.landed_in < b.phase) b.landed = nullptr;
  return true;
}

void fence_mbarrier_init() {
  for (auto& [bar, b] : mbarriers)
    if (b.init_thread == self->id) b.init_fenced = true;
}

void fence_proxy_async() { self->fenced = self->seen[self->id]++; }

void check_mbarrier(uint32_t bar) {
  const Mbarrier& b = find(bar);
  if (!b.init_fenced)
    fail(Kind::protocol,
         "thread %d: %s on the mbarrier at +%u, whose initialisation no "
         "fence.mbarrier_init made visible",
         self->id, self->op, shared_offset(bar, 8, 8));
}

void land_bytes(uint32_t bar, int bytes, Moment moment, const void* pc) {
  Mbarrier& b = mbarriers.at(bar);
  if (b.gathered.empty()) b.gathered.assign(block.n_agents, 0);
  b.gathered[b.agent] = moment;
  b.pending_bytes -= bytes;
  b.landed = pc, b.landed_in = b.phase;
  complete_if_due(b);
}

const void* load_without_wait() {
  for (const auto& [bar, b] : mbarriers)
    if (b.landed) return b.landed;
  return nullptr;
}

int agent_of(uint32_t bar) { return mbarriers.at(bar).agent; }

void begin_mbarriers() { mbarriers.clear(); }

}  // namespace emu
