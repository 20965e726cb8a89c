#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void mma_m16n8k16_f16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma_m16n8k16(d, a, b0, b1, emu::Half::f16);
}
DEVICE void mma_m16n8k16_bf16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma_m16n8k16(d, a, b0, b1, emu::Half::bf16);
}
DEVICE void mma_m16n8k8_tf32(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma_m16n8k8_tf32(d, a, {b0, b1});
}
DEVICE void mma_m16n8k8_f64(f64 (&d)[4], f64 a0, f64 a1, f64 a2, f64 a3, f64 b0, f64 b1) {
  emu::mma_m16n8k8_f64(d, {a0, a1, a2, a3}, {b0, b1});
}
DEVICE void mma_m8n8k4_f64(f64& d0, f64& d1, f64 a, f64 b) {
  f64 d[2] = {d0, d1};
  emu::mma_m8n8k4_f64(d, a, b);
  d0 = d[0], d1 = d[1];
}

}  // namespace ptx
