#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 row) { emu::ldmatrix_x4(r, row, false); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row) { emu::ldmatrix_x4(r, row, true); }

}  // namespace ptx
