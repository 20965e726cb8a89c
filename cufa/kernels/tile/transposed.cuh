// A fragment as it is seen from the side: its rows are the columns of what it is made of.
#pragma once
#include "base/types.cuh"

template <class Fragment> struct Transposed : Fragment {
  static constexpr int kRows = Fragment::kCols, kCols = Fragment::kRows;
  static constexpr int kRowLanes = 32 / Fragment::kRowLanes, kRun = 1;
  static constexpr int kRowHalf = Fragment::kColHalf, kColHalf = Fragment::kRowHalf;

  DEVICE auto& at(int r, int c) { return Fragment::at(c, r); }
  DEVICE static int row(int r) { return Fragment::col(r); }
  DEVICE static int col(int c) { return Fragment::row(c); }
};
