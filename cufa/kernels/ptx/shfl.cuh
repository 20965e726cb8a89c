// shfl.sync over the full warp.
#pragma once
#include "base/types.cuh"

namespace ptx {

// The value of the lane whose number differs in lane_mask.
DEVICE f32 shfl_bfly(f32 x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
DEVICE f64 shfl_bfly(f64 x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }

// The value of one lane: what comes of it the compiler knows to be one for the warp.
DEVICE int shfl_idx(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

}  // namespace ptx
