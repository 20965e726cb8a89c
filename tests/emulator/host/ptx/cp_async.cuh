#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void cp_async_cg_16(u32 dst, const void* src, int src_bytes) {
  emu::cp_async(dst, src, 16, src_bytes);
}
DEVICE void cp_async_commit_group() { emu::cp_async_commit_group(); }
template <int kPending>
DEVICE void cp_async_wait_group() {
  emu::cp_async_wait_group(kPending);
}

}  // namespace ptx
