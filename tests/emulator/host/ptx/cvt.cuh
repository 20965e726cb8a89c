#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 cvt_f32_f16(u16 x) { return f32(emu::bits<_Float16>(x)); }
DEVICE u16 cvt_rn_f16_f32(f32 x) { return u16(emu::pack(x, 0, emu::Half::f16)); }
DEVICE u32 cvt_rn_f16x2_f32(f32 lo, f32 hi) { return emu::pack(lo, hi, emu::Half::f16); }
DEVICE u32 cvt_rn_bf16x2_f32(f32 lo, f32 hi) { return emu::pack(lo, hi, emu::Half::bf16); }
DEVICE f32 cvt_rz_f32_f64(f64 x) {
  const f32 y = f32(x);
  return fabs(f64(y)) > fabs(x) ? nextafterf(y, 0.f) : y;
}
DEVICE u32 mov_b32(f32 x) { return emu::bits<u32>(x); }
DEVICE f32 mov_f32(u32 x) { return emu::bits<f32>(x); }
DEVICE u64 mov_b64(f64 x) { return emu::bits<u64>(x); }
DEVICE f64 mov_f64(u64 x) { return emu::bits<f64>(x); }

}  // namespace ptx
