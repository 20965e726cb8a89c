#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 shfl_bfly(f32 x, int lane_mask) {
  return emu::bits<f32>(emu::shfl_bfly(emu::bits<uint64_t>(x), lane_mask));
}
DEVICE f64 shfl_bfly(f64 x, int lane_mask) {
  return emu::bits<f64>(emu::shfl_bfly(emu::bits<uint64_t>(x), lane_mask));
}
DEVICE int shfl_idx(int x, int lane) { return emu::shfl_idx(x, lane); }

}  // namespace ptx
