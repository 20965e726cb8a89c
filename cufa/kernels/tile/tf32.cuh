// float32 as the sum of two TF32 numbers, in which tensor cores multiply it.
// Source: Ootomo and Yokota, arXiv:2203.03341.
#pragma once
#include "ptx/cvt.cuh"

// Whether products of tensor cores may take a number: 0, or of a size from 2^-112, below which the
// lower part lacks digits, to below 2^31, so that no sum of products of three of them overflows.
DEVICE bool splits(f32 x) {
  constexpr u32 kLeast = (127 - 112) << 23, kSizes = (112 + 31) << 23;
  const u32 size = ptx::mov_b32(x) & 0x7fffffff;
  return size == 0 || size - kLeast < kSizes;
}
