// Fences between the ways to reach shared memory (PTX ISA: membar, fence), sm_90 and later.
#pragma once
#include "base/types.cuh"

namespace ptx {

// After mbarrier_init, by the thread that did it: TMA sees the barriers too.
DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By every thread that has written to shared memory, before the barrier that lets wgmma or TMA
// read it.
DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
