// wgmma.mma_async (PTX ISA, "Asynchronous warpgroup-level matrix instructions").
//
// From its issue to its wait an operation owns its registers, which hold NaNs meanwhile, and reads
// its operands in shared memory; what it computes appears at the wait.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>

#include "block.h"
#include "float16.h"
#include "shared.h"
#include "swizzle.h"

namespace emu {
namespace {

constexpr int kSize = 128;                 // threads of a warpgroup
constexpr uint32_t kNobodys = 0x7fc0dead;  // a NaN

// A matrix in shared memory, as a descriptor gives it (PTX ISA, "Matrix descriptor format"). In
// K-major order a row [k] lies in one piece, in MN-major order a column [mn].
struct Operand {
  uint32_t start, leading, stride;  // bytes
  int width;                        // of the swizzle, bytes
  bool mn_major;

  Operand(uint64_t descriptor, bool mn_major)
      : start(uint32_t(descriptor & 0x3fff) << 4),
        leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride(uint32_t(descriptor >> 32 & 0x3fff) << 4),
        width(descriptor >> 62 == 1 ? 128 : 64),
        mn_major(mn_major) {
    if (descriptor >> 62 != 1 && descriptor >> 62 != 2)
      fail(Kind::protocol,
           "wgmma descriptor %016llx: the emulator knows the swizzles of 128 and 64 bytes",
           (unsigned long long)descriptor);
    if (descriptor & 0x3fffc000c000c000)
      fail(Kind::protocol, "wgmma descriptor %016llx: base offset and reserved bits must be 0",
           (unsigned long long)descriptor);
    if (start % (8 * width) >= uint32_t(width))
      fail(Kind::protocol, "wgmma operand at +%u: not in the first row of a swizzle pattern",
           start - kWindow);
  }

  // Address of element (mn, k).
  uint32_t address(int mn, int k) const {
    const int per_row = width / 2;
    const uint32_t plain = mn_major ? start + mn / per_row * leading + k / 8 * stride +
                                          k % 8 * width + mn % per_row * 2
                                    : start + mn / 8 * stride + mn % 8 * width + k * 2;
    return swizzle(plain, width);
  }
  uint32_t offset(int mn, int k, int bytes) const {
    return shared_offset(address(mn, k), bytes, bytes);
  }

  template <class Visit>
  void each_chunk(int rows, Visit visit) const {  // of 16 bytes
    for (int mn = 0; mn < rows; mn += mn_major ? 8 : 1)
      for (int k = 0; k < 16; k += mn_major ? 1 : 8) visit(offset(mn, k, 16));
  }
  template <class Put>
  void read(int rows, Half type, Put put) const {
    for (int mn = 0; mn < rows; ++mn)
      for (int k = 0; k < 16; ++k) {
        uint16_t x;
        memcpy(&x, block.shared + offset(mn, k, 2), 2);
        put(mn, k, widen(x, type));
      }
  }
};

struct Operation {
  Wgmma op;  // of the first thread
  std::array<float (*)[4], kSize> d;
  std::array<const uint32_t*, kSize> a;
  std::array<std::array<uint32_t, 4>, kSize> a_issued;
  const void* pc;
};

struct Accumulator {
  std::vector<float> value;  // a matrix of 64 rows
  int users = 0;             // unfinished operations
};

struct Warpgroup {
  std::vector<Operation> open;
  std::deque<std::vector<Operation>> groups;
  std::map<float (*)[4], Accumulator> accumulators;  // by the first thread's registers
  Moment moment = 0;
};

// Row and column of register i of a thread's accumulators, and of half h of A register j: PTX ISA,
// "Register fragments for wgmma.mma_async.m64nNk16".
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8; }
int col_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

std::vector<Warpgroup> all_groups;
std::vector<bool> fenced;  // by thread: since its last commit

void watch(Thread& thread, const void* p, size_t bytes, bool readable) {
  const auto* begin = static_cast<const uint8_t*>(p);
  thread.watched.push_back({begin, begin + bytes, readable});
}
void unwatch(Thread& thread, const void* p) {
  auto& all = thread.watched;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].begin == p) {
      all.erase(all.begin() + i);
      return;
    }
}

void begin_operand(const Operand& operand, int rows, const Thread* threads) {
  operand.each_chunk(rows, [&](uint32_t offset) {
    for (int warp = 0; warp < 4; ++warp) check_async_read(offset, 16, threads[32 * warp]);
    begin_async_read(offset, 16);
  });
}

void issue(void* const* lanes) {
  const int group = self->id / kSize;
  Warpgroup& g = all_groups[group];
  Thread* threads = &block.threads[group * kSize];
  Operation operation{*static_cast<const Wgmma*>(lanes[0]), {}, {}, {}, self->pc};
  const Wgmma& op = operation.op;
  Accumulator& acc = g.accumulators[op.d];
  acc.value.resize(64 * 8 * op.tiles);
  for (int t = 0; t < kSize; ++t) {
    const auto& mine = *static_cast<const Wgmma*>(lanes[t]);
    if (mine.a_descriptor != op.a_descriptor || mine.b_descriptor != op.b_descriptor ||
        mine.scale_d != op.scale_d)
      fail(Kind::divergence, "wgmma: threads %d and %d disagree about descriptors or scale-d",
           threads[0].id, threads[t].id);
    operation.d[t] = mine.d, operation.a[t] = mine.a_registers;
    if (mine.a_registers) {
      memcpy(&operation.a_issued[t], mine.a_registers, 16);
      watch(threads[t], mine.a_registers, 16, true);
    }
    if (acc.users) continue;
    for (int i = 0; i < 4 * op.tiles; ++i) {
      acc.value[row_of(t, i) * 8 * op.tiles + col_of(t, i)] = mine.d[i / 4][i % 4];
      memcpy(&mine.d[i / 4][i % 4], &kNobodys, 4);
    }
    watch(threads[t], mine.d, 16 * op.tiles, false);
  }
  ++acc.users;
  begin_operand({op.b_descriptor, op.trans_b}, 8 * op.tiles, threads);
  if (!op.a_registers) begin_operand({op.a_descriptor, op.trans_a}, 64, threads);
  g.open.push_back(operation);
}

