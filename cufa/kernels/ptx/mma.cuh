// mma.sync.aligned: d += a b. Operands of 16 bits or TF32 with float32 accumulators, and float64.
#pragma once
#include "base/types.cuh"

namespace ptx {

// 16 bits: sm_80 and later.
DEVICE void mma_m16n8k16_f16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16_bf16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a[2 i + h] is row lane / 4 + 8 h, b[i] column lane / 4, both at k = lane % 4 + 4 i; d as for 16
// bits. Of the float32 in a and b the lowest 13 bits are not looked at. sm_80 and later.
DEVICE void mma_m16n8k8_tf32(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Lanes hold what they hold for TF32. sm_90 and later.
DEVICE void mma_m16n8k8_f64(f64 (&d)[4], f64 a0, f64 a1, f64 a2, f64 a3, f64 b0, f64 b1) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a0), "d"(a1), "d"(a2), "d"(a3), "d"(b0), "d"(b1));
}

// a is row lane / 4, b column lane / 4, both at k = lane % 4; d0, d1 are columns 2 (lane % 4) and
// the next of row lane / 4. sm_80 and later.
DEVICE void mma_m8n8k4_f64(f64& d0, f64& d1, f64 a, f64 b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+d"(d0), "+d"(d1)
      : "d"(a), "d"(b));
}

}  // namespace ptx
