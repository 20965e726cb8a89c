// ex2.approx (2 ulp, denormals flush to zero), and products that are rounded before anything is
// added to them, where the compiler would fuse the two.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 ex2_approx(f32 x) {
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE f32 rcp_approx(f32 x) {
  f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE f32 mul_rn(f32 a, f32 b) {
  f32 y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

DEVICE f64 mul_rn(f64 a, f64 b) {
  f64 y;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(y) : "d"(a), "d"(b));
  return y;
}

}  // namespace ptx
