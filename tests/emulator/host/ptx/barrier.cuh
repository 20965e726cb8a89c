#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void bar_sync() { emu::bar_sync(0, 0); }
DEVICE void bar_sync(int id, int threads) { emu::bar_sync(id, threads); }
DEVICE bool bar_red_or(bool x) { return emu::bar_red_or(x, 0, 0); }
DEVICE bool bar_red_or(bool x, int id, int threads) { return emu::bar_red_or(x, id, threads); }
DEVICE void bar_arrive(int id, int threads) { emu::bar_arrive(id, threads); }
DEVICE void bar_warp_sync() { emu::bar_warp_sync(); }

}  // namespace ptx
