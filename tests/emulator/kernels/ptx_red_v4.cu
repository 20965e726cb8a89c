// red.global.add.v4.f32 by all threads of all blocks on the same numbers.
//
//   in    x [blocks, 128, 4]
//   out   sums [32, 4]         of the threads with one lane
//   grid  any   block 128
#include "base/types.cuh"
#include "ptx/red.cuh"
#include "ptx/thread.cuh"

struct RedParams {
  const f32* x;
  f32* sums;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_red_v4(const __grid_constant__ RedParams p) {
  const int t = ptx::tid_x();
  const f32* from = p.x + 4 * (128 * ptx::ctaid_x() + t);
  const f32 x[4] = {from[0], from[1], from[2], from[3]};
  ptx::red_add_v4(p.sums + 4 * (t % 32), x);
}
