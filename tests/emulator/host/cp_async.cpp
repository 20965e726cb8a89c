// cp.async: the bytes land at the thread's own wait, the latest moment that the ISA allows.
#include <cstring>
#include <deque>

#include "block.h"
#include "global.h"
#include "shared.h"

namespace emu {
namespace {

struct Copy {
  uint32_t offset;
  const void* src;
  int bytes, src_bytes;
  const void* pc;
};
struct Copies {  // of one thread
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

std::vector<Copies> copies;

}  // namespace

void cp_async(uint32_t dst, const void* src, int bytes, int src_bytes) {
  const Doing doing("cp.async", __builtin_return_address(0));
  if (src_bytes < 0 || src_bytes > bytes)
    fail(Kind::protocol, "cp.async of %d out of %d bytes", src_bytes, bytes);
  const uint32_t offset = shared_offset(dst, bytes, bytes);
  if (src_bytes) {
    read_global(src, src_bytes);
    if (reinterpret_cast<uintptr_t>(src) % bytes)
      fail(Kind::protocol, "cp.async: the source %p is no multiple of %d", src, bytes);
  }
  check_free(offset, bytes, *self);
  set_in_flight(offset, bytes);
  copies[self->id].open.push_back({offset, src, bytes, src_bytes, self->pc});
  count("cp.async");
}

void cp_async_commit_group() {
  Copies& mine = copies[self->id];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

void cp_async_wait_group(int pending) {
  auto& groups = copies[self->id].groups;
  for (; int(groups.size()) > pending; groups.pop_front())
    for (const Copy& c : groups.front()) {
      if (c.src_bytes) memcpy(block.shared + c.offset, c.src, c.src_bytes);
      memset(block.shared + c.offset + c.src_bytes, 0, c.bytes - c.src_bytes);
      set_written(c.offset, c.bytes, self->id, self->seen[self->id], c.pc);
    }
}

void begin_cp_async() { copies.assign(block.n_threads, {}); }

void end_cp_async() {
  for (const Copies& c : copies) {
    const std::vector<Copy>* left = c.open.empty() ? nullptr : &c.open;
    for (const auto& group : c.groups)
      if (!group.empty()) left = &group;
    if (left)
      fail_at(left->front().pc, Kind::protocol,
              "the block ends while a cp.async of thread %d is under way", int(&c - copies.data()));
  }
}

}  // namespace emu
