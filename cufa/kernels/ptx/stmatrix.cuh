// stmatrix.sync.aligned.m8n8.x4 (PTX ISA: warp-level matrix instructions), sm_90 and later.
// The inverse of ldmatrix: lane i gives the address of row i % 8 of matrix i / 8.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void stmatrix_x4(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

DEVICE void stmatrix_x4_trans(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace ptx
