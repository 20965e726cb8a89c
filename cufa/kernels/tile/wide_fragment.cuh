// Register fragments of mma.sync m16n8k8 on float32 and float64, and the two matrix products of
// attention on them.
//
// float32 has no tensor core of its own. A number is the sum of two TF32 numbers, and a product the
// sum of three of theirs (Ootomo and Yokota, arXiv:2203.03341): what the fourth would add is below
// float32's rounding. Tensor cores truncate what they add up, so no sum in them is longer than
// head_dim or a block of keys or queries, and over head_dim the small products have accumulators of
// their own.
#pragma once
#include "ptx/ld_shared.cuh"
#include "tile/mma_fragment.cuh"

// Accumulators: rows as in MmaFragment. kPaired: as V is loaded, 16 bytes at a time, kChunk columns
// side by side lie in as many 8-column tiles.
template <int kRowTiles, int kColTiles, bool kPaired> struct WideFragment {
  static constexpr int kRows = 2 * kRowTiles, kCols = 2 * kColTiles;
  static constexpr int kRowLanes = 4;
  static constexpr int kRun = kChunk;
  static constexpr int kRowHalf = 1, kColHalf = kPaired ? 0 : 2;

  Real x[kRowTiles][kColTiles][4];

  DEVICE Real& at(int r, int c) {
    const int tile = kPaired ? c / (2 * kChunk) * kChunk + c % kChunk : c / 2;
    return x[r / 2][tile][2 * (r % 2) + (kPaired ? c / kChunk % 2 : c % 2)];
  }
  DEVICE static int row(int r) { return MmaFragment<kRowTiles, kColTiles>::row(r); }
  DEVICE static int col(int c) {
    if constexpr (!kPaired) return MmaFragment<kRowTiles, kColTiles>::col(c);
    return 2 * kChunk * (c / (2 * kChunk) * 4 + lane() % 4) + c % (2 * kChunk);
  }
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) at(r, c) = 0;
  }
};

// What a lane gives to a product: kCount numbers of A or of B.
template <class T, int kCount> struct Operand;
template <int kCount> struct Operand<f64, kCount> {
  f64 x[kCount];

  DEVICE void set(int i, f64 value, f64 = 1) { x[i] = value; }
};
template <int kCount> struct Operand<f32, kCount> {
  u32 high[kCount], low[kCount];  // TF32: high is rounded, low what it lacks, times `lift`

  DEVICE void set(int i, f32 value, f32 lift = 1.f) {
    high[i] = (ptx::mov_b32(value) + 0x1000) & 0xffffe000;  // 13 bits fewer
    low[i] = ptx::mov_b32((value - ptx::mov_f32(high[i])) * lift);
  }
};

