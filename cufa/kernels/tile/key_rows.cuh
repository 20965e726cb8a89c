// Fragments that have a row for each key, where kWarps warps divide the keys of a block, and others
// have the same again.
#pragma once
#include "tile/mma_fragment.cuh"

template <int kWarps> DEVICE int first_key() { return kBlockN / kWarps * (warp() % kWarps); }

template <class Fragment, int kWarps> struct KeyRows : Fragment {
  static_assert(kBlockN == 8 * Fragment::kRows * kWarps);
  DEVICE static int row(int r) { return first_key<kWarps>() + lane() / 4 + 8 * r; }
};
