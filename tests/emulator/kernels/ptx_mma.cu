// mma.sync m16n8k16, several one after another into the same accumulators.
//
//   in    a [steps, threads, 4], b [steps, threads, 2] pairs of 16-bit floats   c [threads, 4] f32
//   out   d [threads, 4] f32
//   grid  1   block any number of warps
#include "base/types.cuh"
#include "ptx/mma.cuh"
#include "ptx/thread.cuh"

struct MmaParams {
  const u32 *a, *b;
  const f32* c;
  f32* d;
  i32 steps, threads, bf16;
};

extern "C" __global__ void __launch_bounds__(1024)
ptx_mma(const __grid_constant__ MmaParams p) {
  const int tid = ptx::tid_x();
  f32 d[4];
  for (int i = 0; i < 4; ++i) d[i] = p.c[4 * tid + i];
  for (int step = 0; step < p.steps; ++step) {
    const int at = step * p.threads + tid;
    u32 a[4];
    for (int i = 0; i < 4; ++i) a[i] = p.a[4 * at + i];
    const u32 b0 = p.b[2 * at], b1 = p.b[2 * at + 1];
    if (p.bf16) ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    else ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
  for (int i = 0; i < 4; ++i) p.d[4 * tid + i] = d[i];
}
