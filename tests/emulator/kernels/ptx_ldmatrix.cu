// ldmatrix, plain and transposed, from any rows.
//
//   in    image [words]         what shared memory holds
//         rows [128]            byte at which the row starts that a thread addresses
//   out   ldmatrix_x4, ldmatrix_x4_trans [128, 4]
//   grid  1   block 128   smem 4 words
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/thread.cuh"

struct LdmatrixParams {
  const u32* image;
  const i32* rows;
  u32 *ldmatrix_x4, *ldmatrix_x4_trans;
  i32 words;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_ldmatrix(const __grid_constant__ LdmatrixParams p) {
  const int tid = ptx::tid_x();
  u32* shared = reinterpret_cast<u32*>(ptx::dynamic_smem());
  for (int i = tid; i < p.words; i += 128) shared[i] = p.image[i];
  ptx::bar_sync();
  const u32 row = ptx::smem_address(shared) + p.rows[tid];
  u32 plain[4], trans[4];
  ptx::ldmatrix_x4(plain, row);
  ptx::ldmatrix_x4_trans(trans, row);
  for (int m = 0; m < 4; ++m) {
    p.ldmatrix_x4[4 * tid + m] = plain[m];
    p.ldmatrix_x4_trans[4 * tid + m] = trans[m];
  }
}
