#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 ex2_approx(f32 x) {
  const f32 y = exp2f(x);
  return y < 0x1p-126f ? 0.f : y;  // denormals flush to zero
}
DEVICE f32 rcp_approx(f32 x) {
  const f32 y = 1.f / (fabsf(x) < 0x1p-126f ? 0.f * x : x);  // denormals are 0, on both sides
  return fabsf(y) < 0x1p-126f ? 0.f * y : y;
}
DEVICE f32 mul_rn(f32 a, f32 b) { return a * b; }
DEVICE f64 mul_rn(f64 a, f64 b) { return a * b; }

}  // namespace ptx
