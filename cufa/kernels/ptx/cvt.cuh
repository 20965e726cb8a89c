// Conversions between float formats, and between a float and its bits (PTX ISA: cvt, mov).
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 cvt_f32_f16(u16 x) {
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

DEVICE u16 cvt_rn_f16_f32(f32 x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// sm_80 and later, both: lo goes to the lower half.
DEVICE u32 cvt_rn_f16x2_f32(f32 lo, f32 hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

DEVICE u32 cvt_rn_bf16x2_f32(f32 lo, f32 hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// Towards zero: a finite value stays finite.
DEVICE f32 cvt_rz_f32_f64(f64 x) {
  f32 y;
  asm("cvt.rz.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}

DEVICE u32 mov_b32(f32 x) { return __float_as_uint(x); }
DEVICE f32 mov_f32(u32 x) { return __uint_as_float(x); }
DEVICE u64 mov_b64(f64 x) { return u64(__double_as_longlong(x)); }
DEVICE f64 mov_f64(u64 x) { return __longlong_as_double(i64(x)); }

}  // namespace ptx
