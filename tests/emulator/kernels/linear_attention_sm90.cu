// Attention without softmax, O = (Q K^T) V, on wgmma: one producer warpgroup (TMA), two consumer
// warpgroups of 64 query rows. No kernel of the library: it is FlashAttention-3 (Shah et al.,
// arXiv:2407.08608, Algorithms 1 and 2) down to what the emulator has to know of Hopper.
//
//   in    q [B, H, Tq, D]   k, v [B, H / group, Tk, D]   float16, D = 64; Tk may be 0
//         maps: dims (d, seq, head, batch), box {64, 64, 1, 1}, 128-byte swizzle
//   out   o [B, H, Tq, D]   float16, map likewise
//         sums [B, H, D]    float32, to which the column sums of o before rounding are added
//   grid  (ceil(Tq / 128), H, B)   block 384
//   smem  51272 bytes: Q, whose place O takes in the end; rings of K and V; column sums; mbarriers
#include "base/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cvt.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shfl.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int kHeadDim = 64;
constexpr int kBlockM = 128;
constexpr int kBlockN = 64;
constexpr int kStages = 2;
constexpr int kConsumers = kBlockM / 64;
constexpr int kThreads = 128 * (1 + kConsumers);

struct LinearParams {
  ptx::TensorMap q_map, k_map, v_map, o_map;
  f32* sums;
  i32 heads, group, seqlen_q, seqlen_k;
};
static_assert(sizeof(LinearParams) == 576);

// Every tile is 64 rows of 64 elements. A row is 128 bytes, whose 16-byte chunks TMA and wgmma
// permute by the lower three bits of the row.
constexpr int kTileBytes = 64 * 64 * 2;

DEVICE u32 swizzled(u32 tile, int row, int chunk) {
  return tile + 128 * row + 16 * (chunk ^ (row & 7));
}

// Dynamic shared memory, in bytes from its start
constexpr int kQ = 0;
constexpr int kK = kQ + kConsumers * kTileBytes;
constexpr int kV = kK + kStages * kTileBytes;
constexpr int kSums = kV + kStages * kTileBytes;              // [warp][kHeadDim] f32
constexpr int kBars = kSums + 4 * kConsumers * kHeadDim * 4;  // of Q, then of K, then of V
static_assert(kBars + 8 * (1 + 2 * 2 * kStages) == 51272, "what the test gives");

// Named barriers
constexpr int kTurn = 1;       // + consumer: whose products are next
constexpr int kWarpgroup = 3;  // + consumer

DEVICE void wait(u32 bar, int parity) {
  while (!ptx::mbarrier_try_wait_parity(bar, parity)) {}
}

// Block n of K or V lies in stage n % kStages, filled by TMA and emptied by both consumers.
struct Ring {
  u32 tiles, full, empty;  // kStages of each; barriers are 8 bytes apart

  DEVICE Ring(u32 tiles, u32 bars) : tiles(tiles), full(bars), empty(bars + 8 * kStages) {}
  DEVICE void init() const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, kConsumers);
    }
  }
  DEVICE u32 tile(int n) const { return tiles + n % kStages * kTileBytes; }
  DEVICE void load(int n, const ptx::TensorMap& map, int head, int batch) const {
    const u32 bar = full + 8 * (n % kStages);
    wait(empty + 8 * (n % kStages), ~(n / kStages) & 1);  // at once in the first round
    ptx::mbarrier_arrive_expect_tx(bar, kTileBytes);
    ptx::cp_async_bulk_tensor_4d_load(tile(n), map, 0, n * kBlockN, head, batch, bar);
  }
  DEVICE void wait_full(int n) const { wait(full + 8 * (n % kStages), n / kStages & 1); }
  DEVICE void release(int n) const {  // by one thread of each consumer
    if (ptx::tid_x() % 128 == 0) ptx::mbarrier_arrive(empty + 8 * (n % kStages));
  }
};

// What a thread holds of a 64 x 64 matrix: as accumulators, in tiles of 8 columns, and as 16-bit
// A operands, in steps of 16 columns.
struct Accumulators {
  f32 x[8][4];
};
struct Operands {
  u32 x[4][4];
};

// Matrix descriptor (PTX ISA: asynchronous wgmma, matrix descriptor format):
//   bits 0-13   address / 16, of a tile that starts at a multiple of 1024
//   bits 16-29  bytes from 64 columns to the next / 16: there are none, so 1
//   bits 32-45  bytes from 8 rows to the next / 16: 1024
//   bits 62-63  swizzle: 1 is that of 128 bytes
DEVICE u64 descriptor(u32 address) {
  return u64(address >> 4 & 0x3fff) | u64(1) << 16 | u64(1024 / 16) << 32 | u64(1) << 62;
}

// s = q k^T, under way until waited for. K-major: 16 columns of a row are 32 bytes.
DEVICE void issue_nt(Accumulators& s, u32 q, u32 k) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i)
    ptx::wgmma_m64k16_f16_ss<false, false>(s.x, descriptor(q + 32 * i), descriptor(k + 32 * i),
                                           i > 0);
  ptx::wgmma_commit_group();
}

// o += p v, likewise. V is MN-major: 16 rows are 2048 bytes.
DEVICE void issue_nn(Accumulators& o, const Operands& p, u32 v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i)
    ptx::wgmma_m64k16_f16_rs<true>(o.x, p.x[i], descriptor(v + 2048 * i), true);
  ptx::wgmma_commit_group();
}

