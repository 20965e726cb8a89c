// red.global.add (PTX ISA: red): adds to memory, and asks for nothing back. Denormals of float32,
// given or resulting, count as 0.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void red_add(f32* to, f32 x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
DEVICE void red_add(f64* to, f64 x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(to), "d"(x) : "memory");
}

// sm_90 and later: each number by itself; the address is a multiple of all their bytes.
DEVICE void red_add_v2(f32* to, const f32 (&x)[2]) {
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(x[0]), "f"(x[1]) : "memory");
}
DEVICE void red_add_v4(f32* to, const f32 (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace ptx
