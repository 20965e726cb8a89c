// clz (PTX ISA: integer arithmetic instructions): how many bits above the highest 1; 64 of 0.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE int clz(u64 x) {
  int count;
  asm("clz.b64 %0, %1;" : "=r"(count) : "l"(x));
  return count;
}

}  // namespace ptx
