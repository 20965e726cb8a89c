// cp.async.bulk.tensor: a box of a tensor to or from shared memory, by one thread (PTX ISA: tensor
// data movement), sm_90 and later. c0 is along the contiguous dimension, a multiple of 16 bytes:
// otherwise, and where a store begins at a negative coordinate, an H200 reports an illegal
// instruction (seen, not found in the ISA).
#pragma once
#include "base/types.cuh"

namespace ptx {

// CUtensorMap, made by the driver; a member of the kernel's __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Zeros outside the tensor. The bytes of the whole box count towards `bar`.
DEVICE void cp_async_bulk_tensor_4d_load(u32 dst, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar)
      : "memory");
}

DEVICE void cp_async_bulk_tensor_5d_load(u32 dst, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, int c4, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(dst),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(bar)
      : "memory");
}

// Nothing outside the tensor is written. Belongs to the thread's bulk group: bulk.cuh waits.
DEVICE void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1, int c2, int c3,
                                          u32 src) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src)
      : "memory");
}

DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap& map, int c0, int c1, int c2, int c3,
                                          int c4, u32 src) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
      "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src)
      : "memory");
}

}  // namespace ptx
