// stmatrix, plain or transposed: four warps write all of shared memory.
//
//   in    registers [128, 4]
//         rows [128]     byte at which the row starts that a thread addresses: a permutation
//   out   image [512]    shared memory, as words
//   grid  1   block 128   smem 2048
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/thread.cuh"

struct StmatrixParams {
  const u32* registers;
  const i32* rows;
  u32* image;
  i32 trans;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_stmatrix(const __grid_constant__ StmatrixParams p) {
  const int tid = ptx::tid_x();
  const u32* shared = reinterpret_cast<const u32*>(ptx::dynamic_smem());
  const u32 row = ptx::smem_address(shared) + p.rows[tid];
  u32 r[4];
  for (int m = 0; m < 4; ++m) r[m] = p.registers[4 * tid + m];
  if (p.trans) ptx::stmatrix_x4_trans(row, r);
  else ptx::stmatrix_x4(row, r);
  ptx::bar_sync();
  for (int i = tid; i < 512; i += 128) p.image[i] = shared[i];
}
