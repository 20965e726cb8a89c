// The warps of a block in two crews of kCrew each. Warp i of the one and warp i of the other are
// partners: both have the 16 * kKeyTiles keys of the block's that begin with 16 * kKeyTiles * i.
#pragma once
#include "base/math.cuh"
#include "ptx/barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/key_rows.cuh"
#include "tile/transposed.cuh"

constexpr int kCrew = kThreads / 64;
constexpr int kKeyTiles = kBlockN / (16 * kCrew);
static_assert(kThreads % 64 == 0 && kBlockN == 16 * kKeyTiles * kCrew);

// Scores of a warp's keys, transposed: S^T = K Q^T. So P^T and dS^T are left operands of the
// products that end in dV and dK, as they are. To those who ask, rows are queries and columns keys,
// as in any fragment of scores.
template <int kQueryTiles>
using KeyScores = Transposed<KeyRows<MmaFragment<kKeyTiles, kQueryTiles>, kCrew>>;

// Sums over queries.
template <int kColTiles> using KeySums = KeyRows<MmaFragment<kKeyTiles, kColTiles>, kCrew>;

// Operands on their way from the warps of one crew to their partners, lane by lane: 16 queries at a
// time, kBlockM in all. A barrier of all threads gives their places back.
struct Handover {
  static constexpr int kBytes = 2 * kBlockM * kBlockN;

  Vec<u32, 4>* base;

  // What is handed over of 16 queries and 16 keys: number `queries` of the former, m of the latter.
  DEVICE Vec<u32, 4>& at(int queries, int m) const {
    const int place = (warp() % kCrew * (kBlockM / 16) + queries) * kKeyTiles + m;
    return base[place * 32 + lane()];
  }
  template <int kSteps>
  DEVICE void give(const OperandFragment<kKeyTiles, kSteps>& operand, int first) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const u32(&x)[4] = operand.x[m][k];
        at(first + k, m) = {x[0], x[1], x[2], x[3]};
      }
  }

  // Partners meet once part `part` of what is handed over between two barriers of the block is
  // there. Who gives need not wait; but racecheck does not follow bar.arrive, and sees hazards.
  DEVICE static void meet(int part) {
    ptx::bar_sync(1 + part * kCrew + uniform(warp()) % kCrew, 64);
  }
};

// Puts an operand, a row for each of a warp's keys, where `matmul_tn` reads it: 16 columns for each
// step, from step `first` on.
template <int kSteps, int kRows, int kCols>
DEVICE void store_operand(SwizzledTile<kRows, kCols> to,
                          const OperandFragment<kKeyTiles, kSteps>& operand, int first) {
  using Reader = TileReader<true, kRows, kCols>;
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kArch >= 90) {
        const Reader to_rows(to, first_key<kCrew>() + (lane() & 15), lane() >> 4);
        ptx::stmatrix_x4(to_rows.at(16 * m, first + k), operand.x[m][k]);
      } else {
        const Reader to_rows(to, first_key<kCrew>() + lane() / 4, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 chunk = to_rows.at(16 * m + 8 * (i % 2), first + k) ^ i / 2 * 16;
          shared<u32>(chunk + 4 * (lane() % 4)) = operand.x[m][k][i];
        }
      }
    }
}
