// ld.shared by address in the shared window.
#pragma once
#include "base/types.cuh"

namespace ptx {

// The address is a multiple of 16.
DEVICE void ld_shared_v2_f64(f64& x, f64& y, u32 address) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];" : "=d"(x), "=d"(y) : "r"(address) : "memory");
}

}  // namespace ptx
