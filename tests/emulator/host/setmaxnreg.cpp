// setmaxnreg: registers that one warpgroup gives up, another takes; `inc` waits until there are
// enough (PTX ISA, "Miscellaneous instructions: setmaxnreg").
#include <algorithm>

#include "block.h"
#include "launch.h"

namespace emu {
namespace {

constexpr int kRegisters = 64 << 10;  // of a multiprocessor

int pool = 0;  // of the block: what some have given up and none has taken
std::vector<int> held;  // by warp: registers of each of its threads
std::vector<int> waiting;

}  // namespace

void setmaxnreg(int registers, bool increase) {
  const Doing doing(increase ? "setmaxnreg.inc" : "setmaxnreg.dec", __builtin_return_address(0));
  if (registers % 8 || registers < 24 || registers > 256)
    fail(Kind::protocol, "%s to %d: a multiple of 8 from 24 to 256 is allowed", self->op,
         registers);
  meet(128, nullptr, [](void* const*) {});
  int& mine = held[self->id / 32];
  if (mine == registers) return;  // another lane of the warp has done it
  if ((registers > mine) != increase)
    fail(Kind::protocol, "%s from %d to %d registers", self->op, mine, registers);
  const int needed = 32 * (registers - mine);
  while (needed > pool) {
    waiting.push_back(self->id);
    wait();
    if (mine == registers) return;
  }
  pool -= needed, mine = registers;
  for (int t : waiting) wake(block.threads[t]);
  waiting.clear();
}

void begin_registers() {
  const int threads = std::max(1, block.n_threads * launch->blocks_per_sm);
  held.assign(block.n_warps, std::min(255, kRegisters / threads) / 8 * 8);
  pool = 0;
  waiting.clear();
}

}  // namespace emu
