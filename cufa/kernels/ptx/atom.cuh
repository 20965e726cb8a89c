// atom.global.inc.u32 (PTX ISA: atom): adds 1 to a count in global memory, 0 after `last`; returns
// what it was before.
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
