// A thread block on the CPU, as the twins of kernels/ptx see it: one call for each instruction.
//
// Every function notes where in the kernel it was called from, so that a report can name the line.
#pragma once
#include <cstdint>
#include <cstring>

namespace emu {

struct Dim3 {
  int x, y, z;
};

int thread_index();
Dim3 block_index();
int grid_blocks();
uint8_t* dynamic_shared_memory();
uint32_t shared_address(const void* p);  // in the 32-bit window that instructions use

// Barriers. `threads` 0: all of the block.
void bar_sync(int id, int threads);
bool bar_red_or(bool x, int id, int threads);
void bar_arrive(int id, int threads);
void bar_warp_sync();

// Collectives: all lanes of a warp call them, whichever comes last does the work for all.
uint64_t shfl_bfly(uint64_t bits, int lane_mask);
int shfl_idx(int x, int lane);
bool vote_any(bool x);
uint32_t vote_ballot(bool x);
bool elect_sync();
void ldmatrix_x4(uint32_t (&r)[4], uint32_t row, bool trans);
void stmatrix_x4(uint32_t row, const uint32_t (&r)[4], bool trans);

enum class Half { f16, bf16 };
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Half type);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]);
void mma_m8n8k4_f64(double (&d)[2], double a, double b);

void ld_shared(void* to, uint32_t address, int bytes);

uint32_t atom_inc(uint32_t* count, uint32_t last);
void red_add(float* to, const float* x, int n);
void red_add(double* to, double x);

// Copies by the thread itself: they land at its wait.
void cp_async(uint32_t dst, const void* src, int bytes, int src_bytes);
void cp_async_commit_group();
void cp_async_wait_group(int pending);

void mbarrier_init(uint32_t bar, int count);
void mbarrier_arrive(uint32_t bar, int expected_bytes);
bool mbarrier_try_wait_parity(uint32_t bar, int parity);
void fence_mbarrier_init();
void fence_proxy_async();

// In place of CUtensorMap; filled by tensor_map.py.
struct TensorMap {
  const uint8_t* base;
  int32_t rank, item_bytes, swizzle_bytes, unused;
  int32_t dims[5], box[5];
  int64_t strides[4];  // bytes, of dims 1 and up
  uint8_t padding[32];
};
static_assert(sizeof(TensorMap) == 128);

// Bulk copies into shared memory land as late as they can, or at a random moment.
void tensor_load(uint32_t dst, const void* map, const int* coords, int rank, uint32_t bar);
void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar);
// Bulk copies out of it read and write at the wait.
void tensor_store(const void* map, const int* coords, int rank, uint32_t src);
void bulk_reduce_add(float* dst, uint32_t src, int bytes);
void bulk_commit_group();
void bulk_wait_group(int pending);

uint32_t pack(float lo, float hi, Half type);

// wgmma.mma_async m64nNk16, float32 accumulators, N = 8 * tiles: results land at the wait.
struct Wgmma {
  Half type;
  int tiles;
  float (*d)[4];
  const uint32_t* a_registers;  // null: A comes from shared memory
  uint64_t a_descriptor, b_descriptor;
  bool trans_a, trans_b, scale_d;
};
void wgmma_fence();
void wgmma_issue(const Wgmma& op);
void wgmma_commit_group();
void wgmma_wait_group(int pending);

// The registers that one thread may have, of those of the multiprocessor.
void setmaxnreg(int registers, bool increase);

template <class To, class From>
To bits(From x) {
  To y{};
  std::memcpy(&y, &x, sizeof x < sizeof y ? sizeof x : sizeof y);
  return y;
}

// Runs a kernel as `launch` says (launch.h); `begin` to `end` are the unit's own code and
// constants. Returns the report, empty if there is nothing to report.
const char* run(void* launch, void (*kernel)(const void* params), const void* begin,
                const void* end);

template <class Params>
void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

}  // namespace emu
