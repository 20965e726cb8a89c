// cp.async.bulk and cp.reduce.async.bulk of contiguous bytes, by one thread, and the bulk groups of
// a thread (PTX ISA: non-tensor bulk copy), sm_90 and later. Addresses and bytes: multiples of 16.
#pragma once
#include "base/types.cuh"

namespace ptx {

// The bytes count towards `bar`.
DEVICE void cp_async_bulk_load(u32 dst, const void* src, int bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}

// dst[i] += src[i], each in one piece, in no order.
DEVICE void cp_reduce_async_bulk_add_f32(f32* dst, u32 src, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}

DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are not yet done.
template <int kPending> DEVICE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Likewise, done with reading: their shared memory may be written again, or end with the block.
template <int kPending> DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
