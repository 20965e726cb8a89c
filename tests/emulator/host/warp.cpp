// What one instruction does to the 32 lanes of a warp. Fragment layouts: PTX ISA, "Warp-level
// matrix instructions", the sections on mma.m16n8k16, m16n8k8 and m8n8k4, and ldmatrix.
#include <cstring>

#include "block.h"
#include "float16.h"
#include "launch.h"
#include "shared.h"

namespace emu {
namespace {

template <class T>
T& lane(void* const* lanes, int i) {
  return *static_cast<T*>(lanes[i]);
}

struct Shuffle {
  uint64_t in, out;
  int mask;
};

struct Election {
  bool elected;
};

// Four 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
struct Matrices {
  uint32_t row;
  uint32_t* load_to;
  const uint32_t* store_from;
  const Thread* thread;
  bool trans;
};

struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  Half type;
};

double operand(double x) { return x; }
float operand(uint32_t tf32) { return bits<float>(tf32 & 0xffffe000); }

// Of 8 kHalves rows and 4 kSteps places of k; of TF32 and float64.
template <class T, class Accumulator, int kHalves, int kSteps> struct WideMma {
  Accumulator* d;
  const T *a, *b;

  static void perform(void* const* lanes) {
    Accumulator d[kHalves][8][8];
    for (int i = 0; i < 32; ++i)
      for (int h = 0; h < kHalves; ++h)
        for (int j = 0; j < 2; ++j)
          d[h][i / 4][i % 4 * 2 + j] = lane<WideMma>(lanes, i).d[2 * h + j];
    for (int k = 0; k < 4 * kSteps; ++k)
      for (int h = 0; h < kHalves; ++h)
        for (int m = 0; m < 8; ++m)
          for (int n = 0; n < 8; ++n)
            d[h][m][n] += operand(lane<WideMma>(lanes, 4 * m + k % 4).a[k / 4 * kHalves + h]) *
                          operand(lane<WideMma>(lanes, 4 * n + k % 4).b[k / 4]);
    for (int i = 0; i < 32; ++i)
      for (int h = 0; h < kHalves; ++h)
        for (int j = 0; j < 2; ++j)
          lane<WideMma>(lanes, i).d[2 * h + j] = d[h][i / 4][i % 4 * 2 + j];
  }
};

// Rows of 16 bytes in the same group of four banks are served one after another.
void count_conflicts(void* const* lanes, int matrix) {
  uint32_t groups = 0;
  for (int i = 0; i < 8; ++i) groups |= 1u << (lane<Matrices>(lanes, 8 * matrix + i).row >> 4) % 8;
  launch->bank_conflicts += 8 - __builtin_popcount(groups);
}

// Element h of lane i's register in a matrix.
uint16_t& element(uint16_t (&x)[8][8], int i, int h, bool trans) {
  const int row = i / 4, col = i % 4 * 2 + h;
  return trans ? x[col][row] : x[row][col];
}

void perform_ldmatrix(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    uint16_t x[8][8];
    for (int i = 0; i < 8; ++i) {
      const auto& from = lane<Matrices>(lanes, 8 * m + i);
      const uint32_t offset = shared_offset(from.row, 16, 16);
      read_shared(offset, 16, *from.thread);
      memcpy(x[i], block.shared + offset, 16);
    }
    count_conflicts(lanes, m);
    for (int i = 0; i < 32; ++i) {
      const auto& to = lane<Matrices>(lanes, i);
      to.load_to[m] = element(x, i, 0, to.trans) | uint32_t(element(x, i, 1, to.trans)) << 16;
    }
  }
}

void perform_stmatrix(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    uint16_t x[8][8];
    for (int i = 0; i < 32; ++i) {
      const auto& from = lane<Matrices>(lanes, i);
      for (int h = 0; h < 2; ++h)
        element(x, i, h, from.trans) = uint16_t(from.store_from[m] >> 16 * h);
    }
    for (int i = 0; i < 8; ++i) {
      const auto& to = lane<Matrices>(lanes, 8 * m + i);
      const uint32_t offset = shared_offset(to.row, 16, 16);
      write_shared(offset, 16, *to.thread);
      memcpy(block.shared + offset, x[i], 16);
    }
    count_conflicts(lanes, m);
  }
}

