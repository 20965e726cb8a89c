// A STUB, so that all around it can be tested: FlashAttention-3 forward, sm_90 alone.
#include "attn/epilogue.cuh"
#include "attn/key_range.cuh"
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/score_mod.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

static_assert(kArch == 90 && kAligned);
static_assert(kThreads == 128 * (kBlockM / 64 + 1), "a warpgroup for 64 rows, one to load");
static_assert(kBlockN % 32 == 0 && kBlockN <= 256, "wgmma");

constexpr int kSlabs = ceil_div(kHeadDim, 64), kSlabsV = ceil_div(kHeadDimV, 64);
constexpr int kKeyBytes = kStages * kBlockN * (kSlabs + kSlabsV) * 128;
constexpr int kQueryBytes = kBlockM * kSlabs * 128;
static_assert(kSmemBytes == kKeyBytes + kQueryBytes + 512 ||
              kSmemBytes == kKeyBytes + 2 * kQueryBytes + 512);

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa3_fwd_sm90(const __grid_constant__ Params p) {
  ptx::setmaxnreg_dec<40>();
}
