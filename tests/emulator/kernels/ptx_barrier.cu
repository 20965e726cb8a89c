// Barriers of a block, a warp, and two parties of which one only says that it has come; who is who.
//
//   in    x [blocks, rounds, 128] f32
//   out   who [blocks, 256, 7]    tid, ctaid x, y, z, nctaid x, smem_address from the start, and
//                                 from a multiple of 1024
//         of_warp [blocks, 256]   the thread number of the next lane of the warp
//         of_block [blocks, 256]  that of the thread as far from the block's end
//         handed [blocks, rounds, 128] f32   x of a round backwards, from one half to the other
//         any_above_2 [blocks, rounds, 256]   whether an x of the round is
//         of_half_above_1 [blocks, rounds, 256]   the same, for each half of the block
//   grid  any   block 256   smem 1024
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/thread.cuh"

constexpr int kThreads = 256;

struct BarrierParams {
  const f32* x;
  i32 *who, *of_warp, *of_block;
  f32* handed;
  i32 *any_above_2, *of_half_above_1;
  i32 grid_x, grid_y, rounds;
};

constexpr int kFull = 1, kEmpty = 15;  // named barriers

extern "C" __global__ void __launch_bounds__(kThreads)
ptx_barrier(const __grid_constant__ BarrierParams p) {
  const int tid = ptx::tid_x();
  const int ctaid[3] = {int(ptx::ctaid_x()), ptx::ctaid_y(), ptx::ctaid_z()};
  const int block = (ctaid[2] * p.grid_y + ctaid[1]) * p.grid_x + ctaid[0];
  const int thread = kThreads * block + tid;
  i32* shared = reinterpret_cast<i32*>(ptx::dynamic_smem());

  const u32 start = ptx::smem_address(ptx::dynamic_smem());
  p.who[7 * thread] = tid;
  for (int i = 0; i < 3; ++i) p.who[7 * thread + 1 + i] = ctaid[i];
  p.who[7 * thread + 4] = ptx::nctaid_x();
  p.who[7 * thread + 5] = ptx::smem_address(shared + tid) - start;
  p.who[7 * thread + 6] = start % 1024;

  shared[tid] = tid;
  ptx::bar_warp_sync();
  p.of_warp[thread] = shared[tid / 32 * 32 + (tid + 1) % 32];
  ptx::bar_sync();
  p.of_block[thread] = shared[kThreads - 1 - tid];
  ptx::bar_sync();

  for (int round = 0; round < p.rounds; ++round) {
    const i64 row = i64(block) * p.rounds + round;
    const bool above = tid < 128 && p.x[128 * row + tid] > 2.f;
    p.any_above_2[kThreads * row + tid] = ptx::bar_red_or(above);
    const bool of_half = p.x[128 * row + tid / 2] > 1.f;
    p.of_half_above_1[kThreads * row + tid] = ptx::bar_red_or(of_half, 2 + tid / 128, 128);
  }

  f32* slots = reinterpret_cast<f32*>(shared);
  const int at = tid % 128;
  for (int round = 0; round < p.rounds; ++round) {
    const i64 row = 128 * (i64(block) * p.rounds + round);
    if (tid < 128) {
      if (round > 0) ptx::bar_sync(kEmpty, kThreads);
      slots[at] = p.x[row + at];
      ptx::bar_arrive(kFull, kThreads);
    } else {
      ptx::bar_sync(kFull, kThreads);
      p.handed[row + at] = slots[127 - at];
      if (round + 1 < p.rounds) ptx::bar_arrive(kEmpty, kThreads);
    }
  }
}
