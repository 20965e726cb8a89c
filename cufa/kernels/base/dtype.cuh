// Storage types and the type that everything is computed in.
#pragma once
#include "base/config.cuh"
#include "ptx/cvt.cuh"

template <DType> struct Storage;
template <> struct Storage<kFloat16> { using type = u16; };   // bits
template <> struct Storage<kBFloat16> { using type = u16; };  // bits: the upper half of a float32
template <> struct Storage<kFloat32> { using type = f32; };
template <> struct Storage<kFloat64> { using type = f64; };
template <> struct Storage<kNone> { using type = f32; };      // never read
template <bool> struct Accumulator { using type = f32; };
template <> struct Accumulator<true> { using type = f64; };

using Elem = Storage<kDType>::type;
using Real = Accumulator<kDType == kFloat64>::type;
constexpr int kRealVec = 16 / sizeof(Real);  // as many as one access moves

template <DType kFrom> DEVICE Real to_real(typename Storage<kFrom>::type x) {
  if constexpr (kFrom == kFloat16) return ptx::cvt_f32_f16(x);
  else if constexpr (kFrom == kBFloat16) return ptx::mov_f32(u32(x) << 16);
  else return Real(x);
}

// Rounds to nearest, ties to even.
template <DType kTo> DEVICE typename Storage<kTo>::type from_real(Real x) {
  if constexpr (kTo == kFloat16) {
    return ptx::cvt_rn_f16_f32(f32(x));
  } else if constexpr (kTo == kBFloat16) {  // by hand: the instruction came with sm_80
    const u32 bits = ptx::mov_b32(f32(x));
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return u16(nan ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else {
    return typename Storage<kTo>::type(x);
  }
}
DEVICE Elem to_elem(Real x) { return from_real<kDType>(x); }
