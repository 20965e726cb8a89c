// setmaxnreg: registers move between warpgroups (PTX ISA: miscellaneous instructions), sm_90a.
// All warps of a warpgroup execute it; kRegs is a multiple of 8 from 24 to 256. Without the second
// argument of __launch_bounds__ ptxas ignores it (C7508).
#pragma once
#include "base/types.cuh"

namespace ptx {

// Waits until others have given up enough.
template <int kRegs> DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}

template <int kRegs> DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}

}  // namespace ptx
