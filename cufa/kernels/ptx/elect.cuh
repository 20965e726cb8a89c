// elect.sync over the full warp: true in one lane, the same one each time (PTX ISA: parallel
// synchronization and communication instructions), sm_90 and later.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE bool elect_sync() {
  u32 elected;
  asm volatile(
      "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
      : "=r"(elected));
  return elected;
}

}  // namespace ptx
