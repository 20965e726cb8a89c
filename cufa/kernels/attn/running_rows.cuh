// What is known of a query tile after some key blocks, and where it waits for the next one.
// Source: Dao et al., arXiv:2205.14135, Algorithm 1, lines 2, 8 and 11 to 13.
#pragma once
#include "attn/block_softmax.cuh"
#include "attn/epilogue.cuh"
#include "ptx/thread.cuh"

// This thread's rows of the paper's O_i, m_i and l_i. Each thread finds in global memory what it
// has put there itself, so no thread waits for another; adjacent threads' runs lie side by side.
template <class Output> struct RunningRows {
  static constexpr int kRows = Output::kRows, kCols = Output::kCols;
  static constexpr int kRun = kCols % kRealVec == 0 ? kRealVec : 2;
  static_assert(kStateBytes == kThreads * kRows * (kCols + 2) * int(sizeof(Real)),
                "gpu/config.py");

  Output o;       // divided by l
  Real m[kRows];  // the largest score so far
  Real l[kRows];  // sum exp2(scale * (s - m))

  DEVICE void clear() {
    o.clear();
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = -infinity(), l[r] = 0;
  }

  DEVICE void load(const Params& p, const Tile& tile) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; c += kRun) {
        const Vec<Real, kRun> run = run_of(p, tile, r, c);
#pragma unroll
        for (int i = 0; i < kRun; ++i) o.at(r, c + i) = run.x[i];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      m[r] = number(p, tile, r);
      l[r] = number(p, tile, kRows + r);
    }
  }

  DEVICE void store(const Params& p, const Tile& tile) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; c += kRun) {
        Vec<Real, kRun> run;
#pragma unroll
        for (int i = 0; i < kRun; ++i) run.x[i] = o.at(r, c + i);
        run_of(p, tile, r, c) = run;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      number(p, tile, r) = m[r];
      number(p, tile, kRows + r) = l[r];
    }
  }

  // O = diag(l_new)^-1 (diag(l) e^(m - m_new) O + e^(m~ - m_new) P~ V): the block's maxima, sums of
  // weights and output are m~, l~ and P~ V.
  DEVICE void join(const Real (&block_m)[kRows], const Real (&block_l)[kRows], Output& block_o,
                   Real scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Real m_new = larger(m[r], block_m[r]);
      const Real before = l[r] * move_weights(m[r], m_new, scale);
      const Real block = move_weights(block_m[r], m_new, scale);
      m[r] = m_new, l[r] = before + block * block_l[r];
      const Real inverse = l[r] == 0 ? Real(0) : 1 / l[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        o.at(r, c) = before * inverse * o.at(r, c) + block * inverse * block_o.at(r, c);
    }
  }

  // The results, when no key block is left.
  DEVICE void finish(const Params& p, const Tile& tile, Real sink) {
    Real lse[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowEnd end = end_row(p, m[r], l[r], sink);
      lse[r] = end.lse;
      if constexpr (kSink || kDropout) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) o.at(r, c) *= l[r] * end.factor;
      }
    }
    store_output(o, p, tile);
    store_lse(o, lse, p, tile);
  }

 private:
  DEVICE static Real* of_tile(const Params& p, const Tile& tile) {
    const i64 head = i64(tile.batch) * p.heads.value + tile.head;
    const i64 index = head * ceil_div(p.seqlen_q, kBlockM) + tile.row0 / kBlockM;
    return static_cast<Real*>(p.workspace) + index * (kStateBytes / int(sizeof(Real)));
  }
  DEVICE static Vec<Real, kRun>& run_of(const Params& p, const Tile& tile, int r, int c) {
    auto* runs = reinterpret_cast<Vec<Real, kRun>*>(of_tile(p, tile));
    return runs[(r * kCols + c) / kRun * kThreads + ptx::tid_x()];
  }
  DEVICE static Real& number(const Params& p, const Tile& tile, int i) {  // m, then l
    return of_tile(p, tile)[(kRows * kCols + i) * kThreads + ptx::tid_x()];
  }
};
