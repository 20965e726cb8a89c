// red.global.add by all threads of all blocks on the same numbers.
//
//   in    x32 [blocks, 128]   x64 [blocks, 128]
//   out   sums32 [32]         of the threads with one lane
//         sums64 [32]         likewise
//   grid  any   block 128
#include "base/types.cuh"
#include "ptx/red.cuh"
#include "ptx/thread.cuh"

struct RedParams {
  const f32* x32;
  const f64* x64;
  f32* sums32;
  f64* sums64;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_red(const __grid_constant__ RedParams p) {
  const int t = ptx::tid_x(), i = 128 * ptx::ctaid_x() + t;
  ptx::red_add(p.sums32 + t % 32, p.x32[i]);
  ptx::red_add(p.sums64 + t % 32, p.x64[i]);
}
