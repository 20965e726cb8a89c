// The two matrix products of attention on wgmma, for the 64 rows of a warpgroup. They are issued as
// one group each. Until ptx::wgmma_wait_group says that it is done, nobody else may touch what it
// reads and writes, in registers and in shared memory.
#pragma once
#include "ptx/wgmma.cuh"
#include "tile/mma_fragment.cuh"

// Of a matrix in slabs of kRows rows of 128 bytes (PTX ISA: matrix descriptor format):
//   bits 0-13   address / 16
//   bits 16-29  bytes from a slab to the next / 16; used of V alone, as columns of O span slabs
//   bits 32-45  bytes from 8 rows to the next 8 / 16
//   bits 62-63  1: the swizzle of 128 bytes
template <int kRows> DEVICE u64 descriptor(u32 address) {
  return u64(address >> 4 & 0x3fff) | u64(kRows * 128 / 16) << 16 | u64(1024 / 16) << 32 |
         u64(1) << 62;
}

// s = a b^T over the first 16 * kSteps columns; a's rows begin at row0, a multiple of 8, as rows of
// other eights are swizzled the same.
template <int kSteps, int kColTiles, int kRowsA, int kDepth>
DEVICE void issue_nt(MmaFragment<1, kColTiles>& s, SwizzledTile<kRowsA, kDepth> a, int row0,
                     SwizzledTile<kColTiles * 8, kDepth> b) {
  const u64 from_a = descriptor<kRowsA>(a.base + row0 * 128);
  const u64 from_b = descriptor<kColTiles * 8>(b.base);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {  // 16 columns are 32 bytes of a row, 64 are a slab
    const u64 a_k = from_a + (k / 4 * (kRowsA * 128) + k % 4 * 32) / 16;
    const u64 b_k = from_b + (k / 4 * (kColTiles * 8 * 128) + k % 4 * 32) / 16;
    if constexpr (kDType == kBFloat16)
      ptx::wgmma_m64k16_bf16_ss<false, false>(s.x[0], a_k, b_k, k > 0);
    else
      ptx::wgmma_m64k16_f16_ss<false, false>(s.x[0], a_k, b_k, k > 0);
  }
  ptx::wgmma_commit_group();
}

// o = p v, plus o if `add`.
template <int kColTiles, int kSteps, int kCols>
DEVICE void issue_nn(MmaFragment<1, kColTiles>& o, const OperandFragment<1, kSteps>& p,
                     SwizzledTile<kSteps * 16, kCols> v, bool add) {
  const u64 from_v = descriptor<kSteps * 16>(v.base);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const u64 v_k = from_v + k * (16 * 128 / 16);  // 16 rows on
    if constexpr (kDType == kBFloat16)
      ptx::wgmma_m64k16_bf16_rs<true>(o.x[0], p.x[0][k], v_k, k > 0 || add);
    else
      ptx::wgmma_m64k16_f16_rs<true>(o.x[0], p.x[0][k], v_k, k > 0 || add);
  }
  ptx::wgmma_commit_group();
}
