// Bulk loads into one stage that is filled and emptied round after round, and bulk sums out of two
// buffers by turns.
//
//   in    source [blocks, rounds, n] f32, n a multiple of 8
//   out   landed [blocks, rounds, n] f32   source
//         sums [n] f32                     to which 2 source of all blocks and rounds is added
//   grid  blocks   block 128   smem 12 n + 16: stage, buffers, mbarriers
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"

struct BulkParams {
  const f32* source;
  f32 *landed, *sums;
  i32 rounds, n;
};

constexpr int kThreads = 128;

DEVICE void wait(u32 bar, int parity) {
  while (!ptx::mbarrier_try_wait_parity(bar, parity)) {}
}

extern "C" __global__ void __launch_bounds__(kThreads)
ptx_bulk(const __grid_constant__ BulkParams p) {
  const int tid = ptx::tid_x(), bytes = 4 * p.n;
  f32* stage = reinterpret_cast<f32*>(ptx::dynamic_smem());
  const u32 smem = ptx::smem_address(stage), full = smem + 3 * bytes, empty = full + 8;
  if (tid == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, kThreads);
    ptx::fence_mbarrier_init();
  }
  ptx::bar_sync();

  for (int round = 0; round < p.rounds; ++round) {
    const i64 row = (i64(ptx::ctaid_x()) * p.rounds + round) * p.n;
    const int parity = round & 1;
    if (tid == 0) {
      wait(empty, parity ^ 1);  // at once in the first round
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      ptx::cp_async_bulk_load(smem, p.source + row, bytes / 2, full);
      ptx::cp_async_bulk_load(smem + bytes / 2, p.source + row + p.n / 2, bytes / 2, full);
      ptx::cp_async_bulk_wait_group_read<1>();  // the buffer of two rounds ago is free
    }
    wait(full, parity);
    ptx::bar_sync();
    f32* buffer = stage + (1 + parity) * p.n;
    for (int i = tid; i < p.n; i += kThreads) {
      p.landed[row + i] = stage[i];
      buffer[i] = 2 * stage[i];
    }
    ptx::mbarrier_arrive(empty);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync();
    if (tid == 0) {
      ptx::cp_reduce_async_bulk_add_f32(p.sums, smem + (1 + parity) * bytes, bytes);
      ptx::cp_async_bulk_commit_group();
    }
  }
  if (tid == 0) ptx::cp_async_bulk_wait_group<0>();
}
