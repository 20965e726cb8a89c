// Every load and store of the kernel: -fsanitize=thread makes the compiler call these functions,
// whose own library is not linked. And the traps that -fsanitize=undefined makes it set.
#include <signal.h>

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "global.h"
#include "launch.h"
#include "shared.h"

namespace emu {
namespace {

void check_watched(const uint8_t* p, int bytes, bool write) {
  for (const Range& r : self->watched)
    if (p < r.end && p + bytes > r.begin && (write || !r.readable))
      fail(Kind::in_flight, "thread %d %s registers that an unfinished wgmma works on", self->id,
           write ? "writes" : "reads");
}

// Whether it lies in the unit: constants that the compiler put into memory.
bool in_unit(const uint8_t* p) { return p >= unit_begin && p < unit_end; }

void on_access(const void* address, int bytes, bool write, const void* pc) {
  if (!self) return;
  const auto* p = static_cast<const uint8_t*>(address);
  if (on_stack(p)) {
    if (!self->watched.empty()) self->pc = pc, check_watched(p, bytes, write);
    return;
  }
  const Doing doing(write ? "store" : "load", pc);
  if (const size_t offset = p - block.shared; offset < kMaxSharedBytes) {
    if (offset + bytes > block.shared_bytes)
      fail(Kind::bounds, "thread %d: %s of %d bytes at shared memory +%zu; the block has %u bytes",
           self->id, self->op, bytes, offset, block.shared_bytes);
    if (bytes < int(kRecordBytes))
      fail(Kind::protocol, "%s of %d bytes in shared memory: kRecordBytes in shared.h must shrink",
           self->op, bytes);
    if (write)
      write_shared(uint32_t(offset), bytes, *self);
    else
      read_shared(uint32_t(offset), bytes, *self);
    return;
  }
  const auto* params = static_cast<const uint8_t*>(launch->params);
  if (!write && ((p >= params && p < params + launch->params_bytes) || in_unit(p))) return;
  if (write)
    write_global(p, bytes);
  else
    read_global(p, bytes);
}

}  // namespace
}  // namespace emu

#define HOOK(name, bytes, write)                                  \
  extern "C" void __tsan_##name(void* p) {                        \
    emu::on_access(p, bytes, write, __builtin_return_address(0)); \
  }
#define HOOKS(bytes) HOOK(read##bytes, bytes, false) HOOK(write##bytes, bytes, true)
#define UNALIGNED_HOOKS(bytes) \
  HOOK(unaligned_read##bytes, bytes, false) HOOK(unaligned_write##bytes, bytes, true)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
UNALIGNED_HOOKS(2)
UNALIGNED_HOOKS(4)
UNALIGNED_HOOKS(8)
UNALIGNED_HOOKS(16)
#undef UNALIGNED_HOOKS
#undef HOOKS
#undef HOOK
extern "C" void __tsan_read_range(void* p, size_t bytes) {
  emu::on_access(p, int(bytes), false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, size_t bytes) {
  emu::on_access(p, int(bytes), true, __builtin_return_address(0));
}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

namespace emu {
namespace {

struct sigaction before;  // what the process does at a trap

// `ud2`, which ends what C++ leaves undefined. Does not return to it, as reports never do.
void on_trap(int, siginfo_t* info, void*) {
  const auto* pc = static_cast<const uint8_t*>(info->si_addr);
  if (self && in_unit(pc))
    fail_at(pc + 1, Kind::undefined,
            "thread %d: an array index or a shift count out of range, an overflow, a division by "
            "zero, or a null or misaligned pointer",
            self->id);
  sigaction(SIGILL, &before, nullptr);
}

}  // namespace

void begin_traps() {
  struct sigaction ours {};
  ours.sa_sigaction = on_trap;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &ours, &before);
}

void end_traps() { sigaction(SIGILL, &before, nullptr); }

}  // namespace emu
