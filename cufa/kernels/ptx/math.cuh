// ex2.approx (2 ulp) and rcp.approx (1 ulp); denormals flush to zero.
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

}  // namespace ptx
