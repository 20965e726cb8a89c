// The words of attn/dropout.cuh, and a mask of one element for each thread.
//
//   in    counter [4, n], key [2, n] u32   seed [n] u64   batch, head, row, column [n]
//         threshold [n] u32
//   out   philox [4, n] u32   keep [n] u8   keep_tile [4, n] u8: rows and columns 8 apart, from
//         the first of both
//   grid  n / 128   block 128
#include "attn/dropout.cuh"
#include "ptx/thread.cuh"

struct DropoutParams {
  const u32 *counter, *key;
  const u64* seed;
  const i32 *batch, *head, *row, *column;
  const u32* threshold;
  u32* philox;
  u8 *keep, *keep_tile;
  i32 n;
};

extern "C" __global__ void __launch_bounds__(128)
dropout(const __grid_constant__ DropoutParams p) {
  const int i = 128 * ptx::ctaid_x() + ptx::tid_x(), n = p.n;
  const u32 *counter = p.counter + i, *key = p.key + i;
  const DropoutBits bits =
      philox4x32(counter[0], counter[n], counter[2 * n], counter[3 * n], key[0], key[n]);
  const u64 seed = p.seed[i];
  const int batch = p.batch[i], head = p.head[i], row = p.row[i], column = p.column[i];
  const u32 threshold = p.threshold[i];
  p.keep[i] = dropout_keeps(seed, batch, head, row, column, threshold);
  const DropoutBits tile = dropout_bits(seed, batch, head, row & ~8, column & ~8);
  for (int word = 0; word < 4; ++word) {
    p.philox[word * n + i] = bits.word[word];
    p.keep_tile[word * n + i] = tile.keep(word / 2, word % 2, threshold);
  }
}
