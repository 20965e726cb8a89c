// mbarrier.* on 8 bytes of shared memory (PTX ISA: mbarrier), sm_90 and later. A phase completes
// when `count` threads have arrived and all bytes that were expected have landed.
#pragma once
#include "base/types.cuh"

namespace ptx {

// fence_mbarrier_init and a barrier of the block come between this and any use.
DEVICE void mbarrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

DEVICE void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Of a box that reaches past the tensor all bytes count: they land as zeros.
DEVICE void mbarrier_arrive_expect_tx(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// Has the phase of this parity completed? Phase 0 is under way at first, so 1 is true at once.
// Sleeps for a while where it has not; to be called again then.
DEVICE bool mbarrier_try_wait_parity(u32 bar, int parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done;
}

}  // namespace ptx
