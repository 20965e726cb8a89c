// Integer names and the few words that every kernel needs; NVRTC has none of the standard headers.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;
using f64 = double;

#define DEVICE __device__ __forceinline__
#define CALLED __device__ __noinline__  // what is rare: it shares no registers with what is not

template <class T> DEVICE constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE constexpr T max_of(T a, T b) { return a < b ? b : a; }
DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// kCount values that are loaded and stored by one instruction.
template <class T, int kCount> struct alignas(sizeof(T) * kCount) Vec {
  T x[kCount];
};
