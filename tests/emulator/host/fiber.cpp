// Fibers and the scheduler.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "block.h"
#include "launch.h"

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

namespace emu {

Block block;
Thread* self = nullptr;
Order order = Order::first;

namespace {

constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
constexpr size_t kFrameBytes = 16 << 10;  // what a kernel needs of it

void* main_stack_pointer = nullptr;
std::vector<int> ready;  // from ready_head on: threads that can run
size_t ready_head = 0;
int n_running = 0;
void (*the_kernel)(const void*) = nullptr;
const void* the_params = nullptr;

void switch_to(void** save, Thread* thread) {
  self = thread;
  emu_switch(save, thread ? thread->stack_pointer : main_stack_pointer);
}

Thread* next_thread() {
  if (order == Order::random && random_below(16) == 0) land_one_load();
  while (ready_head == ready.size())
    if (n_running == 0 || !land_one_load()) return nullptr;
  size_t pick = ready_head;
  if (order == Order::last) pick = ready.size() - 1;
  if (order == Order::random) pick += random_below(ready.size() - ready_head);
  std::swap(ready[ready_head], ready[pick]);
  Thread* thread = &block.threads[ready[ready_head++]];
  if (ready_head > 4096) {
    ready.erase(ready.begin(), ready.begin() + ready_head);
    ready_head = 0;
  }
  return thread;
}

[[noreturn]] void fail_deadlock() {
  struct Place {
    int n = 0, first = 0, last = 0;
  };
  std::map<std::pair<const void*, std::string>, Place> stuck;
  for (int i = 0; i < block.n_threads; ++i) {
    const Thread& t = block.threads[i];
    if (!t.waits) continue;
    Place& place = stuck[{t.pc, t.op}];
    if (place.n++ == 0) place.first = t.id;
    place.last = t.id;
  }
  std::string text;
  for (auto& [at, place] : stuck) {
    char line[256];
    snprintf(line, sizeof line, "\n  %d of threads %d..%d wait at %s @%p", place.n, place.first,
             place.last, at.second.c_str(), at.first);
    text += line;
  }
  fail(Kind::deadlock, "deadlock in block (%d, %d, %d):%s", block.index.x, block.index.y,
       block.index.z, text.c_str());
}

void leave() {
  Thread* me = self;
  Thread* next = next_thread();
  if (next == me) return;
  if (!next && n_running > 0) fail_deadlock();
  switch_to(&me->stack_pointer, next);
}

void thread_main() {
  the_kernel(the_params);
  --n_running;
  leave();
  __builtin_unreachable();
}

void prepare(Thread& thread) {
  if (!thread.stack) {
    thread.stack = static_cast<uint8_t*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(thread.stack, kGuardBytes,
             PROT_NONE);  // a crash instead of another thread's variables
  }
  // Variables that nobody initialises are NaNs.
  memset(thread.stack + kStackBytes - kFrameBytes, 0xff, kFrameBytes);
  auto** top = reinterpret_cast<void**>(thread.stack + kStackBytes - 64);
  *--top = nullptr;  // the ABI wants rsp % 16 == 8 at a function's first instruction
  *--top = reinterpret_cast<void*>(&thread_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // what emu_switch pops
  thread.stack_pointer = top;
}

}  // namespace

void wait() {
  self->waits = true;
  leave();
}

void wake(Thread& thread) {
  thread.waits = false;
  ready.push_back(thread.id);
}

bool on_stack(const void* p) {
  return size_t(static_cast<const uint8_t*>(p) - self->stack) < kStackBytes;
}

void abandon_block() { switch_to(&self->stack_pointer, nullptr); }

void run_block(void (*kernel)(const void*), const void* params) {
  the_kernel = kernel, the_params = params;
  ready.clear(), ready_head = 0, n_running = block.n_threads;
  if (int(block.threads.size()) < block.n_threads) block.threads.resize(block.n_threads);
  for (int i = 0; i < block.n_threads; ++i) {
    Thread& t = block.threads[i];
    t.id = i, t.waits = false, t.op = "start", t.pc = nullptr, t.fenced = 0;
    t.watched.clear();
    t.seen.assign(block.n_agents, 0), t.seen[i] = 1;
    prepare(t);
    wake(t);
  }
  switch_to(&main_stack_pointer, next_thread());
}

void join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void release_to(Clock& clock, Thread& thread) {
  if (clock.empty()) clock.assign(block.n_agents, 0);
  join(clock, thread.seen);
  ++thread.seen[thread.id];
}

void acquire(Thread& thread, const Clock& clock) {
  if (!clock.empty()) join(thread.seen, clock);
}

}  // namespace emu