void perform_mma(void* const* lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < 32; ++i) {
    const auto& mine = lane<Mma>(lanes, i);
    const int g = i / 4, t = i % 4 * 2;
    for (int h = 0; h < 2; ++h) {
      for (int j = 0; j < 4; ++j)
        a[g + j % 2 * 8][t + j / 2 * 8 + h] = widen(uint16_t(mine.a[j] >> 16 * h), mine.type);
      for (int j = 0; j < 2; ++j)
        b[t + 8 * j + h][g] = widen(uint16_t(mine.b[j] >> 16 * h), mine.type);
    }
    for (int j = 0; j < 4; ++j) d[g + j / 2 * 8][t + j % 2] = mine.d[j];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int i = 0; i < 32; ++i)
    for (int j = 0; j < 4; ++j) lane<Mma>(lanes, i).d[j] = d[i / 4 + j / 2 * 8][i % 4 * 2 + j % 2];
}

}  // namespace

uint32_t pack(float lo, float hi, Half type) {
  return narrow(lo, type) | uint32_t(narrow(hi, type)) << 16;
}

uint64_t shfl_bfly(uint64_t bits, int lane_mask) {
  const Doing doing("shfl.sync.bfly", __builtin_return_address(0));
  Shuffle mine{bits, 0, lane_mask};
  meet(32, &mine, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i)
      lane<Shuffle>(lanes, i).out =
          lane<Shuffle>(lanes, (i ^ lane<Shuffle>(lanes, i).mask) & 31).in;
  });
  return mine.out;
}

int shfl_idx(int x, int lane_number) {
  const Doing doing("shfl.sync.idx", __builtin_return_address(0));
  Shuffle mine{uint64_t(uint32_t(x)), 0, lane_number};
  meet(32, &mine, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i)
      lane<Shuffle>(lanes, i).out = lane<Shuffle>(lanes, lane<Shuffle>(lanes, i).mask & 31).in;
  });
  return int(mine.out);
}

bool vote_any(bool x) {
  const Doing doing("vote.sync.any", __builtin_return_address(0));
  meet(32, &x, [](void* const* lanes) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= lane<bool>(lanes, i);
    for (int i = 0; i < 32; ++i) lane<bool>(lanes, i) = any;
  });
  return x;
}

uint32_t vote_ballot(bool x) {
  const Doing doing("vote.sync.ballot", __builtin_return_address(0));
  uint32_t mine = x;
  meet(32, &mine, [](void* const* lanes) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= lane<uint32_t>(lanes, i) << i;
    for (int i = 0; i < 32; ++i) lane<uint32_t>(lanes, i) = votes;
  });
  return mine;
}

// Any lane may be elected, but always the same one.
bool elect_sync() {
  const Doing doing("elect.sync", __builtin_return_address(0));
  Election mine{false};
  meet(32, &mine, [](void* const* lanes) {
    const int leader = order == Order::first ? 0 : order == Order::last ? 31 : launch->seed & 31;
    lane<Election>(lanes, leader).elected = true;
  });
  return mine.elected;
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row, bool trans) {
  const Doing doing(trans ? "ldmatrix.x4.trans" : "ldmatrix.x4", __builtin_return_address(0));
  Matrices mine{row, r, nullptr, self, trans};
  meet(32, &mine, perform_ldmatrix);
}

void stmatrix_x4(uint32_t row, const uint32_t (&r)[4], bool trans) {
  const Doing doing(trans ? "stmatrix.x4.trans" : "stmatrix.x4", __builtin_return_address(0));
  Matrices mine{row, nullptr, r, self, trans};
  meet(32, &mine, perform_stmatrix);
}

void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Half type) {
  const Doing doing("mma.m16n8k16", __builtin_return_address(0));
  Mma mine{d, a, {b0, b1}, type};
  meet(32, &mine, perform_mma);
}

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const Doing doing("mma.m16n8k8.tf32", __builtin_return_address(0));
  WideMma<uint32_t, float, 2, 2> mine{d, a, b};
  meet(32, &mine, mine.perform);
}

void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  const Doing doing("mma.m16n8k8.f64", __builtin_return_address(0));
  WideMma<double, double, 2, 2> mine{d, a, b};
  meet(32, &mine, mine.perform);
}

void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  const Doing doing("mma.m8n8k4.f64", __builtin_return_address(0));
  WideMma<double, double, 1, 1> mine{d, &a, &b};
  meet(32, &mine, mine.perform);
}

void ld_shared(void* to, uint32_t address, int bytes) {
  const Doing doing("ld.shared", __builtin_return_address(0));
  const uint32_t offset = shared_offset(address, bytes, bytes);
  read_shared(offset, bytes, *self);
  memcpy(to, block.shared + offset, bytes);
}

}  // namespace emu
