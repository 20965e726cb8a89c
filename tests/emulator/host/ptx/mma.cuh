#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void mma_m16n8k16_f16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma_m16n8k16(d, a, b0, b1, emu::Half::f16);
}
DEVICE void mma_m16n8k16_bf16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma_m16n8k16(d, a, b0, b1, emu::Half::bf16);
}

}  // namespace ptx
