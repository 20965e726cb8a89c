// atom.inc by all threads of all blocks on one counter.
//
//   in    -
//   out   count [1]             counts from 0 to `last` and on with 0
//         before [blocks, 128]  what each thread found
//   grid  any   block 128
#include "base/types.cuh"
#include "ptx/atom.cuh"
#include "ptx/thread.cuh"

struct AtomParams {
  u32 *count, *before;
  i32 last;
};

extern "C" __global__ void __launch_bounds__(128)
ptx_atom(const __grid_constant__ AtomParams p) {
  p.before[128 * ptx::ctaid_x() + ptx::tid_x()] = ptx::atom_inc(p.count, u32(p.last));
}
