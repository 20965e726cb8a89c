// Conversions to a pair of 16-bit floats.
//
//   in    lo, hi [n] f32
//   out   cvt_rn_f16x2_f32, cvt_rn_bf16x2_f32 [n] pairs
//   grid  n / 128   block 128
#include "base/types.cuh"
#include "ptx/cvt.cuh"
#include "ptx/thread.cuh"

struct PackParams {
  const f32 *lo, *hi;
  u32 *cvt_rn_f16x2_f32, *cvt_rn_bf16x2_f32;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_pack(const __grid_constant__ PackParams p) {
  const int i = 128 * ptx::ctaid_x() + ptx::tid_x();
  p.cvt_rn_f16x2_f32[i] = ptx::cvt_rn_f16x2_f32(p.lo[i], p.hi[i]);
  p.cvt_rn_bf16x2_f32[i] = ptx::cvt_rn_bf16x2_f32(p.lo[i], p.hi[i]);
}