// Rounds to float16. Two accumulator tiles are one step of an A operand: lanes exchange nothing.
DEVICE void narrow(Operands& p, const Accumulators& s) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const f32(&tile)[4] = s.x[2 * i + j / 2];
      p.x[i][j] = ptx::cvt_rn_f16x2_f32(tile[2 * (j % 2)], tile[2 * (j % 2) + 1]);
    }
}

// Puts a warp's 16 rows of O where TMA reads them: over those of Q, which only its own products
// have read.
DEVICE void stage(u32 tile, const Accumulators& o) {
  const int lane = ptx::tid_x() % 32, warp = ptx::tid_x() / 32 % 4;
  Operands out;
  narrow(out, o);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::stmatrix_x4(swizzled(tile, 16 * warp + lane % 16, 2 * i + lane / 16), out.x[i]);
}

// Sums over a warp's 16 rows. A row past the end adds 0: it is 0 in Q.
DEVICE void sum_columns(f32* sums, const Accumulators& o) {
  const int lane = ptx::tid_x() % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      f32 sum = o.x[i][j] + o.x[i][2 + j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += ptx::shfl_bfly(sum, step);
      if (lane < 4) sums[8 * i + 2 * lane + j] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
linear_attention_sm90(const __grid_constant__ LinearParams p) {
  const int row0 = ptx::ctaid_x() * kBlockM, head = ptx::ctaid_y(), batch = ptx::ctaid_z();
  const int blocks = ceil_div(p.seqlen_k, kBlockN);
  const int warpgroup = ptx::tid_x() / 128, warp = ptx::tid_x() / 32 % 4;
  const u32 smem = ptx::smem_address(ptx::dynamic_smem());
  const u32 q_full = smem + kBars;
  const Ring keys(smem + kK, q_full + 8);
  const Ring values(smem + kV, keys.empty + 8 * kStages);

  if (ptx::tid_x() == 0) {
    ptx::mbarrier_init(q_full, 1);
    keys.init();
    values.init();
    ptx::fence_mbarrier_init();
  }
  ptx::bar_sync();                               // all see the barriers

  if (warpgroup == 0) {                          // producer
    ptx::setmaxnreg_dec<24>();
    if (warp == 0 && ptx::elect_sync() && blocks > 0) {
      const int kv_head = head / p.group;
      keys.load(0, p.k_map, kv_head, batch);
      ptx::mbarrier_arrive_expect_tx(q_full, kConsumers * kTileBytes);
      for (int i = 0; i < kConsumers; ++i)
        ptx::cp_async_bulk_tensor_4d_load(smem + kQ + i * kTileBytes, p.q_map, 0, row0 + 64 * i,
                                          head, batch, q_full);
      for (int n = 0; n < blocks; ++n) {         // K is wanted one block earlier than V
        if (n + 1 < blocks) keys.load(n + 1, p.k_map, kv_head, batch);
        values.load(n, p.v_map, kv_head, batch);
      }
    }
    return;
  }

  ptx::setmaxnreg_inc<240>();
  const int consumer = warpgroup - 1;
  const u32 q = smem + kQ + consumer * kTileBytes;
  Accumulators o = {};
  if (blocks > 0) {
    Accumulators s;
    Operands weights;
    wait(q_full, 0);
    keys.wait_full(0);
    issue_nt(s, q, keys.tile(0));                // S_0 = Q K_0^T
    ptx::wgmma_wait_group<0>();
    keys.release(0);
    narrow(weights, s);                          // P_0
    if (consumer == 1) ptx::bar_arrive(kTurn, 256);  // consumer 0 begins
    for (int n = 1; n < blocks; ++n) {
      keys.wait_full(n);
      ptx::bar_sync(kTurn + consumer, 256);      // ping-pong: one issues while the other narrows
      issue_nt(s, q, keys.tile(n));              // S_n = Q K_n^T
      values.wait_full(n - 1);
      issue_nn(o, weights, values.tile(n - 1));  // O += P_{n-1} V_{n-1}
      ptx::bar_arrive(kTurn + 1 - consumer, 256);
      ptx::wgmma_wait_group<1>();                // S_n is there
      keys.release(n);
      ptx::wgmma_wait_group<0>();                // O too, so P_{n-1} and V_{n-1} are free
      values.release(n - 1);
      narrow(weights, s);                        // P_n
    }
    values.wait_full(blocks - 1);
    issue_nn(o, weights, values.tile(blocks - 1));
    ptx::wgmma_wait_group<0>();
  }

  const int sums_offset = kSums + (4 * consumer + warp) * kHeadDim * 4;
  sum_columns(reinterpret_cast<f32*>(ptx::dynamic_smem() + sums_offset), o);
  stage(q, o);                                   // over Q, which has been read
  ptx::fence_proxy_async_shared();
  ptx::bar_sync(kWarpgroup + consumer, 128);     // TMA sees what they have written
  if (ptx::elect_sync()) {
    if (warp == 0)
      ptx::cp_async_bulk_tensor_4d_store(p.o_map, 0, row0 + 64 * consumer, head, batch, q);
    ptx::cp_reduce_async_bulk_add_f32(p.sums + (i64(batch) * p.heads + head) * kHeadDim,
                                      smem + sums_offset, kHeadDim * 4);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();     // shared memory ends with the block
  }
}
