// Reductions over the lanes that share a row of a fragment.
#pragma once
#include "base/math.cuh"
#include "ptx/shfl.cuh"

template <int kRowLanes> DEVICE Real row_sum(Real x) {
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) x += ptx::shfl_bfly(x, step);
  return x;
}

template <int kRowLanes> DEVICE Real row_max(Real x) {
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) x = larger(x, ptx::shfl_bfly(x, step));
  return x;
}
