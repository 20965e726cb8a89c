// mma.sync of float64, several one after another into the same accumulators, operands from shared
// memory by ld.shared.
//
//   in    a [steps, threads, 4], b [steps, threads, 2], c [threads, 4] f64
//   out   m16n8k8 [threads, 4] f64; m8n8k4 [threads, 4] f64: the first two elements of c and what a[0]
//         and b[0] add, the last two the same of a[2] and b[1]
//   grid  1   block any number of warps   smem 48 bytes a thread
#include "base/types.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/mma.cuh"
#include "ptx/thread.cuh"

struct MmaF64Params {
  const f64 *a, *b, *c;
  f64 *m16n8k8, *m8n8k4;
  i32 steps, threads;
};

extern "C" __global__ void __launch_bounds__(1024)
ptx_mma_f64(const __grid_constant__ MmaF64Params p) {
  const int tid = ptx::tid_x();
  f64* mine = reinterpret_cast<f64*>(ptx::dynamic_smem()) + 6 * tid;
  const u32 address = ptx::smem_address(mine);
  f64 large[4], small[4];
  for (int i = 0; i < 4; ++i) large[i] = small[i] = p.c[4 * tid + i];
  for (int step = 0; step < p.steps; ++step) {
    const int at = step * p.threads + tid;
    for (int i = 0; i < 4; ++i) mine[i] = p.a[4 * at + i];
    for (int i = 0; i < 2; ++i) mine[4 + i] = p.b[2 * at + i];
    f64 a[4], b[2];
    for (int i = 0; i < 4; i += 2) ptx::ld_shared_v2_f64(a[i], a[i + 1], address + 8 * i);
    ptx::ld_shared_v2_f64(b[0], b[1], address + 32);
    ptx::mma_m16n8k8_f64(large, a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma_m8n8k4_f64(small[0], small[1], a[0], b[0]);
    ptx::mma_m8n8k4_f64(small[2], small[3], a[2], b[1]);
  }
  for (int i = 0; i < 4; ++i) p.m16n8k8[4 * tid + i] = large[i], p.m8n8k4[4 * tid + i] = small[i];
}
