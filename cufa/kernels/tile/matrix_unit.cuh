// What multiplies, and the fragments that its products are held in.
#pragma once
#include "tile/exact_fragment.cuh"
#include "tile/mma_fragment.cuh"
#include "tile/wide_fragment.cuh"

// kWide: numbers of 32 or 64 bits, else of 16.
template <bool kWide> struct TensorCores {
  template <int kRowTiles, int kColTiles> using Scores = MmaFragment<kRowTiles, kColTiles>;
  template <int kRowTiles, int kColTiles> using Output = MmaFragment<kRowTiles, kColTiles>;
};
template <> struct TensorCores<true> {
  template <int kRowTiles, int kColTiles>
  using Scores = WideFragment<kRowTiles, kColTiles, false>;
  template <int kRowTiles, int kColTiles>
  using Output = WideFragment<kRowTiles, kColTiles, true>;
};

struct CudaCores {
  template <int kRowTiles, int kColTiles> using Scores = ExactScores<kRowTiles, kColTiles>;
  template <int kRowTiles, int kColTiles>
  using Output = WideFragment<kRowTiles, kColTiles, true>;
};
