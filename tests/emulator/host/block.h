// The running block: its threads, what each knows of the others, and who runs next.
//
// A thread is a fiber. It runs until it has to wait, so lanes of one warp are freer than on a card:
// what only lockstep would order shows up. What orders two accesses is kept in vector clocks
// (Mattern 1989): a thread knows for every agent the latest moment that happened before now.
#pragma once
#include <cstdint>
#include <vector>

#include "emu.h"
#include "report.h"

namespace emu {

using Moment = uint32_t;
using Clock = std::vector<Moment>;  // by agent: the latest moment that happened before

// Agents are the threads, then one for each mbarrier (copies that are signalled through it), then
// one for each warpgroup (its wgmma).
constexpr int kMaxMbarriers = 64;

struct Range {
  const uint8_t *begin, *end;
  bool readable;
};

struct Thread {
  int id = 0;
  bool waits = false;
  const char* op = "start";  // what it does or waits for
  const void* pc = nullptr;  // and where
  Clock seen;
  Moment fenced = 0;           // its own moment at its last fence.proxy.async
  std::vector<Range> watched;  // its registers that an unfinished wgmma works on
  void* stack_pointer = nullptr;
  uint8_t* stack = nullptr;
};

struct Block {
  Dim3 index;
  int n_threads, n_warps, n_warpgroups, n_agents;
  uint32_t shared_bytes;
  uint8_t* shared;
  std::vector<Thread> threads;  // the first n_threads; the rest keep their stacks for later
};

enum class Order { first, last, random };

extern Block block;
extern Thread* self;  // the running thread; null between blocks
extern Order order;

uint32_t random_below(uint32_t n);

// Notes what the running thread does, for reports.
struct Doing {
  Doing(const char* op, const void* pc) { self->op = op, self->pc = pc; }
};

// Suspends the running thread until `wake`; others run.
void wait();
void wake(Thread& thread);

inline int mbarrier_agent(int i) { return block.n_threads + i; }
inline int wgmma_agent(int warpgroup) { return block.n_threads + kMaxMbarriers + warpgroup; }

// Whether what `agent` did at `moment` happened before now, for a thread with this clock.
inline bool knows(const Clock& seen, int agent, Moment moment) { return seen[agent] >= moment; }
void join(Clock& into, const Clock& from);
// All that a thread has done happens before whatever acquires `clock`.
void release_to(Clock& clock, Thread& thread = *self);
void acquire(Thread& thread, const Clock& clock);

// A meeting of all lanes of a warp (32) or warpgroup (128): each leaves `args`, the last one does
// `perform` for all. Reports if they come to different instructions.
void meet(int size, void* args, void (*perform)(void* const* lanes));

// Runs one block to its end.
void run_block(void (*kernel)(const void*), const void* params);
// The address range that is the running thread's stack.
bool on_stack(const void* p);

void count(const char* instruction);

// What each group of instructions does at a block's start, and checks at its end.
void begin_barriers();
void begin_shared();
void begin_cp_async();
void end_cp_async();
void begin_mbarriers();
void begin_bulk();
void end_bulk();
void begin_wgmma();
void end_wgmma();
void begin_registers();
// Lets one bulk load land; false if none is under way.
bool land_one_load();

}  // namespace emu
