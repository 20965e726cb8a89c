#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void ld_shared_v4_f32(f32 (&x)[4], u32 address) { emu::ld_shared(x, address, 16); }
DEVICE void ld_shared_v2_f64(f64 (&x)[2], u32 address) { emu::ld_shared(x, address, 16); }

}  // namespace ptx
