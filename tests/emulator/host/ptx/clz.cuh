#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE int clz(u64 x) { return x == 0 ? 64 : __builtin_clzll(x); }

}  // namespace ptx
