// Reductions over groups of threads that divide the keys of a block and share its rows, through
// shared memory. Group g is threads g * kThreads / kSlices and on: the key slice g.
#pragma once
#include "base/math.cuh"
#include "ptx/thread.cuh"

// One number for each row and slice.
template <int kSlices, int kRows> struct SliceRows {
  static constexpr int kBytes = kSlices * kRows * int(sizeof(Real));

  Real* base;

  // What a slice's threads know of their rows, told by the first lane of those that share one.
  template <class Fragment>
  DEVICE void put(const Fragment& f, const Real (&x)[Fragment::kRows]) const {
    if (ptx::tid_x() % Fragment::kRowLanes != 0) return;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
      base[f.row(r) % kRows * kSlices + ptx::tid_x() / (kThreads / kSlices)] = x[r];
  }
  template <class Fragment>
  DEVICE void max(const Fragment& f, Real (&x)[Fragment::kRows]) const {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const Vec<Real, kSlices> all = at(f.row(r));
      x[r] = all.x[0];
#pragma unroll
      for (int s = 1; s < kSlices; ++s) x[r] = larger(x[r], all.x[s]);
    }
  }
  template <class Fragment>
  DEVICE void sum(const Fragment& f, Real (&x)[Fragment::kRows]) const {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const Vec<Real, kSlices> all = at(f.row(r));
      x[r] = all.x[0];
#pragma unroll
      for (int s = 1; s < kSlices; ++s) x[r] += all.x[s];
    }
  }

 private:
  DEVICE const Vec<Real, kSlices>& at(int row) const {
    return reinterpret_cast<const Vec<Real, kSlices>*>(base)[row % kRows];
  }
};

// Sums of fragments over the slices. Thread t of each group holds the same rows; it owns
// kOwnRows of them, the first in its fragment, and gives the next kOwnRows to thread t of the next
// group, and so on. Each giver has a place of its own with each owner, for each run of columns, and
// adjacent threads' places are adjacent, so that there are no bank conflicts.
template <int kSlices, int kOwnRows, int kCols> struct SliceSums {
  static constexpr int kGroup = kThreads / kSlices;
  static constexpr int kRun = kCols % kRealVec == 0 ? kRealVec : 2;
  static constexpr int kRuns = kCols / kRun;
  static constexpr int kBytes = kThreads * (kSlices - 1) * kOwnRows * kCols * int(sizeof(Real));
  static_assert(kCols % kRun == 0);

  Real* base;

  // Columns first .. first + Part::kCols - 1 of this thread's fragment: its own rows begin the
  // sum, the others go to their owners.
  template <class Own, class Part> DEVICE void scatter(Own& own, Part& part, int first) const {
    static_assert(Part::kRows == kSlices * kOwnRows && Own::kRows == kOwnRows);
    const int slice = ptx::tid_x() / kGroup;
#pragma unroll
    for (int r = 0; r < Part::kRows; ++r)
#pragma unroll
      for (int c = 0; c < Part::kCols; c += kRun) {
        Vec<Real, kRun> run;
#pragma unroll
        for (int i = 0; i < kRun; ++i) run.x[i] = part.at(r, c + i);
        if (r < kOwnRows) {
#pragma unroll
          // A sum, or the compiler leaves them where mma.sync put them: four registers for two.
          for (int i = 0; i < kRun; ++i) own.at(r, first + c + i) = run.x[i] + Real(0);
        } else {
          const int away = r / kOwnRows;  // how many groups on
          place((slice + away) % kSlices, away, r % kOwnRows, (first + c) / kRun) = run;
        }
      }
  }

  // Adds what the others gave, in a fixed order.
  template <class Own> DEVICE void gather(Own& own) const {
    const int slice = ptx::tid_x() / kGroup;
#pragma unroll
    for (int away = 1; away < kSlices; ++away)
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r)
#pragma unroll
        for (int c = 0; c < kCols; c += kRun) {
          const Vec<Real, kRun> run = place(slice, away, r, c / kRun);
#pragma unroll
          for (int i = 0; i < kRun; ++i) own.at(r, c + i) += run.x[i];
        }
  }

 private:
  DEVICE Vec<Real, kRun>& place(int owner, int away, int row, int run) const {
    const int pair = owner * (kSlices - 1) + away - 1;
    const int index = ((pair * kOwnRows + row) * kRuns + run) * kGroup + ptx::tid_x() % kGroup;
    return reinterpret_cast<Vec<Real, kRun>*>(base)[index];
  }
};
