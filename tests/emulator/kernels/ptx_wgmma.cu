// wgmma m64nNk16, N = 8 CUFA_TILES, five in a row into the same accumulators.
//
//   in    image [words, 4]      what shared memory holds: A, unless in registers, and B
//         a [5, 128, 4]         A in registers, pairs of 16-bit floats
//         a_at, b_at [5]        byte at which the operands of each product start
//         scale_d [5]           whether a product is added to what is there
//         c [128, N / 2] f32
//   out   d [128, N / 2] f32
//   grid  1   block 128   smem 16 words
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/thread.cuh"
#include "ptx/wgmma.cuh"

constexpr int kTiles = CUFA_TILES;
constexpr int kSteps = 5;

using Chunk = Vec<u32, 4>;

struct WgmmaParams {
  const Chunk* image;
  const u32* a;
  const i32 *a_at, *b_at, *scale_d;
  const f32* c;
  f32* d;
  i32 words;
  i32 bf16, a_in_registers, trans_a, trans_b;
  i32 a_leading, a_stride, a_swizzle;  // bytes, bytes, field of the descriptor
  i32 b_leading, b_stride, b_swizzle;
};

struct Accumulators {
  f32 x[kTiles][4];
};
struct Operands {
  u32 x[kSteps][4];
};

// Matrix descriptor (PTX ISA: asynchronous wgmma, matrix descriptor format).
DEVICE u64 descriptor(u32 address, int leading, int stride, int swizzle) {
  return u64(address >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 |
         u64(swizzle) << 62;
}
DEVICE u64 descriptor_a(const WgmmaParams& p, u32 smem, int step) {
  return descriptor(smem + p.a_at[step], p.a_leading, p.a_stride, p.a_swizzle);
}
DEVICE u64 descriptor_b(const WgmmaParams& p, u32 smem, int step) {
  return descriptor(smem + p.b_at[step], p.b_leading, p.b_stride, p.b_swizzle);
}

template <bool kBf16, bool kTransA, bool kTransB>
DEVICE void products_ss(Accumulators& d, const WgmmaParams& p, u32 smem) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const u64 a = descriptor_a(p, smem, i), b = descriptor_b(p, smem, i);
    if constexpr (kBf16)
      ptx::wgmma_m64k16_bf16_ss<kTransA, kTransB>(d.x, a, b, p.scale_d[i]);
    else
      ptx::wgmma_m64k16_f16_ss<kTransA, kTransB>(d.x, a, b, p.scale_d[i]);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

template <bool kBf16, bool kTransB>
DEVICE void products_rs(Accumulators& d, const Operands& a, const WgmmaParams& p, u32 smem) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const u64 b = descriptor_b(p, smem, i);
    if constexpr (kBf16) ptx::wgmma_m64k16_bf16_rs<kTransB>(d.x, a.x[i], b, p.scale_d[i]);
    else ptx::wgmma_m64k16_f16_rs<kTransB>(d.x, a.x[i], b, p.scale_d[i]);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

template <bool kBf16>
DEVICE void products(Accumulators& d, const Operands& a, const WgmmaParams& p, u32 smem) {
  if (p.a_in_registers) {
    if (p.trans_b) products_rs<kBf16, true>(d, a, p, smem);
    else products_rs<kBf16, false>(d, a, p, smem);
  } else if (p.trans_a) {
    if (p.trans_b) products_ss<kBf16, true, true>(d, p, smem);
    else products_ss<kBf16, true, false>(d, p, smem);
  } else {
    if (p.trans_b) products_ss<kBf16, false, true>(d, p, smem);
    else products_ss<kBf16, false, false>(d, p, smem);
  }
}

extern "C" __global__ void __launch_bounds__(128)
ptx_wgmma(const __grid_constant__ WgmmaParams p) {
  const int tid = ptx::tid_x();
  Chunk* shared = reinterpret_cast<Chunk*>(ptx::dynamic_smem());
  for (int i = tid; i < p.words; i += 128) shared[i] = p.image[i];
  Operands a;
  for (int i = 0; i < kSteps; ++i)
    for (int j = 0; j < 4; ++j) a.x[i][j] = p.a[4 * (128 * i + tid) + j];
  Accumulators d;
  for (int i = 0; i < kTiles; ++i)
    for (int j = 0; j < 4; ++j) d.x[i][j] = p.c[4 * (kTiles * tid + i) + j];
  ptx::fence_proxy_async_shared();
  ptx::bar_sync();
  if (p.bf16) products<true>(d, a, p, ptx::smem_address(shared));
  else products<false>(d, a, p, ptx::smem_address(shared));
  for (int i = 0; i < kTiles; ++i)
    for (int j = 0; j < 4; ++j) p.d[4 * (kTiles * tid + i) + j] = d.x[i][j];
}
