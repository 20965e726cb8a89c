// One launch: block after block, checks at the end of each and of all.
#include "launch.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include "block.h"
#include "global.h"

namespace emu {

Launch* launch = nullptr;
const uint8_t *unit_begin = nullptr, *unit_end = nullptr;

namespace {

std::mt19937 generator;
std::string report;
std::map<const char*, int64_t> counts;  // by the place of an instruction's name; some have two

struct Failure {};

[[noreturn]] void give_up(const void* pc, Kind kind, const char* format, va_list arguments) {
  char text[4096];
  vsnprintf(text, sizeof text, format, arguments);
  report = text;
  launch->kind = int32_t(kind), launch->pc = pc;
  if (!self) throw Failure();
  abandon_block();
  abort();
}

void run_blocks(void (*kernel)(const void*)) {
  const int32_t* grid = launch->grid;
  for (int64_t i = 0; i < int64_t(grid[0]) * grid[1] * grid[2]; ++i) {
    block.index = {int(i % grid[0]), int(i / grid[0] % grid[1]), int(i / grid[0] / grid[1])};
    begin_barriers();
    begin_shared();
    begin_cp_async();
    begin_mbarriers();
    begin_bulk();
    begin_wgmma();
    begin_registers();
    run_block(kernel, launch->params);
    self = nullptr;
    if (launch->kind) return;
    end_cp_async();
    end_wgmma();
    end_bulk();
  }
}

}  // namespace

void fail(Kind kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  give_up(self ? self->pc : nullptr, kind, format, arguments);
}

void fail_at(const void* pc, Kind kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  give_up(pc, kind, format, arguments);
}

int thread_index() { return self->id; }
Dim3 block_index() { return block.index; }
int grid_blocks() { return launch->grid[0]; }

uint32_t random_below(uint32_t n) { return generator() % n; }

void count(const char* instruction) { ++counts[instruction]; }

const char* run(void* what, void (*kernel)(const void*), const void* begin, const void* end) {
  launch = static_cast<Launch*>(what);
  launch->kind = 0, launch->pc = nullptr, launch->bank_conflicts = 0;
  unit_begin = static_cast<const uint8_t*>(begin), unit_end = static_cast<const uint8_t*>(end);
  report.clear(), counts.clear();
  generator.seed(launch->seed);
  order = Order(launch->order);
  block.n_threads = launch->threads;
  block.n_warps = (block.n_threads + 31) / 32, block.n_warpgroups = (block.n_threads + 127) / 128;
  block.n_agents = block.n_threads + kMaxMbarriers + block.n_warpgroups;
  block.shared_bytes = launch->shared_bytes;
  begin_traps();
  try {
    begin_arrays();
    run_blocks(kernel);
    if (!launch->kind) end_arrays();
  } catch (const Failure&) {  // a report between two blocks
  }
  end_traps();
  self = nullptr;
  return report.c_str();
}

}  // namespace emu

// What the last launch executed: a line for each instruction, its name and how often, counted once
// for a warp or warpgroup where it is theirs.
extern "C" const char* emulated_counts() {
  static std::string text;
  text.clear();
  std::map<std::string, int64_t> by_name;
  for (const auto& [instruction, n] : emu::counts) by_name[instruction] += n;
  for (const auto& [instruction, n] : by_name)
    text += instruction + " " + std::to_string(n) + "\n";
  return text.c_str();
}
