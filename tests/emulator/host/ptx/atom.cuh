#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE u32 atom_inc(u32* count, u32 last) { return emu::atom_inc(count, last); }

}  // namespace ptx
