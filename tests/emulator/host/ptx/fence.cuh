#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void fence_mbarrier_init() { emu::fence_mbarrier_init(); }
DEVICE void fence_proxy_async_shared() { emu::fence_proxy_async(); }

}  // namespace ptx
