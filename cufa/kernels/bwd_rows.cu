// What the backward pass wants to know of each query row first, before any product.
// Source: Dao, arXiv:2307.08691, Algorithm 2, lines 3 and 4.
//
//   in    o [B, H, Tq, Dv]   dout [B, H, Tq, Dv]   lse [B, H, Tq]   dlse [B, H, Tq] or none
//   in    q [B, H, Tq, D]    float32
//   out   workspace          BackwardRows; sums of dQ are 0 if this kernel has kDq
//   grid  B * H * padded rows / kBlockM          block kThreads; kRowLanes lanes share a row
#include "attn/backward_rows.cuh"
#include "ptx/thread.cuh"
#include "tile/reduce.cuh"
#include "tile/tf32.cuh"

constexpr int kRun = kAligned ? 16 / sizeof(Elem) : 1;  // elements that a lane loads at once

DEVICE constexpr int lanes_for(int runs) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes <= runs) lanes *= 2;
  return lanes;
}
constexpr int kRowLanes = lanes_for(kHeadDimV / kRun);
constexpr int kRowsAtOnce = kThreads / kRowLanes;
static_assert(kBlockM % kRowsAtOnce == 0);

DEVICE int row_lane() { return ptx::tid_x() % kRowLanes; }

// This lane's part of rowsum(dO * O).
DEVICE Real dot_of(const Elem* dout, const Elem* o, int cols) {
  Real sum = 0;
#pragma unroll
  for (int i = 0; i < kHeadDimV; i += kRowLanes * kRun) {
    const int col = i + row_lane() * kRun;
    if (col + kRun <= cols) {
      const auto a = *reinterpret_cast<const Vec<Elem, kRun>*>(dout + col);
      const auto b = *reinterpret_cast<const Vec<Elem, kRun>*>(o + col);
#pragma unroll
      for (int e = 0; e < kRun; ++e) sum += to_real<kDType>(a.x[e]) * to_real<kDType>(b.x[e]);
    } else {
      for (int e = 0; col + e < cols; ++e)
        sum += to_real<kDType>(dout[col + e]) * to_real<kDType>(o[col + e]);
    }
  }
  return sum;
}

// How many numbers of this lane's part of a row do not split.
DEVICE Real count_unsplit(const Elem* row, int cols) {
  Real count = 0;
  if constexpr (kDType == kFloat32) {
    for (int col = row_lane() * kRun; col < cols; col += kRowLanes * kRun) {
      if (col + kRun <= cols) {
        const auto run = *reinterpret_cast<const Vec<Elem, kRun>*>(row + col);
#pragma unroll
        for (int e = 0; e < kRun; ++e) count += splits(run.x[e]) ? 0 : 1;
      } else {
        for (int e = col; e < cols; ++e) count += splits(row[e]) ? 0 : 1;
      }
    }
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
bwd_rows(const __grid_constant__ BackwardParams p) {
  const Tile tile(p, ptx::ctaid_x());
  const BackwardRows rows(p, tile);
  const i64 head = (i64(tile.batch) * p.heads.value + tile.head) * p.seqlen_q;
#pragma unroll 1
  for (int i = 0; i < kBlockM; i += kRowsAtOnce) {
    const int row = tile.row0 + i + ptx::tid_x() / kRowLanes;
    const bool exists = row < p.seqlen_q;
    Real lse = infinity(), delta = 0, unsplit = 0;
    bool counts = false;                          // what comes back to others goes nowhere
    if (exists) {
      const Elem* const dout = tile.dout(p) + row * p.dout_stride.row;
      lse = static_cast<const Real*>(p.lse)[head + row];
      counts = !(lse < -Real(kMostLse));
      delta = dot_of(dout, tile.o(p) + row * p.o_stride.row, p.head_dim_v);
      unsplit = count_unsplit(tile.q(p) + row * p.q_stride.row, p.head_dim);
      if (counts) unsplit += count_unsplit(dout, p.head_dim_v);
    }
    delta = row_sum<kRowLanes>(delta);
    if constexpr (kDType == kFloat32) unsplit = row_sum<kRowLanes>(unsplit);
    if (row_lane() != 0) continue;
    if (exists && p.dlse) delta -= static_cast<const Real*>(p.dlse)[head + row];
    // 16 bits scale scores and lse before they subtract one from the other.
    if (sizeof(Elem) == 2 && lse > Real(kMostLse)) lse = Real(kMostLse);
    rows.lse[row] = counts ? lse : infinity();
    delta = counts ? delta : Real(0);
    rows.delta[row] = delta;
    // dS is multiplied too; it is at most as large as dP and D.
    if constexpr (kDType == kFloat32)
      rows.splits[row] = unsplit == 0 && abs_of(delta) < Real(kMostDelta) ? 1 : 0;
  }
  if constexpr (kDq) {
    auto* sums = reinterpret_cast<Vec<Real, kRealVec>*>(rows.dq_sums + i64(tile.row0) * kHeadDim);
    for (int i = ptx::tid_x(); i < kBlockM * kHeadDim / kRealVec; i += kThreads) sums[i] = {};
  }
}
