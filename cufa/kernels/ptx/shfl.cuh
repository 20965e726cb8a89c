// shfl.sync.bfly over the full warp: the value of the lane whose number differs in lane_mask.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE f32 shfl_bfly(f32 x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
DEVICE f64 shfl_bfly(f64 x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }

}  // namespace ptx
