// vote.sync.any over the full warp: whether x holds in any lane.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool vote_any(bool x) { return __any_sync(0xffffffffu, x); }

}  // namespace ptx
