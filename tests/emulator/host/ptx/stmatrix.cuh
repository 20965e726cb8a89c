#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void stmatrix_x4(u32 row, const u32 (&r)[4]) { emu::stmatrix_x4(row, r, false); }
DEVICE void stmatrix_x4_trans(u32 row, const u32 (&r)[4]) { emu::stmatrix_x4(row, r, true); }

}  // namespace ptx
