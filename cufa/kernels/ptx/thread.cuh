// Who am I (%tid, %ctaid, %nctaid), and where is dynamic shared memory.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE int tid_x() { return threadIdx.x; }
DEVICE u32 ctaid_x() { return blockIdx.x; }
DEVICE u32 nctaid_x() { return gridDim.x; }
DEVICE int ctaid_y() { return blockIdx.y; }
DEVICE int ctaid_z() { return blockIdx.z; }

DEVICE u8* dynamic_smem() {
  extern __shared__ __align__(1024) u8 smem[];
  return smem;
}

// Address in the shared window, as instructions take it.
DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

}  // namespace ptx
