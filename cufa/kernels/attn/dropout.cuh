// Which weights dropout keeps: cufa/dropout.py, whose docstring has the layout, bit for bit.
// Source: Salmon et al., SC 2011: Philox4x32-10.
#pragma once
#include "base/types.cuh"

struct DropoutBits {
  u32 word[4];

  // Whether the weight `down` rows and `right` columns of 8 away from the first is kept.
  DEVICE bool keep(bool down, bool right, u32 threshold) const {
    const u32 left_word = down ? word[2] : word[0], right_word = down ? word[3] : word[1];
    return (right ? right_word : left_word) >= threshold;
  }
};

DEVICE DropoutBits philox4x32(u32 a, u32 b, u32 c, u32 d, u32 key_a, u32 key_b) {
  constexpr u32 kMultiplierA = 0xd2511f53, kMultiplierC = 0xcd9e8d57;
  constexpr u32 kStepA = 0x9e3779b9, kStepB = 0xbb67ae85;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 ab = u64(a) * kMultiplierA, cd = u64(c) * kMultiplierC;  // mul.wide.u32
    a = u32(cd >> 32) ^ key_a ^ b;
    b = u32(cd);
    c = u32(ab >> 32) ^ key_b ^ d;
    d = u32(ab);
    key_a += kStepA;
    key_b += kStepB;
  }
  return {{a, b, c, d}};
}

// What rows `row` and `row` + 8 and columns `column` and `column` + 8 of a head are compared with:
// of a 16x16 tile in tensor cores' fragments, transposed or not, a thread holds two such fours.
// `row % 16` and `column % 16` are below 8. Nothing here is below 0.
DEVICE DropoutBits dropout_bits(u64 seed, int batch, int head, int row, int column) {
  const u32 row_pair = u32(row >> 4) * 8 + u32(row & 7);
  const u32 column_pair = u32(column >> 4) * 8 + u32(column & 7);
  return philox4x32(column_pair, row_pair, u32(head), u32(batch), u32(seed), u32(seed >> 32));
}

// One weight at any place, for a thread that holds no others of its counter.
DEVICE bool dropout_keeps(u64 seed, int batch, int head, int row, int column, u32 threshold) {
  const DropoutBits bits = dropout_bits(seed, batch, head, row, column);
  return bits.keep(row >> 3 & 1, column >> 3 & 1, threshold);
}
