#pragma once
#include "base/types.cuh"

namespace ptx {

template <int kRegs>
DEVICE void setmaxnreg_inc() {
  emu::setmaxnreg(kRegs, true);
}
template <int kRegs>
DEVICE void setmaxnreg_dec() {
  emu::setmaxnreg(kRegs, false);
}

}  // namespace ptx
