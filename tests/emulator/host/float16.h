// 16-bit floats, to nearest, ties to even.
#pragma once
#include <cstdint>

#include "emu.h"

namespace emu {

inline float widen(uint16_t x, Half type) {
  if (type == Half::bf16) return bits<float>(uint32_t(x) << 16);
  return float(bits<_Float16>(x));
}

// Of a NaN the ISA says only that it stays one; cards make this one (cuda_fp16.hpp, cuda_bf16.hpp).
inline uint16_t narrow(float x, Half type) {
  if (x != x) return 0x7fff;
  if (type == Half::f16) return bits<uint16_t>(_Float16(x));
  const uint32_t u = bits<uint32_t>(x);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

}  // namespace emu
