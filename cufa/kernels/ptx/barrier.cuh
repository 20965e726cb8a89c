// bar.sync over the block, bar.warp.sync over the warp.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void bar_sync() { __syncthreads(); }
DEVICE void bar_warp_sync() { __syncwarp(); }

}  // namespace ptx
