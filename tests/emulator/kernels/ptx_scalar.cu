// What makes one value of one or two, shfl and vote: an output for each function, an element for
// each thread.
//
//   in    single, single2 [n] f32   half [n] f16   bits, wide_bits [n]   wide, wide2 [n] f64
//   out   [n] each, but of shfl and vote [32, n]: a row for each lane mask, for each lane, and for
//         each number that the lower bits of `bits` are compared with
//   grid  n / 128   block 128
#include "base/types.cuh"
#include "ptx/clz.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/shfl.cuh"
#include "ptx/thread.cuh"
#include "ptx/vote.cuh"

struct ScalarParams {
  const f32 *single, *single2;
  const u16* half;
  const u32* bits;
  const u64* wide_bits;
  const f64 *wide, *wide2;
  f32 *ex2_approx, *rcp_approx, *mul_rn_f32;
  f64* mul_rn_f64;
  f32* cvt_f32_f16;
  u16* cvt_rn_f16_f32;
  f32* cvt_rz_f32_f64;
  u32* mov_b32;
  f32 *mov_f32, *shfl_bfly_f32;
  f64* shfl_bfly_f64;
  i32* shfl_idx;
  u32 *vote_any, *vote_ballot;
  i32* clz;
  u64* mov_b64;
  f64* mov_f64;
  i32 n;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_scalar(const __grid_constant__ ScalarParams p) {
  const int i = 128 * ptx::ctaid_x() + ptx::tid_x();
  const f32 x = p.single[i];
  const f64 wide = p.wide[i];
  p.ex2_approx[i] = ptx::ex2_approx(x);
  p.rcp_approx[i] = ptx::rcp_approx(x);
  p.mul_rn_f32[i] = ptx::mul_rn(x, p.single2[i]);
  p.mul_rn_f64[i] = ptx::mul_rn(wide, p.wide2[i]);
  p.cvt_f32_f16[i] = ptx::cvt_f32_f16(p.half[i]);
  p.cvt_rn_f16_f32[i] = ptx::cvt_rn_f16_f32(x);
  p.cvt_rz_f32_f64[i] = ptx::cvt_rz_f32_f64(wide);
  p.clz[i] = ptx::clz(p.wide_bits[i]);
  p.mov_b32[i] = ptx::mov_b32(x);
  p.mov_f32[i] = ptx::mov_f32(p.bits[i]);
  p.mov_b64[i] = ptx::mov_b64(wide);
  p.mov_f64[i] = ptx::mov_f64(p.wide_bits[i]);
  for (int mask = 0; mask < 32; ++mask) {  // or a lane, or a number
    p.shfl_bfly_f32[mask * p.n + i] = ptx::shfl_bfly(x, mask);
    p.shfl_bfly_f64[mask * p.n + i] = ptx::shfl_bfly(wide, mask);
    p.shfl_idx[mask * p.n + i] = ptx::shfl_idx(int(p.bits[i]), mask);
    p.vote_any[mask * p.n + i] = ptx::vote_any(p.bits[i] % 64 == u32(mask));
    p.vote_ballot[mask * p.n + i] = ptx::vote_ballot(p.bits[i] >> mask & 1);
  }
}
