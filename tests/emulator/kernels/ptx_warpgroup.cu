// elect.sync, twice, and setmaxnreg: one warpgroup gives up registers, two take them.
//
//   in    x [384]
//   out   elected [384, 2]   1 in one lane of each warp
//         kept [384]         x, held in a register meanwhile
//   grid  1   block 384
#include "base/types.cuh"
#include "ptx/elect.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/thread.cuh"

struct WarpgroupParams {
  const u32* x;
  u32 *elected, *kept;
};

extern "C" __global__ void __launch_bounds__(384, 1)
ptx_warpgroup(const __grid_constant__ WarpgroupParams p) {
  const int tid = ptx::tid_x();
  const u32 x = p.x[tid];
  if (tid < 128) ptx::setmaxnreg_dec<24>();
  else ptx::setmaxnreg_inc<240>();
  for (int i = 0; i < 2; ++i) p.elected[2 * tid + i] = ptx::elect_sync();
  p.kept[tid] = x;
}
