// vote.sync.any and vote.sync.ballot over the full warp: whether x holds in any lane, and in which,
// bit i for lane i.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool vote_any(bool x) { return __any_sync(0xffffffffu, x); }

DEVICE u32 vote_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

}  // namespace ptx
