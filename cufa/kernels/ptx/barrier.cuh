// bar.sync, bar.red and bar.arrive over the block or a part of it, bar.warp.sync over the warp
// (PTX ISA: parallel synchronization and communication instructions).
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void bar_sync() { __syncthreads(); }
DEVICE bool bar_red_or(bool x) { return __syncthreads_or(x); }  // whether x holds in any thread
DEVICE void bar_warp_sync() { __syncwarp(); }

// Barrier `id` (1 to 15; bar_sync() is 0) completes when `threads` have come, whole warps only,
// be it to wait or just to say so.
DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE bool bar_red_or(bool x, int id, int threads) {
  u32 any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(u32(x)), "r"(id), "r"(threads)
      : "memory");
  return any;
}
DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
