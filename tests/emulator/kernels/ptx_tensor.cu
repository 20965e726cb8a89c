// Boxes of a tensor into shared memory and out of it. Each block loads one box and stores another.
//
//   in    load_map          of a tensor of `rank` 4 or 5
//         load_at, store_at [blocks, 5]   coordinates of boxes
//         given [blocks, words]           what shared memory holds of the box to be stored
//   out   landed [blocks, words]          what it holds of the box that was loaded
//         store_map         likewise
//   grid  blocks   block 128   smem twice 4 words rounded up to 1024, and an mbarrier
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

struct TensorParams {
  ptx::TensorMap load_map, store_map;
  const i32 *load_at, *store_at;
  const u32* given;
  u32* landed;
  i32 rank, words;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_tensor(const __grid_constant__ TensorParams p) {
  const int tid = ptx::tid_x(), block = ptx::ctaid_x();
  const int box = ceil_div(4 * p.words, 1024) * 1024;
  u32* loaded = reinterpret_cast<u32*>(ptx::dynamic_smem());
  u32* stored = loaded + box / 4;
  const u32 smem = ptx::smem_address(loaded), bar = smem + 2 * box;
  if (tid == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, 4 * p.words);
    const i32* c = p.load_at + 5 * block;
    if (p.rank == 4)
      ptx::cp_async_bulk_tensor_4d_load(smem, p.load_map, c[0], c[1], c[2], c[3], bar);
    else ptx::cp_async_bulk_tensor_5d_load(smem, p.load_map, c[0], c[1], c[2], c[3], c[4], bar);
  }
  const i64 row = i64(block) * p.words;
  for (int i = tid; i < p.words; i += 128) stored[i] = p.given[row + i];
  ptx::fence_proxy_async_shared();
  ptx::bar_sync();
  if (tid == 0) {
    const i32* c = p.store_at + 5 * block;
    const u32 from = smem + box;
    if (p.rank == 4) ptx::cp_async_bulk_tensor_4d_store(p.store_map, c[0], c[1], c[2], c[3], from);
    else ptx::cp_async_bulk_tensor_5d_store(p.store_map, c[0], c[1], c[2], c[3], c[4], from);
    ptx::cp_async_bulk_commit_group();
  }
  while (!ptx::mbarrier_try_wait_parity(bar, 0)) {}
  for (int i = tid; i < p.words; i += 128) p.landed[row + i] = loaded[i];
  if (tid == 0) ptx::cp_async_bulk_wait_group<0>();
}
