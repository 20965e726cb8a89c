// Register fragments of float64 mma.sync and the two matrix products of attention on them.
//
// The instruction takes four numbers of k from each lane, k = lane % 4 + 4 i, but a sum has no order:
// both operands hold other numbers in these places, such that a lane loads them 16 bytes at a time,
// and finds its part of P where S left it.
#pragma once
#include "ptx/ld_shared.cuh"
#include "ptx/mma.cuh"
#include "tile/mma_fragment.cuh"

// Accumulators as in MmaFragment. kPaired: of two 8-column tiles the first has the even columns and
// the second the odd ones, as V is loaded in pairs.
template <int kRowTiles, int kColTiles, bool kPaired> struct DmmaFragment {
  static constexpr int kRows = 2 * kRowTiles, kCols = 2 * kColTiles;
  static constexpr int kRowLanes = 4;
  static constexpr int kRun = 2;

  f64 x[kRowTiles][kColTiles][4];

  DEVICE f64& at(int r, int c) {
    const int tile = kPaired ? c / 4 * 2 + c % 2 : c / 2, pair = kPaired ? c / 2 % 2 : c % 2;
    return x[r / 2][tile][2 * (r % 2) + pair];
  }
  DEVICE static int row(int r) { return MmaFragment<kRowTiles, kColTiles>::row(r); }
  DEVICE static int col(int c) {
    return kPaired ? 16 * (c / 4) + 4 * (lane() % 4) + c % 4 : MmaFragment<1, kColTiles>::col(c);
  }
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) at(r, c) = 0;
  }
};

DEVICE void mma(f64 (&d)[4], const f64 (&a)[8], const f64 (&b)[4]) {
  if constexpr (kArch >= 90) {
    ptx::mma_m16n8k8_f64(d, a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma_m16n8k8_f64(d, a[4], a[5], a[6], a[7], b[2], b[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::mma_m8n8k4_f64(d[0], d[1], a[2 * i], b[i]);
      ptx::mma_m8n8k4_f64(d[2], d[3], a[2 * i + 1], b[i]);
    }
  }
}

// s = a b^T: a [this warp's rows][kDepth], b [kColTiles * 8][kDepth], both in shared memory. Of 16
// columns a lane takes the four from 4 (lane % 4) on.
template <int kRowTiles, int kColTiles, int kRowsA, int kDepth>
DEVICE void matmul_nt(DmmaFragment<kRowTiles, kColTiles, false>& s, SwizzledTile<kRowsA, kDepth> a,
                      SwizzledTile<kColTiles * 8, kDepth> b) {
  using A = SwizzledTile<kRowsA, kDepth>;
  using B = SwizzledTile<kColTiles * 8, kDepth>;
  const auto a_from = a.origin(16 * kRowTiles * warp() + lane() / 4, 2 * (lane() % 4));
  const auto b_from = b.origin(lane() / 4, 2 * (lane() % 4));
  s.clear();
#pragma unroll 1  // side by side, steps take more registers than there are
  for (int k = 0; k < kDepth / 16; ++k) {
    f64 a_frag[kRowTiles][8];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 from = A::at(a_from, 16 * m + 8 * half, 4 * k);
        ptx::ld_shared_v2_f64(a_frag[m][half], a_frag[m][2 + half], from);
        ptx::ld_shared_v2_f64(a_frag[m][4 + half], a_frag[m][6 + half], from ^ 16);
      }
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      f64 b_frag[4];
      const u32 from = B::at(b_from, 8 * n, 4 * k);
      ptx::ld_shared_v2_f64(b_frag[0], b_frag[1], from);
      ptx::ld_shared_v2_f64(b_frag[2], b_frag[3], from ^ 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) mma(s.x[m][n], a_frag[m], b_frag);
    }
  }
}

// P as an operand: of 16 keys a lane holds 2 (lane % 4), the next one, and those 8 further.
template <int kRowTiles, int kSteps> struct DmmaOperand {
  f64 x[kRowTiles][kSteps][8];
};

// o += p v: v [kSteps * 16][kColTiles * 8] in shared memory.
template <int kRowTiles, int kColTiles, int kSteps>
DEVICE void matmul_nn(DmmaFragment<kRowTiles, kColTiles, true>& o,
                      const DmmaOperand<kRowTiles, kSteps>& p,
                      SwizzledTile<kSteps * 16, kColTiles * 8> v) {
  using V = SwizzledTile<kSteps * 16, kColTiles * 8>;
  const typename V::Origin v_from[2] = {v.origin(2 * (lane() % 4), lane() / 4),
                                        v.origin(2 * (lane() % 4) + 1, lane() / 4)};
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      f64 even[4], odd[4];  // columns 16 n + 2 (lane / 4), and the next
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::ld_shared_v2_f64(even[i], odd[i], V::at(v_from[i % 2], 16 * k + i / 2 * 8, 4 * n));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma(o.x[m][2 * n], p.x[m][k], even);
        mma(o.x[m][2 * n + 1], p.x[m][k], odd);
      }
    }
}

template <int kRowTiles, int kColTiles>
DEVICE DmmaOperand<kRowTiles, kColTiles / 2> narrow(
    const DmmaFragment<kRowTiles, kColTiles, false>& s) {
  DmmaOperand<kRowTiles, kColTiles / 2> p;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int k = 0; k < kColTiles / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          p.x[m][k][2 * i + half] = s.x[m][2 * k + i / 2][2 * half + i % 2];
  return p;
}

// What the two products of a dtype leave in registers.
template <DType> struct TensorCores {
  template <int kRowTiles, int kColTiles> using Scores = MmaFragment<kRowTiles, kColTiles>;
  template <int kRowTiles, int kColTiles> using Output = MmaFragment<kRowTiles, kColTiles>;
};
template <> struct TensorCores<kFloat64> {
  template <int kRowTiles, int kColTiles>
  using Scores = DmmaFragment<kRowTiles, kColTiles, false>;
  template <int kRowTiles, int kColTiles>
  using Output = DmmaFragment<kRowTiles, kColTiles, true>;
};
