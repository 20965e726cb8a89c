"""Faults planted in what looks at masks, and in what passes over blocks by it; faults.py says what
a row is."""

from __future__ import annotations

from emulator.faults import BOUNDS, DIVERGENCE, OUTPUT, UNDEFINED, WRONG, Fault

# fmt: off
_LOOK, _TILES, _PATH = "mask_tiles.cu", "attn/mask_tiles.cuh", "attn/tile_path.cuh"
_FILE, _INPUTS = "fa3_fwd_sm90.cu", "attn/score_inputs.cuh"
MASK_TILES = (
    # what is found
    Fault("even and odd keys change places",               WRONG,      "blocks",
          _LOOK, "(even & kEven) | (odd & kEven) << 1", "(odd & kEven) | (even & kEven) << 1"),
    Fault("the halves of eight keys change places",        WRONG,      "blocks",
          _LOOK, "upper = lane() & 2", "upper = ~lane() & 2"),
    Fault("rows of a block change places",                 WRONG,      "blocks",
          _LOOK, "if (lane() / 4 == i)", "if ((lane() / 4 ^ 1) == i)"),
    Fault("no key is missed",                              WRONG,      "blocks",
          _LOOK, "missing |= existing & ~visible;", ""),
    Fault("no key is seen",                                WRONG,      "blocks",
          _LOOK, "any |= visible;", ""),
    Fault("only the first four keys tell what is missed",  WRONG,      "blocks",
          _LOOK, "return ptx::vote_any(missing != 0) ? kCut",
          "return missing != 0 ? kCut"),
    Fault("keys that lie apart are read side by side",     BOUNDS,     "apart",
          "attn/score_row.cuh", "return s.key == 1 &&", "return"),
    Fault("four keys are read from an odd address",        UNDEFINED,  "odd",          # silent
          "attn/score_row.cuh", "reinterpret_cast<u64>(array) % sizeof(Vec<T, kRun>) == 0", "true"),
    Fault("all tiles see what the first one does",         WRONG,      "repeated",
          _LOOK, "stride.row == 0 ? n * kBlockN < p.seqlen_k :", ""),
    # where it lies
    Fault("sequences have the same tiles",                 OUTPUT,     "blocks",
          _TILES, "tile.batch * p.mask_tiles_stride.batch +", ""),
    Fault("heads have the same tiles",                     OUTPUT,     "blocks",
          _TILES, "tile.head * p.mask_tiles_stride.head +", ""),
    Fault("rows have the same tiles",                      OUTPUT,     "blocks",
          _TILES, "tile.row0 / kBlockM * p.mask_tiles_stride.row", "0"),
    Fault("lanes of a quad have the same bits",            OUTPUT,     "blocks",
          _TILES, "4 * row + lane() % 4", "4 * row"),
    Fault("bits lie over the blocks' bytes",               OUTPUT,     "blocks",
          _TILES, "words + block_count(p) / kPerWord", "words"),
    # which blocks are taken
    Fault("hidden blocks are not passed over",             WRONG,      "blocks",
          _PATH, "return mask.last(n - 1);",
          "return {n - 1, n > 0 ? mask[n - 1] : kHidden};"),
    Fault("a hidden block counts as the one after it",     WRONG,      "blocks",
          _TILES, "above = kPerWord - 1 - n % kPerWord;",
          "above = kPerWord - min_of(kPerWord, 2 + n % kPerWord);"),
    Fault("the last block that is seen is left out",       WRONG,      "blocks",
          _PATH, "mask.last(keys.last - 1).n) + 1", "mask.last(keys.last - 1).n)"),
    # how they are weighed
    Fault("cut blocks count as whole",                     WRONG,      "blocks",
          _FILE, "block.mask == kCut ?", "block.mask == kHidden ?"),
    Fault("all rows have the bits of a lane's first",      WRONG,      "blocks",
          _INPUTS, "Fragment::row(r));\n    }", "Fragment::row(0));\n    }"),
    Fault("each lane begins blind blocks by itself",       DIVERGENCE, "blocks",
          _FILE, "ptx::bar_red_or(", "[](bool x, int, int) { return x; }("),
)
# fmt: on
