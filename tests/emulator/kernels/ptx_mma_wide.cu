// mma.sync of TF32 and float64, several one after another into the same accumulators, operands from
// shared memory by ld.shared.
//
//   in    a [steps, threads, 4], b [steps, threads, 2] f64 and, as float32, a_single, b_single
//         c [threads, 4] f64
//   out   f64_m16n8k8, f64_m8n8k4 [threads, 4]: the latter the first two elements of c and what
//         a[0] and b[0] add, the last two the same of a[2] and b[1]
//         tf32_m16n8k8 [threads, 4] f32
//   grid  1   block any number of warps   smem 48 bytes a thread
#include "base/types.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/mma.cuh"
#include "ptx/thread.cuh"

struct MmaWideParams {
  const f64 *a, *b, *c;
  const u32 *a_single, *b_single;
  f64 *f64_m16n8k8, *f64_m8n8k4;
  f32* tf32_m16n8k8;
  i32 steps, threads;
};

extern "C" __global__ void __launch_bounds__(1024)
ptx_mma_wide(const __grid_constant__ MmaWideParams p) {
  const int tid = ptx::tid_x();
  f64* mine = reinterpret_cast<f64*>(ptx::dynamic_smem()) + 6 * tid;
  const u32 address = ptx::smem_address(mine);
  f64 large[4], small[4];
  f32 single[4];
  for (int i = 0; i < 4; ++i) large[i] = small[i] = p.c[4 * tid + i], single[i] = f32(large[i]);
  for (int step = 0; step < p.steps; ++step) {
    const int at = step * p.threads + tid;
    for (int i = 0; i < 4; ++i) mine[i] = p.a[4 * at + i];
    for (int i = 0; i < 2; ++i) mine[4 + i] = p.b[2 * at + i];
    f64 a[2][2], b[2];
    for (int i = 0; i < 2; ++i) ptx::ld_shared_v2_f64(a[i], address + 16 * i);
    ptx::ld_shared_v2_f64(b, address + 32);
    ptx::mma_m16n8k8_f64(large, a[0][0], a[0][1], a[1][0], a[1][1], b[0], b[1]);
    ptx::mma_m8n8k4_f64(small[0], small[1], a[0][0], b[0]);
    ptx::mma_m8n8k4_f64(small[2], small[3], a[1][0], b[1]);

    u32* words = reinterpret_cast<u32*>(mine);
    for (int i = 0; i < 4; ++i) words[i] = p.a_single[4 * at + i];
    f32 back[4];
    ptx::ld_shared_v4_f32(back, address);
    u32 a_bits[4];
    for (int i = 0; i < 4; ++i) a_bits[i] = ptx::mov_b32(back[i]);
    ptx::mma_m16n8k8_tf32(single, a_bits, p.b_single[2 * at], p.b_single[2 * at + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    p.f64_m16n8k8[4 * tid + i] = large[i], p.f64_m8n8k4[4 * tid + i] = small[i];
    p.tf32_m16n8k8[4 * tid + i] = single[i];
  }
}
