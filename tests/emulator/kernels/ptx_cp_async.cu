// cp.async with any number of source bytes, in four groups: a thread reads its own chunks as soon
// as it has waited for them, and those of the others after a barrier.
//
//   in    source [4, threads, 16 bytes]   src_bytes [4, threads] 0 to 16
//   out   own, others [4, threads, 16 bytes]: others backwards along the threads
//   grid  1   block 64   smem 4096
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"

using Chunk = Vec<u32, 4>;
constexpr int kThreads = 64;
constexpr int kGroups = 4;

struct CpAsyncParams {
  const Chunk* source;
  const i32* src_bytes;
  Chunk *own, *others;
};

extern "C" __global__ void __launch_bounds__(kThreads)
ptx_cp_async(const __grid_constant__ CpAsyncParams p) {
  const int tid = ptx::tid_x();
  const Chunk* shared = reinterpret_cast<const Chunk*>(ptx::dynamic_smem());
  for (int group = 0; group < kGroups; ++group) {
    const int i = kThreads * group + tid;
    ptx::cp_async_cg_16(ptx::smem_address(shared + i), p.source + i, p.src_bytes[i]);
    ptx::cp_async_commit_group();
  }
  ptx::cp_async_wait_group<3>();
  p.own[tid] = shared[tid];
  ptx::cp_async_wait_group<1>();
  for (int i = tid + kThreads; i < 3 * kThreads; i += kThreads) p.own[i] = shared[i];
  ptx::cp_async_wait_group<0>();
  p.own[3 * kThreads + tid] = shared[3 * kThreads + tid];
  ptx::bar_sync();
  for (int i = 0; i < kGroups * kThreads; i += kThreads)
    p.others[i + tid] = shared[i + kThreads - 1 - tid];
}
