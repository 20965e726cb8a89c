// The facts a unit is compiled for. -D macros are read here and nowhere else; a missing one is a
// compile error.
#pragma once
#include "base/types.cuh"

enum DType { kFloat16, kBFloat16, kFloat32, kFloat64, kNone };

// The card
constexpr int kArch = CUFA_ARCH;             // compute capability times 10

// The problem
constexpr DType kDType = DType(CUFA_DTYPE);
constexpr int kHeadDim = CUFA_HEAD_DIM;      // of q and k, rounded up to a multiple of 32
constexpr int kHeadDimV = CUFA_HEAD_DIM_V;   // of v and o, likewise
constexpr bool kAligned = CUFA_ALIGNED;      // rows of q, k, v, o, and of what is computed back,
                                             // start at multiples of 16 bytes
constexpr bool kLeft = CUFA_LEFT;            // keys are bounded on the left of the diagonal
constexpr bool kRight = CUFA_RIGHT;          // on the right: causal is right = 0
constexpr bool kMask = CUFA_MASK;
constexpr DType kBias = DType(CUFA_BIAS);    // kNone: no bias
constexpr bool kAlibi = CUFA_ALIBI;
constexpr bool kSoftcap = CUFA_SOFTCAP;
constexpr bool kSink = CUFA_SINK;
constexpr bool kDropout = CUFA_DROPOUT;
constexpr bool kLse = CUFA_LSE;              // lse is wanted
constexpr bool kDq = CUFA_DQ;                // of the backward pass: this kernel has to do with dQ,
constexpr bool kDk = CUFA_DK;                // stores dK,
constexpr bool kDv = CUFA_DV;                // stores dV,
constexpr DType kResult = DType(CUFA_RESULT);  // stores dbias or dsink in this type
constexpr bool kFoldScale = CUFA_FOLD_SCALE; // scores stay raw q.k; the exponent carries the scale

// The tile
constexpr int kBlockM = CUFA_BLOCK_M;
constexpr int kBlockN = CUFA_BLOCK_N;
constexpr int kThreads = CUFA_THREADS;
constexpr int kStages = CUFA_STAGES;
constexpr int kBlocksPerSm = CUFA_BLOCKS_PER_SM;
constexpr bool kOnes = CUFA_ONES;            // columns of ones lie behind V: fa3_fwd_sm90

// What Python has computed from the above, to be checked against what the kernel uses
constexpr int kSmemBytes = CUFA_SMEM_BYTES;
constexpr int kStateBytes = CUFA_STATE_BYTES;  // in global memory, for each query tile
constexpr int kParamsBytes = CUFA_PARAMS_BYTES;
constexpr int kBackwardParamsBytes = CUFA_BACKWARD_PARAMS_BYTES;

static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0, "head dims come rounded up to 32");
