#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void ld_shared_v2_f64(f64& x, f64& y, u32 address) {
  f64 both[2];
  emu::ld_shared(both, address, 16);
  x = both[0], y = both[1];
}

}  // namespace ptx
