#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void cp_async_bulk_load(u32 dst, const void* src, int bytes, u32 bar) {
  emu::bulk_load(dst, src, bytes, bar);
}
DEVICE void cp_reduce_async_bulk_add_f32(f32* dst, u32 src, int bytes) {
  emu::bulk_reduce_add(dst, src, bytes);
}
DEVICE void cp_async_bulk_commit_group() { emu::bulk_commit_group(); }
template <int kPending>
DEVICE void cp_async_bulk_wait_group() {
  emu::bulk_wait_group(kPending);
}
template <int kPending>
DEVICE void cp_async_bulk_wait_group_read() {
  emu::bulk_wait_group(kPending);
}

}  // namespace ptx
