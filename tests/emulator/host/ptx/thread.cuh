#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE int tid_x() { return emu::thread_index(); }
DEVICE u32 ctaid_x() { return emu::block_index().x; }
DEVICE u32 nctaid_x() { return emu::grid_blocks(); }
DEVICE int ctaid_y() { return emu::block_index().y; }
DEVICE int ctaid_z() { return emu::block_index().z; }
DEVICE u8* dynamic_smem() { return emu::dynamic_shared_memory(); }
DEVICE u32 smem_address(const void* p) { return emu::shared_address(p); }

}  // namespace ptx
