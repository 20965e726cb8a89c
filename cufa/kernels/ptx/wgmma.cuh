// wgmma.mma_async m64nNk16, N = 8 * kTiles, float32 accumulators: d = a b, plus d if scale_d (PTX
// ISA: asynchronous warpgroup-level matrix instructions), sm_90a. All of a warpgroup executes it.
//
// Between a product and the wgmma_wait_group that waits for its group nobody touches d, nor an a in
// registers; what it reads of shared memory stays there. A matrix in shared memory is given by its
// descriptor: K-major, or MN-major where kTransA or kTransB. Each warp has 16 rows of d and of an a
// in registers, laid out as in mma.sync: d[i] is the tile of columns 8 i to 8 i + 7.
#pragma once
#include "base/types.cuh"

namespace ptx {

// Before each series of products, even if the series before is still under way: from here on
// products see the registers as they are now.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are under way.
template <int kPending> DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators of each N: as text, and as operands of asm.
#define D_TEXT_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define D_TEXT_64 D_TEXT_32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D_TEXT_72 D_TEXT_64 ", %32, %33, %34, %35"
#define D_TEXT_96 D_TEXT_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D_TEXT_128 D_TEXT_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D_TEXT_136 D_TEXT_128 ", %64, %65, %66, %67"
#define D_TEXT_160 D_TEXT_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D_TEXT_192 D_TEXT_160 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D_TEXT_224 D_TEXT_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define D_TEXT_256 D_TEXT_224 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D_32 D_TILE(0), D_TILE(1), D_TILE(2), D_TILE(3)
#define D_64 D_32, D_TILE(4), D_TILE(5), D_TILE(6), D_TILE(7)
#define D_72 D_64, D_TILE(8)
#define D_96 D_64, D_TILE(8), D_TILE(9), D_TILE(10), D_TILE(11)
#define D_128 D_96, D_TILE(12), D_TILE(13), D_TILE(14), D_TILE(15)
#define D_136 D_128, D_TILE(16)
#define D_160 D_128, D_TILE(16), D_TILE(17), D_TILE(18), D_TILE(19)
#define D_192 D_160, D_TILE(20), D_TILE(21), D_TILE(22), D_TILE(23)
#define D_224 D_192, D_TILE(24), D_TILE(25), D_TILE(26), D_TILE(27)
#define D_256 D_224, D_TILE(28), D_TILE(29), D_TILE(30), D_TILE(31)

// One instruction; the numbers are those of its inputs, which follow N / 2 accumulators.
#define WGMMA_SS(type, n, a_, b_, scale_, trans_a_, trans_b_)                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #scale_ ", 0; "                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " "                 \
               "{" D_TEXT_##n "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #trans_a_ ", %" #trans_b_ "; }"  \
               : D_##n                                                                             \
               : "l"(a), "l"(b), "r"(int(scale_d)), "n"(int(kTransA)), "n"(int(kTransB)))
#define WGMMA_RS(type, n, a0_, a1_, a2_, a3_, b_, scale_, trans_b_)                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #scale_ ", 0; "                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " "                 \
               "{" D_TEXT_##n "}, {%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}, %" #b_ ", "        \
               "p, 1, 1, %" #trans_b_ "; }"                                                        \
               : D_##n                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(scale_d)),            \
                 "n"(int(kTransB)))
#define WGMMA_SS_ANY_N(type)                                                                       \
  if      constexpr (kTiles ==  4) WGMMA_SS(type,  32,  16,  17,  18,  19,  20);                   \
  else if constexpr (kTiles ==  8) WGMMA_SS(type,  64,  32,  33,  34,  35,  36);                   \
  else if constexpr (kTiles == 12) WGMMA_SS(type,  96,  48,  49,  50,  51,  52);                   \
  else if constexpr (kTiles == 16) WGMMA_SS(type, 128,  64,  65,  66,  67,  68);                   \
  else if constexpr (kTiles == 20) WGMMA_SS(type, 160,  80,  81,  82,  83,  84);                   \
  else if constexpr (kTiles == 24) WGMMA_SS(type, 192,  96,  97,  98,  99, 100);                   \
  else if constexpr (kTiles == 28) WGMMA_SS(type, 224, 112, 113, 114, 115, 116);                   \
  else if constexpr (kTiles == 32) WGMMA_SS(type, 256, 128, 129, 130, 131, 132);                   \
  else static_assert(kTiles == 0, "N is a multiple of 32 up to 256")
#define WGMMA_RS_ANY_N(type)                                                                       \
  if      constexpr (kTiles ==  4) WGMMA_RS(type,  32,  16,  17,  18,  19,  20,  21,  22);         \
  else if constexpr (kTiles ==  8) WGMMA_RS(type,  64,  32,  33,  34,  35,  36,  37,  38);         \
  else if constexpr (kTiles ==  9) WGMMA_RS(type,  72,  36,  37,  38,  39,  40,  41,  42);         \
  else if constexpr (kTiles == 12) WGMMA_RS(type,  96,  48,  49,  50,  51,  52,  53,  54);         \
  else if constexpr (kTiles == 16) WGMMA_RS(type, 128,  64,  65,  66,  67,  68,  69,  70);         \
  else if constexpr (kTiles == 17) WGMMA_RS(type, 136,  68,  69,  70,  71,  72,  73,  74);         \
  else if constexpr (kTiles == 20) WGMMA_RS(type, 160,  80,  81,  82,  83,  84,  85,  86);         \
  else if constexpr (kTiles == 24) WGMMA_RS(type, 192,  96,  97,  98,  99, 100, 101, 102);         \
  else if constexpr (kTiles == 28) WGMMA_RS(type, 224, 112, 113, 114, 115, 116, 117, 118);         \
  else if constexpr (kTiles == 32) WGMMA_RS(type, 256, 128, 129, 130, 131, 132, 133, 134);         \
  else static_assert(kTiles == 0, "N is a multiple of 32 up to 256, or 72 or 136")

template <bool kTransA, bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_f16_ss(f32 (&d)[kTiles][4], u64 a, u64 b, bool scale_d) {
  WGMMA_SS_ANY_N("f16");
}

template <bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_f16_rs(f32 (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool scale_d) {
  WGMMA_RS_ANY_N("f16");
}

template <bool kTransA, bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_bf16_ss(f32 (&d)[kTiles][4], u64 a, u64 b, bool scale_d) {
  WGMMA_SS_ANY_N("bf16");
}

template <bool kTransB, int kTiles>
DEVICE void wgmma_m64k16_bf16_rs(f32 (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool scale_d) {
  WGMMA_RS_ANY_N("bf16");
}

#undef D_TEXT_32
#undef D_TEXT_64
#undef D_TEXT_72
#undef D_TEXT_96
#undef D_TEXT_128
#undef D_TEXT_136
#undef D_TEXT_160
#undef D_TEXT_192
#undef D_TEXT_224
#undef D_TEXT_256
#undef D_TILE
#undef D_32
#undef D_64
#undef D_72
#undef D_96
#undef D_128
#undef D_136
#undef D_160
#undef D_192
#undef D_224
#undef D_256
#undef WGMMA_SS
#undef WGMMA_RS
#undef WGMMA_SS_ANY_N
#undef WGMMA_RS_ANY_N

}  // namespace ptx
