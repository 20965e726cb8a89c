#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void red_add(f32* to, f32 x) { emu::red_add(to, &x, 1); }
DEVICE void red_add(f64* to, f64 x) { emu::red_add(to, x); }
DEVICE void red_add_v2(f32* to, const f32 (&x)[2]) { emu::red_add(to, x, 2); }
DEVICE void red_add_v4(f32* to, const f32 (&x)[4]) { emu::red_add(to, x, 4); }

}  // namespace ptx
