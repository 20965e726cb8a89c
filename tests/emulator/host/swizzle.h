// The permutations of 16-byte chunks that bulk tensor copies and wgmma apply to shared memory.
#pragma once
#include <cstdint>

namespace emu {

// Where the byte at an offset lies: rows of `width` bytes (128 or 64; 0: unpermuted), every eight
// of them one pattern.
inline uint32_t swizzle(uint32_t offset, int width) {
  if (width == 128) return offset ^ (offset >> 7 & 7) << 4;
  if (width == 64) return offset ^ (offset >> 7 & 3) << 4;
  return offset;
}

}  // namespace emu
