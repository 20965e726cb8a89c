// lse and D of a query tile in shared memory.
#pragma once
#include "attn/backward_rows.cuh"
#include "base/math.cuh"
#include "ptx/cp_async.cuh"
#include "tile/swizzled_tile.cuh"

struct RowNumbers {
  static constexpr int kBytes = 2 * kBlockM * int(sizeof(Real));
  static_assert(2 * kBlockM <= kThreads * kRealVec, "a thread copies 16 bytes at most");

  Real *lse, *delta;

  DEVICE explicit RowNumbers(u32 smem) : lse(&shared<Real>(smem)), delta(lse + kBlockM) {}

  // A part of a group of copies. The workspace has rows past a head's end.
  DEVICE void load_async(const BackwardRows& rows, int row0) const {
    const int i = ptx::tid_x() * kRealVec;
    if (i >= 2 * kBlockM) return;
    const Real* from = i < kBlockM ? rows.lse + i : rows.delta + (i - kBlockM);
    ptx::cp_async_cg_16(ptx::smem_address(lse + i), from + row0, 16);
  }

  // Whether one of the rows whose lse this thread has loaded sees no key.
  DEVICE bool finds_empty_row() const {
    const int i = ptx::tid_x() * kRealVec;
    bool found = false;
    if (i < kBlockM) {
      const auto run = *reinterpret_cast<const Vec<Real, kRealVec>*>(lse + i);
#pragma unroll
      for (int e = 0; e < kRealVec; ++e) found |= run.x[e] == infinity();
    }
    return found;
  }

  DEVICE bool is_empty(int row) const { return lse[row] == infinity(); }
};
