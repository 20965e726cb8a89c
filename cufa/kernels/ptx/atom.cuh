// atom.global.inc.u32 (PTX ISA: atom): counts in global memory, from 0 to `last` and on with 0;
// returns the count so far.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE u32 atom_inc(u32* count, u32 last) {
  u32 before;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(count), "r"(last)
               : "memory");
  return before;
}

}  // namespace ptx