// A tile of accumulators while products are added to it: from begin, where float64 goes on with
// what is there, to end, where float32 adds to it.
template <class T> struct Sum;
template <> struct Sum<f64> {
  static constexpr f64 kLift = 1;

  f64 x[4];

  DEVICE void begin(const f64 (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = from[i];
  }
  DEVICE void add(const Operand<f64, 4>& a, const Operand<f64, 2>& b) {
    if constexpr (kArch >= 90) {
      ptx::mma_m16n8k8_f64(x, a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          ptx::mma_m8n8k4_f64(x[2 * half], x[2 * half + 1], a.x[2 * k + half], b.x[k]);
    }
  }
  DEVICE void end(f64 (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = x[i];
  }
};
template <> struct Sum<f32> {
  // What a small number lacks is denormal, and TF32 has no digits for it; times this it is at most
  // twice as large as the number.
  static constexpr f32 kLift = 4096.f;

  f32 large[4], small[4];

  DEVICE void begin(const f32 (&)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) large[i] = small[i] = 0.f;
  }
  DEVICE void add(const Operand<f32, 4>& a, const Operand<f32, 2>& b) {
    ptx::mma_m16n8k8_tf32(small, a.low, b.high[0], b.high[1]);
    ptx::mma_m16n8k8_tf32(small, a.high, b.low[0], b.low[1]);
    ptx::mma_m16n8k8_tf32(large, a.high, b.high[0], b.high[1]);
  }
  DEVICE void end(f32 (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += large[i] + small[i] * (1 / kLift);
  }
};

// The same for a sum that is short: all products in one accumulator, which takes half the
// registers.
template <class T> struct ShortSum : Sum<T> {};
template <> struct ShortSum<f32> {
  f32 x[4];

  DEVICE void begin(const f32 (&)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = 0.f;
  }
  DEVICE void add(const Operand<f32, 4>& a, const Operand<f32, 2>& b) {
    ptx::mma_m16n8k8_tf32(x, a.low, b.high[0], b.high[1]);
    ptx::mma_m16n8k8_tf32(x, a.high, b.low[0], b.low[1]);
    ptx::mma_m16n8k8_tf32(x, a.high, b.high[0], b.high[1]);
  }
  DEVICE void end(f32 (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += x[i];
  }
};

DEVICE void load_chunk(f32 (&x)[4], u32 address) { ptx::ld_shared_v4_f32(x, address); }
DEVICE void load_chunk(f64 (&x)[2], u32 address) { ptx::ld_shared_v2_f64(x, address); }

// Where a lane finds its part of an operand of S = Q K^T, rows of 16 columns at a time: two steps
// of k. float64 (kChunk 2) comes by plain loads, float32 by ldmatrix. A sum has no order: in the
// places of k = lane % 4 and 4 further a lane may hold any two columns, if it does so in both
// operands.
template <bool kIsA, int kRows, int kDepth> struct RowReader {
  using Tile = SwizzledTile<kRows, kDepth>;
  typename Tile::Origin from;

  DEVICE RowReader(Tile tile, int row) {
    if constexpr (kChunk == 2) from = tile.origin(row + lane() / 4, 2 * (lane() % 4));
    else if constexpr (kIsA) from = tile.origin(row + (lane() & 15), lane() >> 4);
    else from = tile.origin(row + (lane() & 7) + (lane() >> 4) * 8, lane() >> 3 & 1);
  }

  // 16 rows, `down` below the first. x[step][place][half]: of row lane / 4 and of the one 8 below.
  DEVICE void load(Real (&x)[2][2][2], int down, int k) const {
    if constexpr (kChunk == 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 address = Tile::at(from, down + 8 * half, 4 * k);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          f64 pair[2];
          ptx::ld_shared_v2_f64(pair, step ? address ^ 16 : address);
          x[step][0][half] = pair[0], x[step][1][half] = pair[1];
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        u32 bits[4];
        ptx::ldmatrix_x4(bits, Tile::at(from, down, 2 * k + step));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[step][kIsA ? i / 2 : i % 2][kIsA ? i % 2 : i / 2] = ptx::mov_f32(bits[i]);
      }
    }
  }
};

// s = a b^T, both in shared memory: this warp's rows of a [rows][kDepth], and of b [rows][kDepth]
// the first kColTiles * 8.
template <int kRowTiles, int kColTiles, int kRowsA, int kRowsB, int kDepth>
DEVICE void matmul_nt(WideFragment<kRowTiles, kColTiles, false>& s, SwizzledTile<kRowsA, kDepth> a,
                      SwizzledTile<kRowsB, kDepth> b) {
  const RowReader<true, kRowsA, kDepth> a_rows(a, 16 * kRowTiles * warp());
  const RowReader<false, kRowsB, kDepth> b_rows(b, 0);
  constexpr Real kLift = Sum<Real>::kLift;
  Sum<Real> sum[kRowTiles][kColTiles];
  s.clear();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) sum[m][n].begin(s.x[m][n]);
#pragma unroll 1  // side by side, steps take more registers than there are
  for (int k = 0; k < kDepth / 16; ++k) {
    Operand<Real, 4> a_frag[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Real x[2][2][2];
      a_rows.load(x, 16 * m, k);
#pragma unroll
      for (int i = 0; i < 8; ++i) a_frag[m][i / 4].set(i % 4, x[i / 4][i / 2 % 2][i % 2], kLift);
    }
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      Real x[2][2][2];
      b_rows.load(x, 8 * n, k);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          Operand<Real, 2> b_frag;
          b_frag.set(0, x[step][0][tile], kLift), b_frag.set(1, x[step][1][tile], kLift);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) sum[m][n + tile].add(a_frag[m][step], b_frag);
        }
    }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) sum[m][n].end(s.x[m][n]);
}

// o += p v: p as S was left, v [kKeyTiles * 8][kColTiles * 8] in shared memory. In the places of
// k = lane % 4 and 4 further are rows 2 (lane % 4) of v and the next, whose weights a lane holds.
template <int kRowTiles, int kColTiles, int kKeyTiles>
DEVICE void matmul_nn(WideFragment<kRowTiles, kColTiles, true>& o,
                      const WideFragment<kRowTiles, kKeyTiles, false>& p,
                      SwizzledTile<kKeyTiles * 8, kColTiles * 8> v) {
  using V = SwizzledTile<kKeyTiles * 8, kColTiles * 8>;
  const int key = 2 * (lane() % 4), chunk = lane() / 4;
  const typename V::Origin from = v.origin(key, chunk), next = v.origin(key + 1, chunk);
#pragma unroll
  for (int n = 0; n < kColTiles; n += kChunk) {
    ShortSum<Real> sum[kRowTiles][kChunk];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[m][i].begin(o.x[m][n + i]);
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      Real first[kChunk], second[kChunk];
      load_chunk(first, V::at(from, 8 * k, 4 * (n / kChunk)));
      load_chunk(second, V::at(next, 8 * k, 4 * (n / kChunk)));
      Operand<Real, 4> weights[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[m].set(i, p.x[m][k][i % 2 * 2 + i / 2]);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        Operand<Real, 2> v_frag;
        v_frag.set(0, first[i]), v_frag.set(1, second[i]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) sum[m][i].add(weights[m], v_frag);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[m][i].end(o.x[m][n + i]);
  }
}

// P as matmul_nn takes it: nothing to round.
template <int kRowTiles, int kColTiles>
DEVICE auto narrow(WideFragment<kRowTiles, kColTiles, false>& s)
    -> WideFragment<kRowTiles, kColTiles, false>& {
  return s;
}
