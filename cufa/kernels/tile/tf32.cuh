// float32 as the sum of two TF32 numbers, in which tensor cores multiply it.
// Source: Ootomo and Yokota, arXiv:2203.03341.
#pragma once
#include "base/math.cuh"

// Of a smaller number the lower part is denormal and lacks digits.
constexpr f32 kLeastSplit = 0x1p-112f;
// No sum of products of three numbers below it overflows, nor of one and D below the latter.
constexpr f32 kMostSplit = 0x1p31f, kMostDelta = 0x1p62f;

// Whether products of tensor cores may take a number.
DEVICE bool splits(f32 x) {
  const f32 size = abs_of(x);
  return size == 0.f || (size >= kLeastSplit && size < kMostSplit);
}
