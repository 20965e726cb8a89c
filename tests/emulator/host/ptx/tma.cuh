#pragma once
#include "base/types.cuh"

namespace ptx {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

DEVICE void cp_async_bulk_tensor_4d_load(u32 dst, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, u32 bar) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tensor_load(dst, &map, coords, 4, bar);
}
DEVICE void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1, int c2, int c3,
                                          u32 src) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tensor_store(&map, coords, 4, src);
}
DEVICE void cp_async_bulk_tensor_5d_load(u32 dst, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, int c4, u32 bar) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tensor_load(dst, &map, coords, 5, bar);
}
DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap& map, int c0, int c1, int c2, int c3,
                                          int c4, u32 src) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tensor_store(&map, coords, 5, src);
}

}  // namespace ptx
