#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool vote_any(bool x) { return emu::vote_any(x); }
DEVICE u32 vote_ballot(bool x) { return emu::vote_ballot(x); }

}  // namespace ptx
