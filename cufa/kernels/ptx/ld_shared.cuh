// ld.shared by address in the shared window.
#pragma once
#include "base/types.cuh"

namespace ptx {

// The address is a multiple of 16.
DEVICE void ld_shared_v4_f32(f32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}
DEVICE void ld_shared_v2_f64(f64 (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];"
               : "=d"(x[0]), "=d"(x[1])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