void multiply(const Operation& o, std::vector<float>& value) {
  static float a[64][16], b[16][256];
  const Wgmma& op = o.op;
  Operand(op.b_descriptor, op.trans_b).read(8 * op.tiles, op.type, [](int n, int k, float x) {
    b[k][n] = x;
  });
  if (op.a_registers) {
    for (int t = 0; t < kSize; ++t)
      for (int j = 0; j < 4; ++j)
        for (int h = 0; h < 2; ++h)
          a[row_of(t, j % 2 * 2)][t % 4 * 2 + j / 2 * 8 + h] =
              widen(uint16_t(o.a[t][j] >> 16 * h), op.type);
  } else {
    Operand(op.a_descriptor, op.trans_a).read(64, op.type, [](int m, int k, float x) {
      a[m][k] = x;
    });
  }
  const int cols = 8 * op.tiles;
  for (int m = 0; m < 64; ++m) {
    float* d = &value[m * cols];
    if (!op.scale_d) std::fill_n(d, cols, 0.f);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < cols; ++n) d[n] += a[m][k] * b[k][n];
  }
}

void finish(Warpgroup& g, const Operation& o, int group) {
  const Wgmma& op = o.op;
  Thread* threads = &block.threads[group * kSize];
  for (int t = 0; op.a_registers && t < kSize; ++t) {
    unwatch(threads[t], o.a[t]);
    if (memcmp(o.a[t], &o.a_issued[t], 16))
      fail_at(o.pc, Kind::in_flight, "thread %d changed the A registers of an unfinished wgmma",
              threads[t].id);
  }
  const auto found = g.accumulators.find(op.d);
  Accumulator& acc = found->second;
  multiply(o, acc.value);
  const auto end_operand = [&](const Operand& operand, int rows) {
    operand.each_chunk(
        rows, [&](uint32_t offset) { end_async_read(offset, 16, wgmma_agent(group), g.moment); });
  };
  end_operand({op.b_descriptor, op.trans_b}, 8 * op.tiles);
  if (!op.a_registers) end_operand({op.a_descriptor, op.trans_a}, 64);
  if (--acc.users) return;
  for (int t = 0; t < kSize; ++t) {
    unwatch(threads[t], o.d[t]);
    for (int i = 0; i < 4 * op.tiles; ++i) {
      if (memcmp(&o.d[t][i / 4][i % 4], &kNobodys, 4))
        fail_at(o.pc, Kind::in_flight, "thread %d changed an accumulator of an unfinished wgmma",
                threads[t].id);
      o.d[t][i / 4][i % 4] = acc.value[row_of(t, i) * 8 * op.tiles + col_of(t, i)];
    }
  }
  g.accumulators.erase(found);
}

}  // namespace

// By the ISA needed before the first wgmma and after any change of registers; by our rule before
// every product, since the compiler puts one in where it thinks one is missing, and worse.
void wgmma_fence() { fenced[self->id] = true; }

void wgmma_issue(const Wgmma& op) {
  const Doing doing("wgmma.mma_async", __builtin_return_address(0));
  if (!fenced[self->id])
    fail(Kind::protocol, "thread %d issues a wgmma with no wgmma.fence since its last commit",
         self->id);
  Wgmma mine = op;
  meet(kSize, &mine, issue);
}

void wgmma_commit_group() {
  const Doing doing("wgmma.commit_group", __builtin_return_address(0));
  fenced[self->id] = false;
  meet(kSize, nullptr, [](void* const*) {
    Warpgroup& g = all_groups[self->id / kSize];
    g.groups.push_back(std::move(g.open));
    g.open.clear();
  });
}

void wgmma_wait_group(int pending) {
  const Doing doing("wgmma.wait_group", __builtin_return_address(0));
  meet(kSize, &pending, [](void* const* lanes) {
    const int group = self->id / kSize, pending = *static_cast<int*>(lanes[0]);
    Warpgroup& g = all_groups[group];
    for (; int(g.groups.size()) > pending; g.groups.pop_front()) {
      ++g.moment;
      for (const Operation& o : g.groups.front()) finish(g, o, group);
    }
    for (int t = 0; t < kSize; ++t)
      block.threads[group * kSize + t].seen[wgmma_agent(group)] = g.moment;
  });
}

void begin_wgmma() {
  all_groups.assign(block.n_warpgroups, {});
  fenced.assign(block.n_threads, false);
}

void end_wgmma() {
  for (const Warpgroup& g : all_groups)
    if (!g.open.empty() || !g.groups.empty())
      fail_at((g.open.empty() ? g.groups.front().front() : g.open.front()).pc, Kind::protocol,
              "the block ends with a wgmma that nobody waited for");
}

}  // namespace emu
