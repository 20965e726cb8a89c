// ldmatrix.sync.aligned.m8n8.x4 (PTX ISA: warp-level matrix instructions), sm_75 and later.
// Lane i gives the address of row i % 8 of matrix i / 8; r[m] is this lane's pair of matrix m.
#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

}  // namespace ptx
