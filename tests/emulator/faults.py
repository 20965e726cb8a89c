"""Faults to be planted in kernels, and as what each must be seen.

Where nothing is checked, a fault marked silent leaves the numbers right in every order of threads
that was tried, one marked at times in some: only a report can tell of it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from cufa.testing import Case, Memory
from emulator import linear_attention
from emulator.run import Kind

BOUNDS, RACE, UNWRITTEN, IN_FLIGHT = Kind.BOUNDS, Kind.RACE, Kind.UNWRITTEN, Kind.IN_FLIGHT
OUTPUT, DEADLOCK, DIVERGENCE = Kind.OUTPUT, Kind.DEADLOCK, Kind.DIVERGENCE
PROTOCOL, UNDEFINED = Kind.PROTOCOL, Kind.UNDEFINED


class Symptom(Enum):
    """What shows without a report."""

    WRONG = "a result that is not the formula"
    CONFLICTS = "a right result, but bank conflicts"


WRONG, CONFLICTS = Symptom.WRONG, Symptom.CONFLICTS


class Fault(NamedTuple):
    """An edit of a kernel."""

    what: str
    seen: Kind | Symptom
    #: The problems that show it, by their name in PROBLEMS.
    problems: str
    file: str
    #: Occurs once. Any white space matches any other.
    old: str
    new: str

    def edit(self, file: str, text: str) -> str:
        """The text of a file with the fault in it; lines keep their numbers."""
        if file != self.file:
            return text
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            raise LookupError(f"{self.what}: {self.old!r} occurs {len(found)} times in {file}")
        lost = found[0][0].count("\n") - self.new.count("\n")
        return text[: found[0].start()] + "\n" * lost + self.new + text[found[0].end() :]


# Rows lie 16 bytes apart: what is read past their end or past the last one belongs to no array.
_APART = Memory(order=(0, 2, 1, 3), margin=(0, 1, 0, 8))


def _case(seqlen_q: int, seqlen_k: int, **fields: object) -> Case:
    memory = {f"{name}_memory": _APART for name in "qkv"}
    return replace(Case(1, 1, 2, seqlen_q, seqlen_k, **memory), **fields)  # type: ignore[arg-type]


def _attention(dtype: str) -> dict[str, tuple[Case, ...]]:
    """Each name has the problems of one unit."""
    cases = {
        "plain": (
            _case(65, 129),
            _case(127, 128, scores="growing"),
            _case(129, 193, scores="falling"),
        ),
        "grouped": (_case(20, 33, kv_heads=2),),
        "causal": (_case(129, 129, causal=True), _case(150, 70, causal=True, scores="falling")),
        "window": (_case(130, 255, window=(40, 20)),),
        "narrow": (_case(20, 65, head_dim=40, head_dim_v=40),),
        "half slab": (_case(20, 65, head_dim=32, head_dim_v=32),),
        "mask": (_case(20, 65, mask=(True,) * 4),),
        "bias": (_case(20, 65, bias=(True,) * 4),),
    }
    return {name: tuple(replace(c, dtype=dtype) for c in of) for name, of in cases.items()}


_LINEAR = linear_attention.Problem
Problem = Case | _LINEAR
#: By kernel.
PROBLEMS: dict[str, dict[str, tuple[Problem, ...]]] = {
    "fa2_fwd": _attention("float16"),
    "fa2_fwd_simt": _attention("float32"),
    "linear_attention_sm90": {
        "plain": (_LINEAR(), _LINEAR(2, 2, 2, seqlen_q=129, seqlen_k=321)),
    },
}

# fmt: off
_FA2 = (
    # global memory
    Fault("rows of K and V past the end are loaded",       BOUNDS,     "plain",
          "tile/copy_async.cuh", "row < rows ? bytes : 0", "row < rows ? bytes : bytes"),
    Fault("one row too many is loaded",                    BOUNDS,     "plain",
          "tile/copy_async.cuh", "row < rows ? bytes : 0", "row <= rows ? bytes : 0"),
    Fault("columns past the head dim are loaded",          BOUNDS,     "narrow",
          "tile/copy_async.cuh", "kWhole || right >= 8 ? 16 :", "true ? 16 :"),
    Fault("every query head has its own keys",             BOUNDS,     "grouped",
          "attn/tile.cuh", "p.k, p.k_stride, kv_head", "p.k, p.k_stride, head"),
    Fault("a bias's row past the end is read",             BOUNDS,     "bias",         # silent
          "attn/score_row.cuh", "min_of(query, p.seqlen_q - 1)", "query"),
    Fault("a bias is read past the last key",              BOUNDS,     "bias",         # silent
          "attn/score_mod.cuh", "min_of(key, p.seqlen_k - 1)", "key"),
    Fault("a mask is read past the last key",              BOUNDS,     "mask",         # silent
          "attn/mask.cuh", "visible = visible && mask.at(key0 + col)",
          "visible = mask.at(key0 + col) && visible"),
    Fault("a row past the end is stored",                  OUTPUT,     "plain",
          "attn/epilogue_mma.cuh", "if (row >= p.seqlen_q)", "if (row > p.seqlen_q)"),
    Fault("the lse of a row past the end is stored",       OUTPUT,     "plain",
          "attn/epilogue.cuh", "row < p.seqlen_q) out", "row <= p.seqlen_q) out"),
    Fault("all lanes of a row store its lse",              OUTPUT,     "plain",        # silent
          "attn/epilogue.cuh", "o.col(0) == 0 &&", ""),
    Fault("every second tile of columns is not stored",    OUTPUT,     "plain",
          "attn/epilogue_mma.cuh", "t < kColTiles; t += 4", "t < kColTiles; t += 8"),
    Fault("lanes store what they held, not exchanged",     WRONG,      "plain",
          "attn/epilogue_mma.cuh", "transpose_quad(run.x);", ""),
    Fault("a lane too few takes part in the exchange",     DEADLOCK,   "plain",
          "attn/epilogue_mma.cuh", "transpose_quad(run.x);",
          "if (row < p.seqlen_q) transpose_quad(run.x);"),
    Fault("the result goes to Q",                          OUTPUT,     "plain",
          "attn/tile.cuh", "matrix(p.o, p.o_stride, head)", "matrix(p.q, p.q_stride, head)"),
    Fault("results are stored off 16 bytes",               UNDEFINED,  "plain",
          "attn/epilogue_mma.cuh", "(out + col) = run", "(out + (col ^ 4)) = run"),
    # copies and barriers
    Fault("no barrier before K is read",                   RACE,       "plain",
          "fa2_fwd.cu", "ptx::bar_sync(); // K of", "// K of"),
    Fault("no barrier before V is read",                   RACE,       "plain",
          "fa2_fwd.cu", "ptx::bar_sync(); // V of", "// V of"),
    Fault("K is not waited for",                           IN_FLIGHT,  "plain",
          "fa2_fwd.cu", "ptx::cp_async_wait_group<0>(); ptx::bar_sync(); // K",
          "ptx::bar_sync(); // K"),
    Fault("V is not waited for",                           IN_FLIGHT,  "plain",
          "fa2_fwd.cu", "ptx::cp_async_wait_group<0>(); ptx::bar_sync(); // V",
          "ptx::bar_sync(); // V"),
    Fault("the wait for V is too weak",                    IN_FLIGHT,  "plain",
          "fa2_fwd.cu", "ptx::cp_async_wait_group<0>(); ptx::bar_sync(); // V",
          "ptx::cp_async_wait_group<1>(); ptx::bar_sync(); // V"),
    Fault("the wait for V comes after its barrier",        RACE,       "plain",
          "fa2_fwd.cu", "ptx::cp_async_wait_group<0>(); ptx::bar_sync(); // V",
          "ptx::bar_sync(); ptx::cp_async_wait_group<0>(); // V"),
    Fault("V's copies belong to no group",                 IN_FLIGHT,  "plain",
          "fa2_fwd.cu", "p.head_dim_v); ptx::cp_async_commit_group();", "p.head_dim_v);"),
    Fault("a block of K is loaded that nobody waits for",  PROTOCOL,   "plain",        # silent
          "fa2_fwd.cu", "Real lse[Output::kRows];",
          "if (keys.first < keys.last) load_k(keys.first); Real lse[Output::kRows];"),
    Fault("K is loaded while others read it",              RACE,       "plain",        # silent
          "fa2_fwd.cu", "ptx::bar_sync(); // V of block n is here, K of block n was used "
          "if (n > keys.first) load_k(n - 1);",
          "if (n > keys.first) load_k(n - 1); ptx::bar_sync();"),
    Fault("V is loaded while others read it",              RACE,       "plain",        # silent
          "fa2_fwd.cu", "ptx::bar_sync(); // K of block n is here, V of block n + 1 was used "
          "load_v(n);", "load_v(n); ptx::bar_sync();"),
    Fault("one warp meets a barrier more",                 DEADLOCK,   "plain",
          "fa2_fwd.cu", "softmax.finish(o, p, tile, lse);",
          "if (warp() == 0) ptx::bar_sync(); softmax.finish(o, p, tile, lse);"),
    # shared memory
    Fault("the last warp does not load Q",                 UNWRITTEN,  "plain",
          "fa2_fwd.cu", "copy_rows_async(q_smem,", "if (warp() < 3) copy_rows_async(q_smem,"),
    Fault("rows past the end are left as they are",        UNWRITTEN,  "plain",        # silent
          "tile/copy_async.cuh", "ptx::cp_async_cg_16(",
          "if (from - src < rows * stride) ptx::cp_async_cg_16("),
    Fault("K lies over the end of Q",                      RACE,       "plain",
          "fa2_fwd.cu", "k_smem{smem + TileQ::kBytes}", "k_smem{smem + TileQ::kBytes - 1024}"),
    Fault("V lies over K",                                 IN_FLIGHT,  "plain",        # at times
          "fa2_fwd.cu", "v_smem{smem + TileQ::kBytes + TileK::kBytes}",
          "v_smem{smem + TileQ::kBytes}"),
    Fault("V sticks out of shared memory",                 BOUNDS,     "plain",        # silent
          "fa2_fwd.cu", "v_smem{smem + TileQ::kBytes + TileK::kBytes}",
          "v_smem{smem + TileQ::kBytes + TileK::kBytes + 1024}"),
    Fault("chunks of half a size",                         PROTOCOL,   "plain",
          "tile/swizzled_tile.cuh", "place * 16", "place * 8"),
    Fault("chunks of V change places",                     WRONG,      "plain",
          "tile/mma_fragment.cuh", "ldmatrix_x4_trans(v_frag,", "ldmatrix_x4_trans(v_frag, 16 ^"),
    Fault("no swizzle at all",                             CONFLICTS,  "plain",
          "tile/swizzled_tile.cuh", "chunk ^ (row & 7)", "chunk"),
    Fault("half a slab without its swizzle",               CONFLICTS,  "half slab",
          "tile/swizzled_tile.cuh", "chunk ^ (row >> 1 & 3)", "chunk"),
    # fragments
    Fault("the halves of B change places",                 WRONG,      "plain",
          "tile/mma_fragment.cuh", "a_frag[m], b_frag[0], b_frag[1]",
          "a_frag[m], b_frag[1], b_frag[0]"),
    Fault("V is not transposed",                           WRONG,      "plain",
          "tile/mma_fragment.cuh", "ldmatrix_x4_trans(v_frag", "ldmatrix_x4(v_frag"),
    Fault("a fragment's index out of range",               UNDEFINED,  "plain",
          "tile/mma_fragment.cuh", "s.x[m][2 * k + i / 2]", "s.x[m][2 * k + 2 + i / 2]"),
    Fault("O starts with what is there",                   WRONG,      "plain",
          "fa2_fwd.cu", "o.clear();", ""),
    # softmax and masks
    Fault("lanes of a row have different maxima",          WRONG,      "plain",
          "tile/reduce.cuh", "step < kRowLanes; step *= 2) x = larger",
          "step < kRowLanes / 2; step *= 2) x = larger"),
    Fault("O keeps to the old maximum",                    WRONG,      "plain",
          "attn/softmax.cuh", "o.at(r, c) *= rescale;", ";"),
    Fault("a row without a key subtracts -inf",            WRONG,      "causal",
          "attn/softmax.cuh", "== -infinity() ? Real(0) :", "== infinity() ? Real(0) :"),
    Fault("a row without a key divides by 0",              WRONG,      "causal",
          "attn/softmax.cuh", "sum == 0 ? Real(0) : rescale / sum", "rescale / sum"),
    Fault("keys past the end are seen",                    WRONG,      "plain",
          "fa2_fwd.cu", "if (keys.is_partial(n)) apply_mask(s, p, tile, key0);", ""),
    Fault("a row does not see the key on its diagonal",    WRONG,      "causal",
          "attn/mask.cuh", "row + p.diagonal + p.right + 1", "row + p.diagonal + p.right"),
    Fault("the last block is that of the row before",      WRONG,      "causal",
          "attn/key_range.cuh", "row_end(p, bottom)", "row_end(p, bottom - 1)"),
    Fault("blocks on the diagonal count as whole",         WRONG,      "causal",
          "attn/key_range.cuh", "row_end(p, top)", "row_end(p, bottom)"),
    Fault("the first block is that of the last row",       WRONG,      "window",
          "attn/key_range.cuh", "row_begin(p, top)", "row_begin(p, bottom)"),
    Fault("blocks on the left bound count as whole",       WRONG,      "window",
          "attn/key_range.cuh", "ceil_div(row_begin(p, bottom), kBlockN)",
          "row_begin(p, top) / kBlockN"),
    # collectives in branches
    Fault("lanes with a negative maximum keep it",         DIVERGENCE, "plain",
          "tile/reduce.cuh", "x = larger(x, ptx::shfl_bfly(x, step))",
          "if (x > 0) x = larger(x, ptx::shfl_bfly(x, step))"),
    Fault("a product only for lanes whose row exists",     DIVERGENCE, "plain",
          "fa2_fwd.cu", "matmul_nn(o, narrow(s), v_smem);",
          "if (tile.row0 + o.row(0) < p.seqlen_q) matmul_nn(o, narrow(s), v_smem);"),
    Fault("a product for half of the lanes",               DIVERGENCE, "plain",
          "tile/mma_fragment.cuh", "mma(o.x[m][2 * n], p",
          "if (lane() < 16) mma(o.x[m][2 * n], p"),
    Fault("a barrier in each of two branches",             DIVERGENCE, "plain",
          "fa2_fwd.cu", "ptx::bar_sync(); // V of",
          "if (lane() < 16) { ptx::bar_sync(); s.at(0, 0) += 1e-30f; } else ptx::bar_sync(); //"),
    Fault("lanes whose row does not exist return",         DEADLOCK,   "plain",
          "fa2_fwd.cu", "Scores s;", "if (tile.row0 + o.row(0) >= p.seqlen_q) return; Scores s;"),
)

_SIMT = (
    Fault("one row too many is loaded",                    BOUNDS,     "plain",
          "tile/padded_tile.cuh", "first + row < rows", "first + row <= rows"),
    Fault("elements that do not exist are loaded",         BOUNDS,     "plain",
          "tile/padded_tile.cuh", "e < inside ? from[e] : Elem(0)", "from[e]"),
    Fault("columns past the head dim are loaded",          BOUNDS,     "narrow",
          "tile/padded_tile.cuh", "? cols - col : 0", "? kCols - col : 0"),
    Fault("no barrier before K is read",                   UNWRITTEN,  "plain",
          "fa2_fwd_simt.cu", "ptx::bar_sync(); // Q and", "// Q and"),
    Fault("no barrier before V takes the place of K",      RACE,       "plain",        # silent
          "fa2_fwd_simt.cu", "ptx::bar_sync(); // all have used K", "// all have used K"),
    Fault("no barrier before V is read",                   RACE,       "plain",
          "fa2_fwd_simt.cu", "ptx::bar_sync(); // V of", "// V of"),
    Fault("no barrier before K takes the place of V",      RACE,       "plain",
          "fa2_fwd_simt.cu", "ptx::bar_sync(); // all have used V", "// all have used V"),
    Fault("P is stored after the last barrier",            RACE,       "plain",        # silent
          "fa2_fwd_simt.cu", "matmul_nn(o, p_smem, v_smem);",
          "store_tile(p_smem, s); matmul_nn(o, p_smem, v_smem);"),
    Fault("V lies over P",                                 WRONG,      "plain",
          "fa2_fwd_simt.cu", "v_smem{k_smem.base}", "v_smem{p_smem.base}"),
    Fault("the last row of a tile is not loaded",          UNWRITTEN,  "plain",
          "tile/padded_tile.cuh", "i < kRows * kRuns", "i < (kRows - 1) * kRuns"),
    Fault("K sticks out of shared memory",                 BOUNDS,     "plain",        # silent
          "fa2_fwd_simt.cu", "smem + TileQ::kBytes + TileP::kBytes)",
          "smem + TileQ::kBytes + TileP::kBytes + 64)"),
    Fault("V is read one row too far down",                BOUNDS,     "plain",
          "tile/simt_fragment.cuh", "run<kRun>(j + e, o.col(c))", "run<kRun>(j + e + 1, o.col(c))"),
    Fault("runs that are not aligned",                     UNDEFINED,  "plain",
          "tile/simt_fragment.cuh", "run<kRun>(j + e, o.col(c))", "run<kRun>(j + e, o.col(c) - 1)"),
    Fault("a fragment's index out of range",               UNDEFINED,  "plain",
          "tile/simt_fragment.cuh", "s.x[r][c] += a_run[r].x[e] * b_run.x[e]",
          "s.x[r][c + 1] += a_run[r].x[e] * b_run.x[e]"),
    Fault("columns of P change places",                    WRONG,      "plain",
          "tile/simt_fragment.cuh", "p.at(s.row(r), s.col(c))", "p.at(s.row(r), s.col(c) ^ 1)"),
    Fault("lanes of a row have different maxima",          WRONG,      "plain",
          "tile/reduce.cuh", "step < kRowLanes; step *= 2) x = larger",
          "step < kRowLanes / 2; step *= 2) x = larger"),
    Fault("a row without a key subtracts -inf",            WRONG,      "causal",
          "attn/softmax.cuh", "== -infinity() ? Real(0) :", "== infinity() ? Real(0) :"),
    Fault("softmax only for threads whose rows exist",    DIVERGENCE, "plain",
          "fa2_fwd_simt.cu", "softmax.update(s, o);",
          "if (tile.row0 + s.row(0) < p.seqlen_q) softmax.update(s, o);"),
    Fault("a barrier only for threads whose rows exist",   RACE,       "plain",
          "fa2_fwd_simt.cu", "ptx::bar_sync(); // all have used V",
          "if (tile.row0 + s.row(0) < p.seqlen_q) ptx::bar_sync(); //"),
)

_LINEAR_SM90 = "linear_attention_sm90.cu"
_LINEAR_FAULTS = (
    # mbarriers
    Fault("no barrier after mbarrier.init",                RACE,       "plain",        # silent
          _LINEAR_SM90, "ptx::bar_sync(); // all see", "// all see"),
    Fault("mbarrier.init is not fenced",                   PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "ptx::fence_mbarrier_init();", ""),
    Fault("mbarriers overlap",                             PROTOCOL,   "plain",
          _LINEAR_SM90, "ptx::mbarrier_init(full + 8 * i, 1);",
          "ptx::mbarrier_init(full + 4 * i, 1);"),
    Fault("an mbarrier is initialised twice",              PROTOCOL,   "plain",
          _LINEAR_SM90, "values.init();", "keys.init();"),
    Fault("the producer does not wait for a free stage",   PROTOCOL,   "plain",
          _LINEAR_SM90, "wait(empty + 8 * (n % kStages), ~(n / kStages) & 1);", ""),
    Fault("the producer waits for the wrong parity",       DEADLOCK,   "plain",
          _LINEAR_SM90, "~(n / kStages) & 1", "n / kStages & 1"),
    Fault("the parity of full stages never changes",       IN_FLIGHT,  "plain",
          _LINEAR_SM90, "wait(full + 8 * (n % kStages), n / kStages & 1)",
          "wait(full + 8 * (n % kStages), 0)"),
    Fault("one consumer suffices to free a stage",         DEADLOCK,   "plain",
          _LINEAR_SM90, "ptx::mbarrier_init(empty + 8 * i, kConsumers);",
          "ptx::mbarrier_init(empty + 8 * i, 1);"),
    Fault("all threads of a consumer release",             DEADLOCK,   "plain",
          _LINEAR_SM90, "if (ptx::tid_x() % 128 == 0) ptx::mbarrier_arrive",
          "ptx::mbarrier_arrive"),
    Fault("too few bytes are expected",                    DEADLOCK,   "plain",
          _LINEAR_SM90, "expect_tx(bar, kTileBytes)", "expect_tx(bar, kTileBytes / 2)"),
    Fault("too many bytes are expected",                   DEADLOCK,   "plain",
          _LINEAR_SM90, "expect_tx(bar, kTileBytes)", "expect_tx(bar, 2 * kTileBytes)"),
    Fault("half of Q is expected",                         IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "expect_tx(q_full, kConsumers * kTileBytes)",
          "expect_tx(q_full, kTileBytes)"),
    Fault("Q is not waited for",                           IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "wait(q_full, 0);", ""),
    Fault("the wait for Q has the wrong parity",           IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "wait(q_full, 0);", "wait(q_full, 1);"),
    Fault("V is not waited for",                           IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "values.wait_full(n - 1);", ""),
    Fault("the last V is not waited for",                  IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "values.wait_full(blocks - 1);", ""),
    Fault("another block of K is waited for",              IN_FLIGHT,  "plain",        # at times
          _LINEAR_SM90, "keys.wait_full(n);", "keys.wait_full(n - 1);"),
    Fault("K is released while it is read",                RACE,       "plain",        # at times
          _LINEAR_SM90, "ptx::wgmma_wait_group<1>(); // S_n is there keys.release(n);",
          "keys.release(n); ptx::wgmma_wait_group<1>();"),
    Fault("V is released while it is read",                RACE,       "plain",        # at times
          _LINEAR_SM90, "keys.release(n); ptx::wgmma_wait_group<0>(); // O too, so P_{n-1} and "
          "V_{n-1} are free values.release(n - 1);",
          "keys.release(n); values.release(n - 1); ptx::wgmma_wait_group<0>();"),
    Fault("K is never released",                           DEADLOCK,   "plain",
          _LINEAR_SM90, "keys.release(n);", ""),
    Fault("V is never released",                           DEADLOCK,   "plain",
          _LINEAR_SM90, "values.release(n - 1);", ""),
    # TMA loads
    Fault("all lanes of the producer load",                PROTOCOL,   "plain",
          _LINEAR_SM90, "warp == 0 && ptx::elect_sync() && blocks", "warp == 0 && blocks"),
    Fault("half a warp elects",                            DEADLOCK,   "plain",
          _LINEAR_SM90, "warp == 0 && ptx::elect_sync() && blocks",
          "warp == 0 && ptx::tid_x() % 32 < 16 && ptx::elect_sync() && blocks"),
    Fault("a block of K too many is loaded",               PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "if (n + 1 < blocks) keys.load", "keys.load"),
    Fault("tiles at no multiple of 1024",                  PROTOCOL,   "plain",
          _LINEAR_SM90, "keys(smem + kK, q_full + 8)", "keys(smem + kK + 512, q_full + 8)"),
    Fault("the rings of K and V overlap",                  IN_FLIGHT,  "plain",
          _LINEAR_SM90, "values(smem + kV,", "values(smem + kV - kTileBytes,"),
    Fault("the ring of V sticks out of shared memory",     BOUNDS,     "plain",
          _LINEAR_SM90, "values(smem + kV,", "values(smem + kV + 2 * kTileBytes,"),
    Fault("every query head has its own keys",             WRONG,      "plain",
          _LINEAR_SM90, "kv_head = head / p.group", "kv_head = head"),
    Fault("both halves of Q are the first rows",           WRONG,      "plain",
          _LINEAR_SM90, "row0 + 64 * i", "row0"),
    Fault("head and batch change places",                  WRONG,      "plain",
          _LINEAR_SM90, "n * kBlockN, head, batch, bar", "n * kBlockN, batch, head, bar"),
    # wgmma
    Fault("S is not waited for",                           IN_FLIGHT,  "plain",
          _LINEAR_SM90, "ptx::wgmma_wait_group<0>(); keys.release(0);", "keys.release(0);"),
    Fault("no wait before K is released",                  RACE,       "plain",        # at times
          _LINEAR_SM90, "ptx::wgmma_wait_group<1>();", ""),
    Fault("no wait before P is replaced",                  IN_FLIGHT,  "plain",
          _LINEAR_SM90, "ptx::wgmma_wait_group<0>(); // O too", "// O too"),
    Fault("P is replaced before the wait",                 IN_FLIGHT,  "plain",
          _LINEAR_SM90, "ptx::wgmma_wait_group<0>(); // O too",
          "narrow(weights, s); ptx::wgmma_wait_group<0>(); // O too"),
    Fault("O is not waited for",                           IN_FLIGHT,  "plain",
          _LINEAR_SM90, "values.tile(blocks - 1)); ptx::wgmma_wait_group<0>();",
          "values.tile(blocks - 1));"),
    Fault("a product's group is not committed",            IN_FLIGHT,  "plain",
          _LINEAR_SM90, "descriptor(v + 2048 * i), true); ptx::wgmma_commit_group();",
          "descriptor(v + 2048 * i), true);"),
    Fault("no wgmma.fence before S = Q K^T",               PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "u32 k) { ptx::wgmma_fence();", "u32 k) {"),
    Fault("no wgmma.fence before O += P V",                PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "u32 v) { ptx::wgmma_fence();", "u32 v) {"),
    Fault("descriptor: 512 bytes from 8 rows to the next", WRONG,      "plain",
          _LINEAR_SM90, "u64(1024 / 16) << 32", "u64(512 / 16) << 32"),
    Fault("descriptor: no swizzle",                        PROTOCOL,   "plain",
          _LINEAR_SM90, "| u64(1) << 62", ""),
    Fault("descriptor: the swizzle of 64 bytes",           PROTOCOL,   "plain",
          _LINEAR_SM90, "u64(1) << 62", "u64(2) << 62"),
    Fault("K advances by 64 bytes",                        PROTOCOL,   "plain",
          _LINEAR_SM90, "descriptor(k + 32 * i)", "descriptor(k + 64 * i)"),
    Fault("V advances by 1024 bytes",                      WRONG,      "plain",
          _LINEAR_SM90, "descriptor(v + 2048 * i)", "descriptor(v + 1024 * i)"),
    Fault("V counts as K-major",                           IN_FLIGHT,  "plain",
          _LINEAR_SM90, "f16_rs<true>", "f16_rs<false>"),
    Fault("S is added to the S before",                    WRONG,      "plain",
          _LINEAR_SM90, "i > 0);", "true);"),
    Fault("both consumers work on the same Q",             RACE,       "plain",
          _LINEAR_SM90, "q = smem + kQ + consumer * kTileBytes", "q = smem + kQ"),
    Fault("a product for half of the lanes",               DIVERGENCE, "plain",
          _LINEAR_SM90, "issue_nn(o, weights, values.tile(n - 1));",
          "if (ptx::tid_x() % 32 < 16) issue_nn(o, weights, values.tile(n - 1));"),
    Fault("an operand's index out of range",               UNDEFINED,  "plain",
          _LINEAR_SM90, "s.x[2 * i + j / 2]", "s.x[2 * i + j]"),
    # turns
    Fault("nobody has the first turn",                     DEADLOCK,   "plain",
          _LINEAR_SM90, "if (consumer == 1) ptx::bar_arrive(kTurn, 256);", ""),
    Fault("a turn is given to oneself",                    DEADLOCK,   "plain",
          _LINEAR_SM90, "ptx::bar_arrive(kTurn + 1 - consumer, 256);",
          "ptx::bar_arrive(kTurn + consumer, 256);"),
    Fault("a turn counts one warpgroup",                   DIVERGENCE, "plain",
          _LINEAR_SM90, "ptx::bar_sync(kTurn + consumer, 256);",
          "ptx::bar_sync(kTurn + consumer, 128);"),
    # registers
    Fault("one warp gives its registers up",               DEADLOCK,   "plain",
          _LINEAR_SM90, "ptx::setmaxnreg_dec<24>();", "if (warp == 0) ptx::setmaxnreg_dec<24>();"),
    Fault("nobody gives registers up",                     DEADLOCK,   "plain",
          _LINEAR_SM90, "ptx::setmaxnreg_dec<24>();", ""),
    Fault("too few registers are given up",                DEADLOCK,   "plain",
          _LINEAR_SM90, "setmaxnreg_dec<24>", "setmaxnreg_dec<40>"),
    Fault("giving up takes more",                          PROTOCOL,   "plain",
          _LINEAR_SM90, "setmaxnreg_dec<24>", "setmaxnreg_dec<232>"),
    # the way out
    Fault("O is written without its swizzle",              WRONG,      "plain",
          _LINEAR_SM90, "swizzled(tile, 16 * warp + lane % 16, 2 * i + lane / 16)",
          "tile + 128 * (16 * warp + lane % 16) + 16 * (2 * i + lane / 16)"),
    Fault("O is written over another consumer's Q",        RACE,       "plain",
          _LINEAR_SM90, "stage(q, o);", "stage(smem + kQ + (1 - consumer) * kTileBytes, o);"),
    Fault("no fence.proxy.async after stmatrix",           RACE,       "plain",        # silent
          _LINEAR_SM90, "ptx::fence_proxy_async_shared();", ""),
    Fault("sums are written after the fence",              RACE,       "plain",        # silent
          _LINEAR_SM90, "stage(q, o); // over Q, which has been read "
          "ptx::fence_proxy_async_shared();",
          "stage(q, o); ptx::fence_proxy_async_shared(); "
          "sum_columns(reinterpret_cast<f32*>(ptx::dynamic_smem() + sums_offset), o);"),
    Fault("no barrier before the TMA store",               RACE,       "plain",        # at times
          _LINEAR_SM90, "ptx::bar_sync(kWarpgroup + consumer, 128);", ""),
    Fault("only a warp meets before the TMA store",        RACE,       "plain",        # at times
          _LINEAR_SM90, "ptx::bar_sync(kWarpgroup + consumer, 128);", "ptx::bar_warp_sync();"),
    Fault("both consumers meet at one barrier",            RACE,       "plain",        # silent
          _LINEAR_SM90, "ptx::bar_sync(kWarpgroup + consumer, 128);",
          "ptx::bar_sync(kWarpgroup, 128);"),
    Fault("every warp stores O",                           OUTPUT,     "plain",        # silent
          _LINEAR_SM90, "if (warp == 0) ptx::cp_async_bulk_tensor", "ptx::cp_async_bulk_tensor"),
    Fault("all lanes add their sums",                      WRONG,      "plain",
          _LINEAR_SM90, "if (ptx::elect_sync()) { if (warp == 0)",
          "{ if (ptx::elect_sync() && warp == 0)"),
    Fault("sums of a warp too many are added",             BOUNDS,     "plain",
          _LINEAR_SM90, "smem + sums_offset, kHeadDim * 4", "smem + sums_offset, kHeadDim * 8"),
    Fault("warps share their place for sums",              RACE,       "plain",
          _LINEAR_SM90, "kSums + (4 * consumer + warp)", "kSums + (consumer + warp)"),
    Fault("half of the sums are not written",              UNWRITTEN,  "plain",
          _LINEAR_SM90, "if (lane < 4) sums", "if (lane < 2) sums"),
    Fault("sums lie over the mbarriers",                   PROTOCOL,   "plain",
          _LINEAR_SM90, "kSums + (4 * consumer + warp)", "kSums + (4 * consumer + warp + 1)"),
    Fault("a box of K begins within 16 bytes",             PROTOCOL,   "plain",
          _LINEAR_SM90, "map, 0, n * kBlockN,", "map, 4, n * kBlockN,"),
    Fault("O is stored above its first row",               PROTOCOL,   "plain",
          _LINEAR_SM90, "p.o_map, 0, row0 + 64 * consumer,",
          "p.o_map, 0, row0 + 64 * consumer - 64,"),
    Fault("the store is not waited for",                   PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "ptx::cp_async_bulk_wait_group_read<0>();", ""),
    Fault("other threads wait for the store",              PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "ptx::cp_async_bulk_wait_group_read<0>();",
          "} if (!ptx::elect_sync()) { ptx::cp_async_bulk_wait_group_read<0>();"),
    Fault("the store belongs to no group",                 PROTOCOL,   "plain",        # silent
          _LINEAR_SM90, "ptx::cp_async_bulk_commit_group();", ""),
)
# fmt: on

#: By kernel.
FAULTS = {"fa2_fwd": _FA2, "fa2_fwd_simt": _SIMT, "linear_attention_sm90": _LINEAR_FAULTS}
