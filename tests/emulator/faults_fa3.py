"""Faults planted in fa3_fwd_sm90; faults.py says what a row is."""

from __future__ import annotations

from emulator.faults import BOUNDS, DEADLOCK, IN_FLIGHT, OUTPUT, PROTOCOL, RACE, WRONG, Fault

# fmt: off
_FILE, _PATH = "fa3_fwd_sm90.cu", "attn/tile_path.cuh"
_PIPELINE, _MATMUL = "tile/pipeline.cuh", "tile/warpgroup_matmul.cuh"
FA3_FWD_SM90 = (
    # mbarriers
    Fault("no barrier after mbarrier.init",                RACE,       "plain",        # silent
          _FILE, "ptx::bar_sync(); // all see the barriers", "// all see the barriers"),
    Fault("the producer does not wait for a free stage",   PROTOCOL,   "plain",
          _PIPELINE, "this->wait_empty(); ptx::mbarrier_arrive_expect_tx",
          "ptx::mbarrier_arrive_expect_tx"),
    Fault("the parity of full stages never changes",       IN_FLIGHT,  "plain",
          _PIPELINE, "wait(full(), round())", "wait(full(), 0)"),
    Fault("slabs land on one another",                     IN_FLIGHT,  "wide",
          _PIPELINE, "to.slab(i), map", "to.slab(0), map"),
    # loads
    Fault("the first block of keys is not loaded",         DEADLOCK,   "plain",
          _FILE, "n >= keys.first; n = job.before(n).n) {",
          "n > keys.first; n = job.before(n).n) {"),
    Fault("Q is given back before its last product",       IN_FLIGHT,  "plain",        # at times
          _FILE, "if (next.n < first) pipes.q.give_back();",
          "if (next.n <= first) pipes.q.give_back();"),
    # products
    Fault("S is not waited for",                           IN_FLIGHT,  "plain",
          _FILE, "ptx::wgmma_wait_group<1>();", "ptx::wgmma_wait_group<2>();"),
    Fault("V is given back while it is read",              RACE,       "plain",        # at times
          _FILE, "ptx::wgmma_wait_group<0>(); // O is there, and the weights may be overwritten "
          "pipes.v.give_back();", "pipes.v.give_back(); ptx::wgmma_wait_group<0>();"),
    Fault("no wgmma.fence before S = Q K^T",               PROTOCOL,   "plain",        # silent
          _MATMUL, "(b.base); ptx::wgmma_fence();", "(b.base);"),
    Fault("the second slab of Q is half as far",           WRONG,      "wide",
          _MATMUL, "k / 4 * (kRowsA * 128)", "k / 4 * (kRowsA * 64)"),
    Fault("V advances by 1024 bytes",                      WRONG,      "plain",
          _MATMUL, "k * (16 * 128 / 16)", "k * (8 * 128 / 16)"),
    Fault("all warpgroups work on the same rows",          WRONG,      "plain",
          _MATMUL, "(a.base + row0 * 128)", "(a.base)"),
    Fault("O begins with that of the tile before",         WRONG,      "plain",
          _FILE, "fresh = true;", "fresh = pipes.path.done.count == 0;"),
    # tile after tile
    Fault("the counter counts one number too many",        OUTPUT,     "plain",        # silent
          _PATH, "(p.tickets, p.tile_count - 1)", "(p.tickets, p.tile_count)"),
    Fault("tickets begin with the tiles of the grid",      OUTPUT,     "plain",
          _PATH, "ptx::nctaid_x() + ptx::atom_inc", "ptx::atom_inc"),
    Fault("heads of a section change places with rows",    BOUNDS,     "causal",
          "attn/tile.cuh", "first + place % width", "first + place / width"),
    Fault("a tile that sees no key has no block",          DEADLOCK,   "causal",
          "attn/key_range.cuh", "max_of(keys.last, keys.first + 1)", "keys.last"),
    Fault("a slot is written while others read it",        DEADLOCK,       "plain",
          _PATH, "sent.wait_empty();", ""),
    Fault("a verdict is given while others read",          RACE,       "jumps",        # silent
          _PATH, "ptx::bar_warp_sync(); // all lanes have read the slot", ""),
    # blocks that others of the tile see
    Fault("the turn for a hidden block is not passed on",  DEADLOCK,   "hidden",
          _FILE, "take_turn(); end_turn(); pipes.k.wait_full();", "pipes.k.wait_full();"),
    Fault("a hidden block of K is not given back",         DEADLOCK,   "hidden",
          _FILE, "// all lanes have seen them pipes.k.give_back();", "++pipes.k.count;"),
    Fault("a hidden block of V is not given back",         DEADLOCK,   "hidden",
          _FILE, "// all lanes have seen them pipes.k.give_back(); pipes.v.give_back();",
          "pipes.k.give_back(); ++pipes.v.count;"),
    Fault("a hidden block is given back before it comes",  RACE,       "hidden",
          _FILE, "end_turn(); pipes.k.wait_full(); pipes.v.wait_full();", "end_turn();"),
    Fault("blocks are hidden that lower rows see",         WRONG,      "hidden",
          _FILE, "64 * warpgroup, 64)", "64 * warpgroup, 1)"),
    Fault("hidden blocks do not keep tiles apart",         DEADLOCK,   "hidden beside",
          _FILE, "hidden_blocks(pipes.path.latest()) > 0", "false"),
    # masks
    Fault("odd columns take the bits of even ones",        WRONG,      "mask",
          "mask_tiles.cu", "(odd & kEven) << 1", "(even & kEven) << 1"),
    Fault("the producer loads blocks that are hidden",     DEADLOCK,   "sparse",
          _FILE, "n = job.before(n).n)", "--n)"),
    Fault("a mask has blocks past its end",                BOUNDS,     "past its end",
          _PATH, "min_of(seen.first, ceil_div(p.seqlen_k, kBlockN) - 1)", "seen.first"),
    # the second time
    Fault("what is lost is stored",                        WRONG,      "jumps",
          _FILE, "!again && softmax.is_lost(out, p, job.tile)", "false"),
    Fault("what is lost is not computed again",            OUTPUT,     "jumps",
          _PATH, "if (sent.count >= kSlots && any_gave_up(slot))", "if (false)"),
    Fault("the second time is like the first",             WRONG,      "jumps",
          _FILE, "job.kind == JobKind::kAgain ? keys.first : keys.whole_last", "keys.whole_last"),
    Fault("warps store a second time",                     OUTPUT,     "jumps",
          _FILE, "(again && !pipes.path.gave_up())", "false"),
    Fault("l keeps to the old m",                          WRONG,      "float16",
          "attn/blind_softmax.cuh", "l[r] *= rescale; rounded_l[r] *= rescale; follow(r",
          "rounded_l[r] *= rescale; follow(r"),
    Fault("sums of rounded weights keep to the old m",     WRONG,      "float16",
          "attn/blind_softmax.cuh", "l[r] *= rescale; rounded_l[r] *= rescale; follow(r",
          "l[r] *= rescale; follow(r"),
    Fault("there are zeros beside V",                      WRONG,      "ones",
          _FILE, "pack(1, 1)", "pack(0, 0)"),
    Fault("four lanes have four times the sum",            WRONG,      "ones",
          "attn/blind_softmax.cuh", " / Output::kRowLanes;", ";"),
    Fault("products may begin before the ones are there",  RACE,       "ones",
          _FILE, "ptx::fence_proxy_async_shared();  // products read them", ""),
    Fault("the largest weights vanish with the others",    WRONG,      "float16",
          "attn/blind_softmax.cuh", "min_of(exponent_of(weight), kLongestMove)",
          "exponent_of(weight)"),
    Fault("the output keeps to the old m",                 WRONG,      "float16",
          _FILE, "if (moved) {", "if (false) {"),
)
# fmt: on
