// dQ from what all key tiles have added up.
//
//   in    workspace          BackwardRows
//   out   dq [B, H, Tq, D]
//   grid  B * H * ceil(Tq / kBlockM)             block kThreads
#include "attn/backward_rows.cuh"
#include "ptx/thread.cuh"

constexpr int kRun = kAligned ? 16 / sizeof(Elem) : 1;  // elements that are stored at once

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
bwd_queries(const __grid_constant__ BackwardParams p) {
  const Tile tile(p, ptx::ctaid_x());
  const Real* sums = BackwardRows(p, tile).dq_sums;
  for (int i = ptx::tid_x(); i < kBlockM * kHeadDim / kRun; i += kThreads) {
    const int row = tile.row0 + i / (kHeadDim / kRun), col = i % (kHeadDim / kRun) * kRun;
    if (row >= p.seqlen_q || col >= p.head_dim) continue;
    const Real* from = sums + i64(row) * kHeadDim + col;
    Elem* to = tile.dq(p) + row * p.dq_stride.row + col;
    Vec<Elem, kRun> run;
#pragma unroll
    for (int e = 0; e < kRun; ++e) run.x[e] = to_elem(from[e] * Real(p.scale));
    if (col + kRun <= p.head_dim) {
      *reinterpret_cast<Vec<Elem, kRun>*>(to) = run;
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e)
        if (col + e < p.head_dim) to[e] = run.x[e];
    }
  }
}
