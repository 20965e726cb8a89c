// cp.async.bulk and cp.async.bulk.tensor: copies by an agent of their own.
//
// A load lands when no thread can go on, the latest possible moment, or at a random one. A store or
// reduction reads shared memory and writes global memory at its thread's wait.
#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "block.h"
#include "global.h"
#include "mbarrier.h"
#include "shared.h"
#include "swizzle.h"

namespace emu {
namespace {

struct Box {
  TensorMap map;
  int coords[5];

  int row_bytes() const { return map.box[0] * map.item_bytes; }
  int rows() const {
    int n = 1;
    for (int i = 1; i < map.rank; ++i) n *= map.box[i];
    return n;
  }
  int bytes() const { return rows() * row_bytes(); }

  // Where row `n` of the box is in global memory: at element coords[0]; null outside the tensor.
  const uint8_t* row(int n) const {
    const uint8_t* p = map.base + int64_t(coords[0]) * map.item_bytes;
    for (int i = 1; i < map.rank; ++i) {
      const int c = coords[i] + n % map.box[i];
      n /= map.box[i];
      if (c < 0 || c >= map.dims[i]) return nullptr;
      p += c * map.strides[i - 1];
    }
    return p;
  }
  // The elements of a row that exist: first .. end - 1, counted in the box.
  int first() const { return std::min(map.box[0], std::max(0, -coords[0])); }
  int end() const { return std::max(first(), std::min(map.box[0], map.dims[0] - coords[0])); }
};

struct Load {
  uint32_t offset;
  Box box;  // or, with `src`, `bytes` side by side
  const uint8_t* src;
  int bytes;
  uint32_t bar;
  const void* pc;
};

struct Store {
  uint32_t offset;
  int bytes;
  Box box;  // or, with `add`, floats side by side
  float* add;
  const void* pc;
};
struct Stores {  // of one thread
  std::vector<Store> open;
  std::deque<std::vector<Store>> groups;
};

std::deque<Load> loads;
std::vector<Stores> stores;
Moment agent_moment = 0;

Box make_box(const void* map, const int* coords, int rank, uint32_t offset) {
  Box box;
  memcpy(&box.map, map, sizeof box.map);
  memcpy(box.coords, coords, rank * sizeof(int));
  const TensorMap& m = box.map;
  if (m.rank != rank)
    fail(Kind::protocol, "%s of rank %d with a map of rank %d", self->op, rank, m.rank);
  if (reinterpret_cast<uintptr_t>(map) % 64)
    fail(Kind::protocol, "%s: the tensor map lies at %p, no multiple of 64", self->op, map);
  if (m.swizzle_bytes && box.row_bytes() != m.swizzle_bytes)
    fail(Kind::protocol, "%s: rows of %d bytes with a swizzle of %d; the emulator wants them equal",
         self->op, box.row_bytes(), m.swizzle_bytes);
  // No rule that we found written, but an H200 ends the kernel with an illegal instruction.
  if (coords[0] * m.item_bytes % 16)
    fail(Kind::protocol, "%s of a box that begins at column %d: no multiple of 16 bytes", self->op,
         coords[0]);
  // A pattern that starts elsewhere would be read with another permutation than it was written.
  const uint32_t pattern = 8 * m.swizzle_bytes;
  if (pattern && offset % pattern)
    fail(Kind::protocol,
         "%s at shared memory +%u, no multiple of %u, where a swizzle pattern starts", self->op,
         offset, pattern);
  return box;
}

void start_load(uint32_t offset, const Box& box, const uint8_t* src, int bytes, uint32_t bar) {
  check_mbarrier(bar);
  check_free(offset, bytes, *self);
  set_in_flight(offset, bytes);
  loads.push_back({offset, box, src, bytes, bar, self->pc});
  count(self->op);
}

void land_row(const Box& box, int n, uint32_t offset) {
  const uint8_t* row = box.row(n);
  const int item = box.map.item_bytes, first = row ? box.first() : 0, end = row ? box.end() : 0;
  if (end > first) read_global(row + first * item, (end - first) * item);
  for (int i = 0; i < box.map.box[0]; ++i) {
    uint8_t* to = block.shared + swizzle(offset + i * item, box.map.swizzle_bytes);
    if (i >= first && i < end)
      memcpy(to, row + i * item, item);
    else
      memset(to, 0, item);
  }
}

void start_store(const Store& store) {
  check_async_read(store.offset, store.bytes, *self);
  begin_async_read(store.offset, store.bytes);
  stores[self->id].open.push_back(store);
  count(self->op);
}

void finish_store(const Store& s) {
  if (s.add) {
    for (int i = 0; i < s.bytes / 4; ++i) {
      float x;
      memcpy(&x, block.shared + s.offset + 4 * i, 4);
      s.add[i] += x;
    }
  } else {
    const int item = s.box.map.item_bytes, row_bytes = s.box.row_bytes();
    for (int n = 0; n < s.box.rows(); ++n) {
      auto* row = const_cast<uint8_t*>(s.box.row(n));
      for (int i = s.box.first(); row && i < s.box.end(); ++i) {
        write_global(row + i * item, item);
        const uint32_t from = s.offset + n * row_bytes + i * item;
        memcpy(row + i * item, block.shared + swizzle(from, s.box.map.swizzle_bytes), item);
      }
    }
  }
  end_async_read(s.offset, s.bytes, self->id, self->seen[self->id]);
}

}  // namespace

void tensor_load(uint32_t dst, const void* map, const int* coords, int rank, uint32_t bar) {
  const Doing doing("cp.async.bulk.tensor load", __builtin_return_address(0));
  const Box box = make_box(map, coords, rank, shared_offset(dst, 16, 128));
  const int bytes = box.bytes();
  start_load(shared_offset(dst, bytes, 128), box, nullptr, bytes, bar);
}

void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  const Doing doing("cp.async.bulk load", __builtin_return_address(0));
  if (bytes <= 0 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail(Kind::protocol, "cp.async.bulk of %d bytes from %p: both must be multiples of 16", bytes,
         src);
  read_global(src, bytes);
  start_load(shared_offset(dst, bytes, 16), {}, static_cast<const uint8_t*>(src), bytes, bar);
}

bool land_one_load() {
  if (loads.empty()) return false;
  const size_t pick = order == Order::random ? random_below(uint32_t(loads.size()))
                      : order == Order::last ? loads.size() - 1
                                             : 0;
  const Load load = loads[pick];
  loads.erase(loads.begin() + pick);
  const auto [op, pc] = std::pair(self->op, self->pc);  // what is found now is the load's fault
  self->op = "a load that lands: cp.async.bulk", self->pc = load.pc;
  if (load.src)
    memcpy(block.shared + load.offset, load.src, load.bytes);
  else
    for (int n = 0; n < load.box.rows(); ++n)
      land_row(load.box, n, load.offset + n * load.box.row_bytes());
  const Moment moment = ++agent_moment;
  set_written(load.offset, load.bytes, agent_of(load.bar), moment, load.pc);
  land_bytes(load.bar, load.bytes, moment, load.pc);
  self->op = op, self->pc = pc;
  return true;
}

void tensor_store(const void* map, const int* coords, int rank, uint32_t src) {
  const Doing doing("cp.async.bulk.tensor store", __builtin_return_address(0));
  for (int i = 0; i < rank; ++i)
    if (coords[i] < 0)  // likewise an illegal instruction on an H200; loads may
      fail(Kind::protocol, "%s of a box that begins at %d of dimension %d", self->op, coords[i], i);
  const Box box = make_box(map, coords, rank, shared_offset(src, 16, 128));
  start_store({shared_offset(src, box.bytes(), 128), box.bytes(), box, nullptr, self->pc});
}

void bulk_reduce_add(float* dst, uint32_t src, int bytes) {
  const Doing doing("cp.reduce.async.bulk", __builtin_return_address(0));
  if (bytes <= 0 || bytes % 16 || reinterpret_cast<uintptr_t>(dst) % 16)
    fail(Kind::protocol, "cp.reduce.async.bulk of %d bytes to %p: both must be multiples of 16",
         bytes, static_cast<void*>(dst));
  add_global(dst, bytes);
  start_store({shared_offset(src, bytes, 16), bytes, {}, dst, self->pc});
}

void bulk_commit_group() {
  Stores& mine = stores[self->id];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

void bulk_wait_group(int pending) {
  const Doing doing("cp.async.bulk.wait_group", __builtin_return_address(0));
  auto& groups = stores[self->id].groups;
  for (; int(groups.size()) > pending; groups.pop_front())
    for (const Store& s : groups.front()) finish_store(s);
}

void begin_bulk() { loads.clear(), stores.assign(block.n_threads, {}), agent_moment = 0; }

void end_bulk() {
  if (!loads.empty())
    fail_at(loads.front().pc, Kind::protocol, "the block ends while a bulk load is under way");
  if (const void* pc = load_without_wait())  // it might have been, in another order
    fail_at(pc, Kind::protocol, "the block ends with a bulk load that nobody has waited for");
  for (const Stores& s : stores)
    if (!s.open.empty() || !s.groups.empty())
      fail_at(
          (s.groups.empty() ? s.open : s.groups.front()).front().pc, Kind::protocol,
          "the block ends while a bulk copy out of shared memory is under way: thread %d did not "
          "wait",
          int(&s - stores.data()));
}

}  // namespace emu
