// lse and D of a query tile in shared memory, and of float32 whether its rows split.
#pragma once
#include "attn/backward_rows.cuh"
#include "base/math.cuh"
#include "ptx/cp_async.cuh"
#include "tile/swizzled_tile.cuh"

struct RowNumbers {
  static constexpr int kKinds = kDType == kFloat32 ? 3 : 2;
  static constexpr int kBytes = kKinds * kBlockM * int(sizeof(Real));
  static_assert(kKinds * kBlockM <= kThreads * kRealVec);

  Real *lse, *delta, *splits;

  DEVICE explicit RowNumbers(u32 smem)
      : lse(&shared<Real>(smem)), delta(lse + kBlockM), splits(delta + kBlockM) {}

  // A part of a group of copies. Rows past the end of a head are there.
  DEVICE void load_async(const BackwardRows& rows, int row0) const {
    const int i = ptx::tid_x() * kRealVec;
    if (i >= kKinds * kBlockM) return;
    const Real* from = i < kBlockM       ? rows.lse + i
                       : i < 2 * kBlockM ? rows.delta + (i - kBlockM)
                                         : rows.splits + (i - 2 * kBlockM);
    ptx::cp_async_cg_16(ptx::smem_address(lse + i), from + row0, 16);
  }

  // Whether one of the rows whose lse this thread has loaded sees no key.
  DEVICE bool finds_empty_row() const { return finds(infinity(), 0); }
  // Whether one of the rows of which this thread has loaded it does not split.
  DEVICE bool finds_unsplit_row() const { return finds(0, 2 * kBlockM); }

  DEVICE bool is_empty(int row) const { return lse[row] == infinity(); }

 private:
  // Whether this thread has loaded a number from those of one kind, which begin at `first`.
  DEVICE bool finds(Real number, int first) const {
    const int i = ptx::tid_x() * kRealVec;
    bool found = false;
    if (i >= first && i < first + kBlockM) {
      const auto run = *reinterpret_cast<const Vec<Real, kRealVec>*>(lse + i);
#pragma unroll
      for (int e = 0; e < kRealVec; ++e) found |= run.x[e] == number;
    }
    return found;
  }
};
