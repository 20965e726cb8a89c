// The mask and the bias of a block of scores, loaded while the scores are computed.
#pragma once
#include "attn/mask_tiles.cuh"
#include "attn/score_mod.cuh"

// Two columns side by side, in no more registers than they come in.
template <class T> struct ScorePair {
  T x[2];

  DEVICE void set(T a, T b) { x[0] = a, x[1] = b; }
  DEVICE T at(int i) const { return x[i]; }
};
template <> struct ScorePair<u16> {
  u32 x;

  DEVICE void set(u16 a, u16 b) { x = a | u32(b) << 16; }
  DEVICE u16 at(int i) const { return x >> 16 * i; }
};

// The biases of a fragment's scores.
template <class Fragment> struct BiasTile {
  ScorePair<Bias> x[Fragment::kRows][Fragment::kCols / 2];

  // key0 is the key of column 0. Keys past the end get another's.
  DEVICE void load(const Params& p, const Tile& tile, int key0) {
    const bool runs = key0 + kBlockN <= p.seqlen_k && has_runs<Bias, 2>(p.bias, p.bias_stride, p);
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const ScoreRow<Bias> row(p.bias, p.bias_stride, p, tile, tile.row0 + Fragment::row(r));
      if (runs) {
        // One address for the row; row.run would make one for each pair.
        const auto* from = reinterpret_cast<const Vec<Bias, 2>*>(row.row + key0 + Fragment::col(0));
#pragma unroll
        for (int c = 0; c < Fragment::kCols; c += 2) {
          const Vec<Bias, 2> pair = from[(Fragment::col(c) - Fragment::col(0)) / 2];
          x[r][c / 2].set(pair.x[0], pair.x[1]);
        }
      } else {
#pragma unroll
        for (int c = 0; c < Fragment::kCols; c += 2) {
          const int key = key0 + Fragment::col(c), end = p.seqlen_k - 1;
          x[r][c / 2].set(row.at(min_of(key, end)), row.at(min_of(key + 1, end)));
        }
      }
    }
  }
  DEVICE Bias at(int r, int c) const { return x[r][c / 2].at(c % 2); }
};

// kMasks: the mask may hide keys of the block.
template <class Fragment, bool kMasks> struct ScoreInputs {
  // Registers do not suffice for float64, which is read where it is used.
  static constexpr bool kLoadsBias = kBias != kNone && kBias != kFloat64;

  BiasTile<Fragment> bias;
  u32 mask[Fragment::kRows];  // bit c for column c: whether the key is visible

  DEVICE void load(const Params& p, const Tile& tile, const MaskTiles& masks, KeyBlock block) {
    if constexpr (kLoadsBias) bias.load(p, tile, block.n * kBlockN);
    if constexpr (kMasks) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r)  // hidden blocks may have none
        mask[r] = block.mask == kHidden ? 0 : masks.bits(p, block.n, Fragment::row(r));
    }
  }

  // Scale, softcap, ALiBi and bias.
  DEVICE void modify(Fragment& s, const Params& p, const Tile& tile, KeyBlock block) const {
    const int key0 = block.n * kBlockN;
    if constexpr (kLoadsBias)
      score_mod(s, p, tile, key0, [&](int r, int c) { return bias_of<kBias>(bias.at(r, c)); });
    else score_mod(s, p, tile, key0);
  }

  // Scores of keys that the mask hides become -inf.
  DEVICE void hide(Fragment& s) const {
    if constexpr (!kMasks) return;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
#pragma unroll
      for (int c = 0; c < Fragment::kCols; ++c)
        if (!(mask[r] >> c & 1)) s.at(r, c) = -infinity();
  }
};
