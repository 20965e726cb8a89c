// The mask and the bias of a block of scores, loaded while the scores are computed.
#pragma once
#include "attn/mask.cuh"
#include "attn/score_mod.cuh"

// Two columns side by side, in no more registers than they come in.
template <class T> struct ScorePair {
  T x[2];

  DEVICE void set(T a, T b) { x[0] = a, x[1] = b; }
  DEVICE T at(int i) const { return x[i]; }
};
template <> struct ScorePair<u8> {
  u16 x;

  DEVICE void set(u8 a, u8 b) { x = a | b << 8; }
  DEVICE u8 at(int i) const { return x >> 8 * i; }
};
template <> struct ScorePair<u16> {
  u32 x;

  DEVICE void set(u16 a, u16 b) { x = a | u32(b) << 16; }
  DEVICE u16 at(int i) const { return x >> 16 * i; }
};

// What the scores of a fragment meet of an array.
template <class T, class Fragment> struct ScoreTile {
  ScorePair<T> x[Fragment::kRows][Fragment::kCols / 2];

  // key0 is the key of column 0. Keys past the end get another's.
  DEVICE void load(const void* array, const ScoreStrides& s, const Params& p, const Tile& tile,
                   int key0) {
    const bool runs = has_runs<T, 2>(array, s, p);
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const ScoreRow<T> row(array, s, p, tile, tile.row0 + Fragment::row(r));
#pragma unroll
      for (int c = 0; c < Fragment::kCols; c += 2) {
        const int key = key0 + Fragment::col(c), end = p.seqlen_k - 1;
        if (runs) {
          const Vec<T, 2> run = row.template run<2>(min_of(key, end - 1));
          x[r][c / 2].set(run.x[0], run.x[1]);
        } else {
          x[r][c / 2].set(row.at(min_of(key, end)), row.at(min_of(key + 1, end)));
        }
      }
    }
  }
  DEVICE auto at(int r, int c) const { return x[r][c / 2].at(c % 2); }
};

template <class Fragment> struct ScoreInputs {
  // Registers do not suffice for more, which is read where it is used.
  static constexpr bool kLoadsBias = kBias != kNone && kBias != kFloat64;
  static constexpr bool kLoadsMask = kMask && kBias == kNone;

  ScoreTile<u8, Fragment> mask;
  ScoreTile<Bias, Fragment> bias;

  // The mask only where it `hides` a key.
  DEVICE void load(const Params& p, const Tile& tile, int key0, bool hides) {
    if constexpr (kLoadsBias) bias.load(p.bias, p.bias_stride, p, tile, key0);
    if constexpr (kLoadsMask) {
      if (hides) mask.load(p.mask, p.mask_stride, p, tile, key0);
    }
  }
  DEVICE void modify(Fragment& s, const Params& p, const Tile& tile, int key0) const {
    if constexpr (kLoadsBias)
      score_mod(s, p, tile, key0, [&](int r, int c) { return bias_of<kBias>(bias.at(r, c)); });
    else score_mod(s, p, tile, key0);
  }
  DEVICE void hide(Fragment& s, const Params& p, const Tile& tile, int key0) const {
    if constexpr (kLoadsMask)
      apply_mask(s, p, tile, key0, [&](int r, int c) { return mask.at(r, c); });
    else apply_mask(s, p, tile, key0);
  }
};
