// The gradient of the sink: a key of value 0, whose dP is 0 and whose weight is exp(sink - lse).
//
//   in    sink [H]   workspace BackwardRows
//   out   dsink [H]  = -sum over batches and rows of exp(sink - lse) * D
//   grid  H                                      block kThreads
//   smem  a number for each warp
#include "attn/backward_rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/thread.cuh"
#include "tile/reduce.cuh"

constexpr int kWarps = kThreads / 32;
static_assert(kSmemBytes == kWarps * int(sizeof(Real)), "gpu/config.py");

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
bwd_sink(const __grid_constant__ BackwardParams p) {
  const int head = ptx::ctaid_x(), thread = ptx::tid_x();
  const Real sink = static_cast<const Real*>(p.sink)[head * p.sink_stride_head];
  Real sum = 0;
  for (int batch = 0; batch < p.batch; ++batch) {
    const BackwardRows rows(p, batch, head);
    for (int row = thread; row < p.seqlen_q; row += kThreads) {
      const Real x = (sink - rows.lse[row]) * Real(kLog2e);
      sum -= exp2_with_denormals(x > 0 ? Real(0) : x) * rows.delta[row];
    }
  }
  Real* of_warps = reinterpret_cast<Real*>(ptx::dynamic_smem());
  sum = row_sum<32>(sum);
  if (thread % 32 == 0) of_warps[thread / 32] = sum;
  ptx::bar_sync();  // the sums of all warps are here
  if (thread != 0) return;
  for (int i = 1; i < kWarps; ++i) sum += of_warps[i];
  static_cast<Storage<kResult>::type*>(p.dsink)[head] = from_real<kResult>(sum);
}
