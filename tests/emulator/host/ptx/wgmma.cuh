#pragma once
#include "base/types.cuh"

namespace ptx {

DEVICE void wgmma_fence() { emu::wgmma_fence(); }
DEVICE void wgmma_commit_group() { emu::wgmma_commit_group(); }
template <int kPending>
DEVICE void wgmma_wait_group() {
  emu::wgmma_wait_group(kPending);
}

template <bool kTransA, bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_f16_ss(f32 (&d)[kTiles][4], u64 a, u64 b, bool scale_d) {
  emu::wgmma_issue({emu::Half::f16, kTiles, d, nullptr, a, b, kTransA, kTransB, scale_d});
}
template <bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_f16_rs(f32 (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool scale_d) {
  emu::wgmma_issue({emu::Half::f16, kTiles, d, a, 0, b, false, kTransB, scale_d});
}
template <bool kTransA, bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_bf16_ss(f32 (&d)[kTiles][4], u64 a, u64 b, bool scale_d) {
  emu::wgmma_issue({emu::Half::bf16, kTiles, d, nullptr, a, b, kTransA, kTransB, scale_d});
}
template <bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_bf16_rs(f32 (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool scale_d) {
  emu::wgmma_issue({emu::Half::bf16, kTiles, d, a, 0, b, false, kTransB, scale_d});
}

}  // namespace ptx
