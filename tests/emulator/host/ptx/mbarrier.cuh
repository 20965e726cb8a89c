#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void mbarrier_init(u32 bar, int count) { emu::mbarrier_init(bar, count); }
DEVICE void mbarrier_arrive(u32 bar) { emu::mbarrier_arrive(bar, 0); }
DEVICE void mbarrier_arrive_expect_tx(u32 bar, int bytes) { emu::mbarrier_arrive(bar, bytes); }
DEVICE bool mbarrier_try_wait_parity(u32 bar, int parity) {
  return emu::mbarrier_try_wait_parity(bar, parity);
}

}  // namespace ptx
