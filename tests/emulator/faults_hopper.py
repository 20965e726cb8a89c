"""Faults planted in kernels/linear_attention_sm90.cu; faults.py says what a row is."""

from __future__ import annotations

from emulator.faults import (
    BOUNDS,
    DEADLOCK,
    DIVERGENCE,
    IN_FLIGHT,
    OUTPUT,
    PROTOCOL,
    RACE,
    UNDEFINED,
    UNWRITTEN,
    WRONG,
    Fault,
)

# fmt: off
_FILE = "linear_attention_sm90.cu"
LINEAR_ATTENTION_SM90 = (
    # mbarriers
    Fault("no barrier after mbarrier.init",                RACE,       "plain",        # silent
          _FILE, "ptx::bar_sync(); // all see", "// all see"),
    Fault("mbarrier.init is not fenced",                   PROTOCOL,   "plain",        # silent
          _FILE, "ptx::fence_mbarrier_init();", ""),
    Fault("mbarriers overlap",                             PROTOCOL,   "plain",
          _FILE, "ptx::mbarrier_init(full + 8 * i, 1);",
          "ptx::mbarrier_init(full + 4 * i, 1);"),
    Fault("an mbarrier is initialised twice",              PROTOCOL,   "plain",
          _FILE, "values.init();", "keys.init();"),
    Fault("the producer does not wait for a free stage",   PROTOCOL,   "plain",
          _FILE, "wait(empty + 8 * (n % kStages), ~(n / kStages) & 1);", ""),
    Fault("the producer waits for the wrong parity",       DEADLOCK,   "plain",
          _FILE, "~(n / kStages) & 1", "n / kStages & 1"),
    Fault("the parity of full stages never changes",       IN_FLIGHT,  "plain",
          _FILE, "wait(full + 8 * (n % kStages), n / kStages & 1)",
          "wait(full + 8 * (n % kStages), 0)"),
    Fault("one consumer suffices to free a stage",         DEADLOCK,   "plain",
          _FILE, "ptx::mbarrier_init(empty + 8 * i, kConsumers);",
          "ptx::mbarrier_init(empty + 8 * i, 1);"),
    Fault("all threads of a consumer release",             DEADLOCK,   "plain",
          _FILE, "if (ptx::tid_x() % 128 == 0) ptx::mbarrier_arrive",
          "ptx::mbarrier_arrive"),
    Fault("too few bytes are expected",                    DEADLOCK,   "plain",
          _FILE, "expect_tx(bar, kTileBytes)", "expect_tx(bar, kTileBytes / 2)"),
    Fault("too many bytes are expected",                   DEADLOCK,   "plain",
          _FILE, "expect_tx(bar, kTileBytes)", "expect_tx(bar, 2 * kTileBytes)"),
    Fault("half of Q is expected",                         IN_FLIGHT,  "plain",        # at times
          _FILE, "expect_tx(q_full, kConsumers * kTileBytes)",
          "expect_tx(q_full, kTileBytes)"),
    Fault("Q is not waited for",                           IN_FLIGHT,  "plain",        # at times
          _FILE, "wait(q_full, 0);", ""),
    Fault("the wait for Q has the wrong parity",           IN_FLIGHT,  "plain",        # at times
          _FILE, "wait(q_full, 0);", "wait(q_full, 1);"),
    Fault("V is not waited for",                           IN_FLIGHT,  "plain",        # at times
          _FILE, "values.wait_full(n - 1);", ""),
    Fault("the last V is not waited for",                  IN_FLIGHT,  "plain",        # at times
          _FILE, "values.wait_full(blocks - 1);", ""),
    Fault("another block of K is waited for",              IN_FLIGHT,  "plain",        # at times
          _FILE, "keys.wait_full(n);", "keys.wait_full(n - 1);"),
    Fault("K is released while it is read",                RACE,       "plain",        # at times
          _FILE, "ptx::wgmma_wait_group<1>(); // S_n is there keys.release(n);",
          "keys.release(n); ptx::wgmma_wait_group<1>();"),
    Fault("V is released while it is read",                RACE,       "plain",        # at times
          _FILE, "keys.release(n); ptx::wgmma_wait_group<0>(); // O too, so P_{n-1} and "
          "V_{n-1} are free values.release(n - 1);",
          "keys.release(n); values.release(n - 1); ptx::wgmma_wait_group<0>();"),
    Fault("K is never released",                           DEADLOCK,   "plain",
          _FILE, "keys.release(n);", ""),
    Fault("V is never released",                           DEADLOCK,   "plain",
          _FILE, "values.release(n - 1);", ""),
    # TMA loads
    Fault("all lanes of the producer load",                PROTOCOL,   "plain",
          _FILE, "warp == 0 && ptx::elect_sync() && blocks", "warp == 0 && blocks"),
    Fault("half a warp elects",                            DEADLOCK,   "plain",
          _FILE, "warp == 0 && ptx::elect_sync() && blocks",
          "warp == 0 && ptx::tid_x() % 32 < 16 && ptx::elect_sync() && blocks"),
    Fault("a block of K too many is loaded",               PROTOCOL,   "plain",        # silent
          _FILE, "if (n + 1 < blocks) keys.load", "keys.load"),
    Fault("tiles at no multiple of 1024",                  PROTOCOL,   "plain",
          _FILE, "keys(smem + kK, q_full + 8)", "keys(smem + kK + 512, q_full + 8)"),
    Fault("the rings of K and V overlap",                  IN_FLIGHT,  "plain",
          _FILE, "values(smem + kV,", "values(smem + kV - kTileBytes,"),
    Fault("the ring of V sticks out of shared memory",     BOUNDS,     "plain",
          _FILE, "values(smem + kV,", "values(smem + kV + 2 * kTileBytes,"),
    Fault("every query head has its own keys",             WRONG,      "plain",
          _FILE, "kv_head = head / p.group", "kv_head = head"),
    Fault("both halves of Q are the first rows",           WRONG,      "plain",
          _FILE, "row0 + 64 * i", "row0"),
    Fault("head and batch change places",                  WRONG,      "plain",
          _FILE, "n * kBlockN, head, batch, bar", "n * kBlockN, batch, head, bar"),
    # wgmma
    Fault("S is not waited for",                           IN_FLIGHT,  "plain",
          _FILE, "ptx::wgmma_wait_group<0>(); keys.release(0);", "keys.release(0);"),
    Fault("no wait before K is released",                  RACE,       "plain",        # at times
          _FILE, "ptx::wgmma_wait_group<1>();", ""),
    Fault("no wait before P is replaced",                  IN_FLIGHT,  "plain",
          _FILE, "ptx::wgmma_wait_group<0>(); // O too", "// O too"),
    Fault("P is replaced before the wait",                 IN_FLIGHT,  "plain",
          _FILE, "ptx::wgmma_wait_group<0>(); // O too",
          "narrow(weights, s); ptx::wgmma_wait_group<0>(); // O too"),
    Fault("O is not waited for",                           IN_FLIGHT,  "plain",
          _FILE, "values.tile(blocks - 1)); ptx::wgmma_wait_group<0>();",
          "values.tile(blocks - 1));"),
    Fault("a product's group is not committed",            IN_FLIGHT,  "plain",
          _FILE, "descriptor(v + 2048 * i), true); ptx::wgmma_commit_group();",
          "descriptor(v + 2048 * i), true);"),
    Fault("no wgmma.fence before S = Q K^T",               PROTOCOL,   "plain",        # silent
          _FILE, "u32 k) { ptx::wgmma_fence();", "u32 k) {"),
    Fault("no wgmma.fence before O += P V",                PROTOCOL,   "plain",        # silent
          _FILE, "u32 v) { ptx::wgmma_fence();", "u32 v) {"),
    Fault("descriptor: 512 bytes from 8 rows to the next", WRONG,      "plain",
          _FILE, "u64(1024 / 16) << 32", "u64(512 / 16) << 32"),
    Fault("descriptor: no swizzle",                        PROTOCOL,   "plain",
          _FILE, "| u64(1) << 62", ""),
    Fault("descriptor: the swizzle of 64 bytes",           PROTOCOL,   "plain",
          _FILE, "u64(1) << 62", "u64(2) << 62"),
    Fault("K advances by 64 bytes",                        PROTOCOL,   "plain",
          _FILE, "descriptor(k + 32 * i)", "descriptor(k + 64 * i)"),
    Fault("V advances by 1024 bytes",                      WRONG,      "plain",
          _FILE, "descriptor(v + 2048 * i)", "descriptor(v + 1024 * i)"),
    Fault("V counts as K-major",                           IN_FLIGHT,  "plain",
          _FILE, "f16_rs<true>", "f16_rs<false>"),
    Fault("S is added to the S before",                    WRONG,      "plain",
          _FILE, "i > 0);", "true);"),
    Fault("both consumers work on the same Q",             RACE,       "plain",
          _FILE, "q = smem + kQ + consumer * kTileBytes", "q = smem + kQ"),
    Fault("a product for half of the lanes",               DIVERGENCE, "plain",
          _FILE, "issue_nn(o, weights, values.tile(n - 1));",
          "if (ptx::tid_x() % 32 < 16) issue_nn(o, weights, values.tile(n - 1));"),
    Fault("an operand's index out of range",               UNDEFINED,  "plain",
          _FILE, "s.x[2 * i + j / 2]", "s.x[2 * i + j]"),
    # turns
    Fault("nobody has the first turn",                     DEADLOCK,   "plain",
          _FILE, "if (consumer == 1) ptx::bar_arrive(kTurn, 256);", ""),
    Fault("a turn is given to oneself",                    DEADLOCK,   "plain",
          _FILE, "ptx::bar_arrive(kTurn + 1 - consumer, 256);",
          "ptx::bar_arrive(kTurn + consumer, 256);"),
    Fault("a turn counts one warpgroup",                   DIVERGENCE, "plain",
          _FILE, "ptx::bar_sync(kTurn + consumer, 256);",
          "ptx::bar_sync(kTurn + consumer, 128);"),
    # registers
    Fault("one warp gives its registers up",               DEADLOCK,   "plain",
          _FILE, "ptx::setmaxnreg_dec<24>();", "if (warp == 0) ptx::setmaxnreg_dec<24>();"),
    Fault("nobody gives registers up",                     DEADLOCK,   "plain",
          _FILE, "ptx::setmaxnreg_dec<24>();", ""),
    Fault("too few registers are given up",                DEADLOCK,   "plain",
          _FILE, "setmaxnreg_dec<24>", "setmaxnreg_dec<40>"),
    Fault("giving up takes more",                          PROTOCOL,   "plain",
          _FILE, "setmaxnreg_dec<24>", "setmaxnreg_dec<232>"),
    # the way out
    Fault("O is written without its swizzle",              WRONG,      "plain",
          _FILE, "swizzled(tile, 16 * warp + lane % 16, 2 * i + lane / 16)",
          "tile + 128 * (16 * warp + lane % 16) + 16 * (2 * i + lane / 16)"),
    Fault("O is written over another consumer's Q",        RACE,       "plain",
          _FILE, "stage(q, o);", "stage(smem + kQ + (1 - consumer) * kTileBytes, o);"),
    Fault("no fence.proxy.async after stmatrix",           RACE,       "plain",        # silent
          _FILE, "ptx::fence_proxy_async_shared();", ""),
    Fault("sums are written after the fence",              RACE,       "plain",        # silent
          _FILE, "stage(q, o); // over Q, which has been read "
          "ptx::fence_proxy_async_shared();",
          "stage(q, o); ptx::fence_proxy_async_shared(); "
          "sum_columns(reinterpret_cast<f32*>(ptx::dynamic_smem() + sums_offset), o);"),
    Fault("no barrier before the TMA store",               RACE,       "plain",        # at times
          _FILE, "ptx::bar_sync(kWarpgroup + consumer, 128);", ""),
    Fault("only a warp meets before the TMA store",        RACE,       "plain",        # at times
          _FILE, "ptx::bar_sync(kWarpgroup + consumer, 128);", "ptx::bar_warp_sync();"),
    Fault("both consumers meet at one barrier",            RACE,       "plain",        # silent
          _FILE, "ptx::bar_sync(kWarpgroup + consumer, 128);",
          "ptx::bar_sync(kWarpgroup, 128);"),
    Fault("every warp stores O",                           OUTPUT,     "plain",        # silent
          _FILE, "if (warp == 0) ptx::cp_async_bulk_tensor", "ptx::cp_async_bulk_tensor"),
    Fault("all lanes add their sums",                      WRONG,      "plain",
          _FILE, "if (ptx::elect_sync()) { if (warp == 0)",
          "{ if (ptx::elect_sync() && warp == 0)"),
    Fault("sums of a warp too many are added",             BOUNDS,     "plain",
          _FILE, "smem + sums_offset, kHeadDim * 4", "smem + sums_offset, kHeadDim * 8"),
    Fault("warps share their place for sums",              RACE,       "plain",
          _FILE, "kSums + (4 * consumer + warp)", "kSums + (consumer + warp)"),
    Fault("half of the sums are not written",              UNWRITTEN,  "plain",
          _FILE, "if (lane < 4) sums", "if (lane < 2) sums"),
    Fault("sums lie over the mbarriers",                   PROTOCOL,   "plain",
          _FILE, "kSums + (4 * consumer + warp)", "kSums + (4 * consumer + warp + 1)"),
    Fault("a box of K begins within 16 bytes",             PROTOCOL,   "plain",
          _FILE, "map, 0, n * kBlockN,", "map, 4, n * kBlockN,"),
    Fault("O is stored above its first row",               PROTOCOL,   "plain",
          _FILE, "p.o_map, 0, row0 + 64 * consumer,",
          "p.o_map, 0, row0 + 64 * consumer - 64,"),
    Fault("the store is not waited for",                   PROTOCOL,   "plain",        # silent
          _FILE, "ptx::cp_async_bulk_wait_group_read<0>();", ""),
    Fault("other threads wait for the store",              PROTOCOL,   "plain",        # silent
          _FILE, "ptx::cp_async_bulk_wait_group_read<0>();",
          "} if (!ptx::elect_sync()) { ptx::cp_async_bulk_wait_group_read<0>();"),
    Fault("the store belongs to no group",                 PROTOCOL,   "plain",        # silent
          _FILE, "ptx::cp_async_bulk_commit_group();", ""),
)
# fmt: on
