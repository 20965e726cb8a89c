#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool vote_any(bool x) { return emu::vote_any(x); }

}  // namespace ptx
