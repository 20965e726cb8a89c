// Which bytes of global memory a kernel may touch, and how.
#include "global.h"

#include <algorithm>
#include <cmath>

#include "block.h"
#include "launch.h"

namespace emu {
namespace {

std::vector<std::vector<uint8_t>> written;  // by array, by byte; empty for inputs
// Of scratch memory, by array, by byte: 1 + the number, in the launch, of the thread that wrote it
// first; 0: nobody.
std::vector<std::vector<int64_t>> owner;

// How many bytes from `p` on belong to elements of the view and lie side by side; 0: none.
int64_t run_at(const Array& a, const uint8_t* p) {
  int64_t offset = p - a.base, run = a.item_bytes;
  if (offset < 0 || offset >= a.bytes) return 0;
  for (int i = 0; i < a.rank; ++i) {
    const int64_t k = std::min(offset / a.strides[i], a.shape[i] - 1);
    offset -= k * a.strides[i];
    if (i == a.rank - 1 && a.strides[i] == a.item_bytes) run = (a.shape[i] - k) * a.item_bytes;
  }
  return offset < a.item_bytes ? run - offset : 0;
}

bool contains(const Array& a, const uint8_t* p, int bytes) {
  while (bytes > 0) {
    const int64_t run = run_at(a, p);
    if (run <= 0) return false;
    p += run, bytes -= int(std::min<int64_t>(run, bytes));
  }
  return true;
}

[[noreturn]] void fail_outside(const uint8_t* p, int bytes) {
  const Array* nearest = nullptr;
  int64_t least = 1 << 20;
  for (int i = 0; i < launch->n_arrays; ++i) {
    const Array& a = launch->arrays[i];
    const int64_t offset = p - a.base;
    const int64_t distance = offset < 0 ? -offset : std::max<int64_t>(0, offset - a.bytes);
    if (distance < least) least = distance, nearest = &a;
  }
  if (!nearest)
    fail(Kind::bounds, "thread %d: %s of %d bytes at %p, which is near no array of the launch",
         self->id, self->op, bytes, p);
  fail(Kind::bounds,
       "thread %d: %s of %d bytes at %+lld of %s, which spans %lld bytes: they are not "
       "all elements of it",
       self->id, self->op, bytes, (long long)(p - nearest->base), nearest->name,
       (long long)nearest->bytes);
}

void touch_own(const Array& a, int64_t* owners, const uint8_t* p, int bytes, Access access) {
  const Dim3 b = block.index;
  const int32_t* grid = launch->grid;
  const int64_t block_number = b.x + grid[0] * (b.y + int64_t(grid[1]) * b.z);
  const int64_t me = 1 + block_number * block.n_threads + self->id;
  for (int i = 0; i < bytes; ++i) {
    if (owners[i] == me) continue;
    const long long at = p + i - a.base;
    if (owners[i])
      fail(Kind::output, "thread %d: %s of %s at %+lld, which is another thread's", self->id,
           self->op, a.name, at);
    if (access == Access::read)
      fail(Kind::unwritten, "thread %d: %s of %s at %+lld, which nobody has written", self->id,
           self->op, a.name, at);
    owners[i] = me;
  }
}

void touch(const void* address, int bytes, Access access) {
  if (!launch->checked) return;
  const auto* p = static_cast<const uint8_t*>(address);
  for (int i = 0; i < launch->n_arrays; ++i) {
    const Array& a = launch->arrays[i];
    if (p < a.base || p >= a.base + a.bytes || !contains(a, p, bytes)) continue;
    if (a.access == Access::thread_own && access != Access::add) {
      touch_own(a, owner[i].data() + (p - a.base), p, bytes, access);
      return;
    }
    if (access == Access::read && a.access != Access::add) {
      for (int b = 0; b < bytes && a.access == Access::write_once; ++b)
        if (!written[i][p - a.base + b])
          fail(Kind::unwritten, "thread %d: %s of %s at %+lld, which nobody has written", self->id,
               self->op, a.name, (long long)(p - a.base + b));
      return;
    }
    if (access != a.access)
      fail(Kind::output, "thread %d: %s touches %s, which is %s", self->id, self->op, a.name,
           a.access == Access::read         ? "an input"
           : a.access == Access::write_once ? "an output, to be stored"
           : a.access == Access::thread_own ? "scratch memory"
                                            : "a sum, to be added to atomically");
    if (access == Access::add) return;
    for (int b = 0; b < bytes; ++b)
      if (written[i][p - a.base + b]++)
        fail(Kind::output, "thread %d writes %s for the second time at %+lld", self->id, a.name,
             (long long)(p - a.base + b));
    return;
  }
  fail_outside(p, bytes);
}

}  // namespace

void read_global(const void* p, int bytes) { touch(p, bytes, Access::read); }
void write_global(const void* p, int bytes) { touch(p, bytes, Access::write_once); }
void add_global(const void* p, int bytes) { touch(p, bytes, Access::add); }

// Blocks run one after another, and a fiber does not stop here: it is in one piece.
uint32_t atom_inc(uint32_t* count_at, uint32_t last) {
  const Doing doing("atom.inc", __builtin_return_address(0));
  if (reinterpret_cast<uintptr_t>(count_at) % sizeof *count_at)
    fail(Kind::protocol, "atom.inc at %p: not a multiple of 4", static_cast<void*>(count_at));
  add_global(count_at, sizeof *count_at);
  count("atom.inc");
  const uint32_t before = *count_at;
  *count_at = before >= last ? 0 : before + 1;
  return before;
}

namespace {

float without_denormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? x * 0 : x; }

template <class T>
void check_red(const T* to, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes)
    fail(Kind::protocol, "red.add at %p: not a multiple of %d", static_cast<const void*>(to),
         bytes);
  add_global(to, bytes);
  count("red.add");
}

}  // namespace

void red_add(float* to, const float* x, int n) {
  const Doing doing("red.add", __builtin_return_address(0));
  check_red(to, n * int(sizeof *to));
  for (int i = 0; i < n; ++i)
    to[i] = without_denormal(without_denormal(to[i]) + without_denormal(x[i]));
}

void red_add(double* to, double x) {
  const Doing doing("red.add", __builtin_return_address(0));
  check_red(to, int(sizeof *to));
  *to += x;
}

void begin_arrays() {
  written.assign(launch->n_arrays, {});
  owner.assign(launch->n_arrays, {});
  for (int i = 0; i < launch->n_arrays; ++i) {
    const Array& a = launch->arrays[i];
    if (a.access == Access::write_once) written[i].resize(a.bytes);
    if (a.access == Access::thread_own) owner[i].resize(a.bytes);
  }
}

void end_arrays() {
  for (int i = 0; i < launch->n_arrays; ++i) {
    const Array& a = launch->arrays[i];
    if (a.access != Access::write_once || !launch->checked) continue;
    int64_t due = a.bytes ? a.item_bytes : 0, done = 0;
    for (int d = 0; d < a.rank; ++d) due *= a.shape[d];
    for (const uint8_t w : written[i]) done += w;
    if (done != due)
      fail(Kind::output, "%lld of the %lld bytes of %s were never written", (long long)(due - done),
           (long long)due, a.name);
  }
}

}  // namespace emu
