#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool elect_sync() { return emu::elect_sync(); }

}  // namespace ptx
