// red.global.add.v2.f32 and .v4.f32 by all threads of all blocks on the same numbers.
//
//   in    x [blocks, 128, 4]
//   out   sums_v2 [32, 2]     of the first two numbers of the threads with one lane
//         sums_v4 [32, 4]     of all four
//   grid  any   block 128
#include "base/types.cuh"
#include "ptx/red.cuh"
#include "ptx/thread.cuh"

struct RedParams {
  const f32* x;
  f32 *sums_v2, *sums_v4;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_red_vector(const __grid_constant__ RedParams p) {
  const int t = ptx::tid_x();
  const f32* from = p.x + 4 * (128 * ptx::ctaid_x() + t);
  const f32 two[2] = {from[0], from[1]}, four[4] = {from[0], from[1], from[2], from[3]};
  ptx::red_add_v2(p.sums_v2 + 2 * (t % 32), two);
  ptx::red_add_v4(p.sums_v4 + 4 * (t % 32), four);
}
