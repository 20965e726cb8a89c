// cp.async.cg of 16 bytes with zero fill, and its groups; sm_80 and later.
#pragma once
#include "base/types.cuh"

namespace ptx {

// Copies src_bytes (0 to 16) and fills up to 16 with zeros. Both addresses are multiples of 16.
DEVICE void cp_async_cg_16(u32 dst, const void* src, int src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(src_bytes)
               : "memory");
}

DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending> DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
