"""Which tile a kernel works with: a table, searched from the top, first row that fits wins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cufa.errors import CufaError, UnsupportedError
from cufa.gpu.device import OLDEST_ARCH, Device
from cufa.gpu.registry import BACKWARD_KERNEL_NAMES, KERNEL_NAMES, select_for
from cufa.options import ITEMSIZE, plain_choice, plain_dtype, plain_integer


class Config(NamedTuple):
    """How a kernel divides its work.

    A block of `threads` threads takes `block_m` queries (the paper's B_r) and walks over the keys
    `block_n` (B_c) at a time; it holds the keys of `stages` such steps at once. `blocks_per_sm`
    blocks are to fit on a multiprocessor together, which bounds the registers of a thread.
    """

    block_m: int
    block_n: int
    threads: int
    stages: int
    blocks_per_sm: int


class Scores(IntEnum):
    """What happens to scores, from what takes least registers to what takes most.

    All but `OPEN` and `PLAIN` may have any bounds beside.
    """

    #: Only scaled, by a positive number, and bounded at most on the right: causal.
    OPEN = 0
    #: Likewise, and bounded on the left too: a window.
    PLAIN = 1
    #: A mask.
    MASKED = 2
    #: ALiBi, softcap, a scale that is not positive; dropout.
    MODIFIED = 3
    #: A bias of 16 bits.
    BIASED = 4
    #: A bias of float32; one of 16 bits or float32 beside a mask.
    BIASED_32 = 5
    #: A bias of float64; or what modifies scores beside a mask or a bias.
    MIXED = 6


def kind_of_scores(*, window: bool, mask: bool, modified: bool, bias: str | None) -> Scores:
    """The kind of a call's scores.

    `window` is one that bounds the keys on the left, `modified` ALiBi, softcap, a scale that is not
    positive or dropout, and `bias` the dtype of one.
    """
    if bias == "float64" or (modified and (mask or bias is not None)):
        return Scores.MIXED
    if bias is not None:
        return Scores.BIASED_32 if mask or bias == "float32" else Scores.BIASED
    if modified:
        return Scores.MODIFIED
    if mask:
        return Scores.MASKED
    return Scores.PLAIN if window else Scores.OPEN


class _Row(NamedTuple):
    kernel: str
    element_bytes: int  # in shared memory: of the arrays, or of what they are computed in
    arch: int  # of this one and of later ones without a row of their own
    scores: Scores  # at most
    causal: bool | None  # whether keys are bounded on the right; None: either
    head_dim: int  # at most; the larger of head_dim and head_dim_v
    square: bool  # only where the two are the same
    seqlen: int  # at most
    config: Config


#: Kernels whose shared memory holds what the arrays hold, not what it is computed in.
_TENSOR_CORES = ("fa1_fwd", "fa2_fwd", "fa3_fwd_sm90", "fa2_bwd", "fa2_bwd_tf32", "fa2_bwd_dq")
_HOPPER = Device.of_arch(90)
#: Not for attention itself: it looks at masks for kernels that want to know beforehand.
MASK_TILES = "mask_tiles"
#: Around the products of the backward pass: what is known of each row, dQ from its sums, dsink.
BWD_ROWS, BWD_QUERIES, BWD_SINK = "bwd_rows", "bwd_queries", "bwd_sink"
#: dQ from sums that lie as tensor cores leave them.
BWD_QUERIES_MMA = "bwd_queries_mma"
ANY = 1 << 62
_OPEN, _PLAIN, _MASKED, _MODIFIED, _BIASED, _BIASED_32, _MIXED = Scores

# fmt: off
_TABLE = (
    #    kernel       size arch scores  causal dim square length  block_m  _n thr stages blocks/SM
    _Row("fa3_fwd_sm90", 2,  90, _OPEN,     True,  64, False, 2048, Config(64,  64, 256, 2, 3)),
    _Row("fa3_fwd_sm90", 2,  90, _PLAIN,    None,  64, False, ANY, Config(192, 128, 512, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _BIASED,   None, 128, False, ANY, Config(128, 128, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _BIASED,   None, 192, False, ANY, Config(128,  96, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _BIASED_32, None, 64, False, ANY, Config(128, 128, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _BIASED_32, None, 128, False, ANY, Config(128, 96, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _BIASED_32, None, 256, False, ANY, Config(128, 64, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _MIXED,    None, 128, False, ANY, Config(128,  64, 384, 2, 1)),
    _Row("fa3_fwd_sm90", 2,  90, _MIXED,    None, 256, False, ANY, Config(128,  32, 384, 2, 1)),
    _Row("fa2_fwd",      2, 100, _OPEN,     True,  64, True,  ANY, Config(128,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2, 100, _OPEN,     True, 128, True,  ANY, Config( 64,  64, 128, 1, 3)),
    _Row("fa2_fwd",      2,  90, _OPEN,     None,  64, True,  ANY, Config(128, 128, 128, 1, 1)),
    _Row("fa2_fwd",      2,  90, _OPEN,     True, 128, True,  512, Config( 64,  64, 128, 1, 3)),
    _Row("fa2_fwd",      2,  90, _OPEN,     None, 128, True,  ANY, Config(128,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2,  90, _OPEN,     True, 256, True, 2048, Config( 64,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2,  90, _OPEN,     None, 256, True,  ANY, Config(128, 128, 256, 1, 1)),
    _Row("fa2_fwd",      2,  80, _PLAIN,    None,  64, False, ANY, Config(128,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2,  80, _MIXED,    None, 128, False, ANY, Config( 64,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2,  80, _PLAIN,    None, 256, False, ANY, Config( 64,  64, 128, 1, 1)),
    _Row("fa2_fwd",      2,  80, _MIXED,    None, 256, False, ANY, Config( 64,  32, 128, 1, 1)),
    _Row("fa2_fwd",      4,  80, _MIXED,    None,  64, False, ANY, Config( 64,  64, 128, 1, 2)),
    _Row("fa2_fwd",      4,  80, _MIXED,    None, 128, False, ANY, Config( 64,  32, 128, 1, 2)),
    _Row("fa2_fwd",      8,  80, _MIXED,    None,  64, False, ANY, Config(128,  64, 256, 1, 1)),
    _Row("fa2_fwd",      8,  80, _PLAIN,    None, 128, False, ANY, Config(128,  32, 256, 1, 1)),
    _Row("fa2_fwd",      8,  80, _MIXED,    None, 128, False, ANY, Config(128,  16, 256, 1, 1)),
    _Row("fa2_fwd",      8,  80, _MIXED,    None, 128, False, ANY, Config( 64,  32, 128, 1, 1)),
    _Row("fa2_fwd",      8,  80, _MIXED,    None, 128, False, ANY, Config( 32,  32,  64, 1, 1)),
    _Row("fa2_fwd_simt", 4,  70, _PLAIN,    None, 128, False, ANY, Config( 64,  64, 256, 1, 2)),
    _Row("fa2_fwd_simt", 4,  70, _MIXED,    None, 128, False, ANY, Config( 64,  64, 256, 1, 1)),
    _Row("fa2_fwd_simt", 4,  70, _MIXED,    None, 256, False, ANY, Config( 32,  32, 256, 1, 1)),
    _Row("fa2_fwd_simt", 4,  70, _MIXED,    None, 256, False, ANY, Config( 16,  16, 128, 1, 1)),
    _Row("fa2_fwd_simt", 8,  70, _MIXED,    None, 128, False, ANY, Config( 64,  32, 256, 1, 1)),
    _Row("fa2_fwd_simt", 8,  70, _MIXED,    None, 128, False, ANY, Config( 32,  32, 256, 1, 1)),
    _Row("fa2_fwd_simt", 8,  70, _MIXED,    None, 256, False, ANY, Config( 16,  32, 128, 1, 1)),
    _Row("fa2_fwd_simt", 8,  70, _MIXED,    None, 256, False, ANY, Config(  8,  16, 128, 1, 1)),
    _Row("fa1_fwd",      2, 100, _MIXED,    None, 128, False, ANY, Config( 32,  64, 128, 1, 2)),
    _Row("fa1_fwd",      2,  90, _PLAIN,    None,  64, False, ANY, Config( 32, 256, 128, 1, 2)),
    _Row("fa1_fwd",      2,  90, _PLAIN,    None, 128, False, ANY, Config( 32, 128, 128, 1, 2)),
    _Row("fa1_fwd",      2,  80, _MIXED,    None, 128, False, ANY, Config( 32,  64, 128, 1, 2)),
    _Row("fa1_fwd_simt", 4,  70, _MIXED,    None, 128, False, ANY, Config( 32,  64, 256, 1, 1)),
    _Row("fa1_fwd_simt", 4,  70, _MIXED,    None, 128, False, ANY, Config( 16,  64, 128, 1, 1)),
    _Row("fa1_fwd_simt", 4,  70, _MIXED,    None, 256, False, ANY, Config( 16,  16, 128, 1, 1)),
    _Row("fa1_fwd_simt", 8,  70, _MIXED,    None, 128, False, ANY, Config( 16,  32, 128, 1, 1)),
    _Row("fa1_fwd_simt", 8,  70, _MIXED,    None, 128, False, ANY, Config( 16,  16, 128, 1, 1)),
)
_MMA_BACKWARD = (
    _Row("fa2_bwd",      2,  90, _OPEN,     None,  64, False, ANY, Config( 64, 128, 128, 2, 2)),
    _Row("fa2_bwd",      2, 100, _OPEN,     None, 128, False, ANY, Config( 64,  64, 256, 2, 1)),
    _Row("fa2_bwd",      2,  90, _OPEN,     None, 128, False, ANY, Config( 64, 128, 256, 2, 1)),
    _Row("fa2_bwd",      2,  90, _OPEN,     None, 256, False, ANY, Config( 64,  64, 256, 2, 1)),
    _Row("fa2_bwd",      2,  80, _PLAIN,    None,  64, False, ANY, Config( 64, 128, 256, 2, 1)),
    _Row("fa2_bwd",      2,  80, _PLAIN,    None, 128, False, ANY, Config( 64,  64, 256, 2, 1)),
    _Row("fa2_bwd",      2,  80, _PLAIN,    None, 128, False, ANY, Config( 32,  64, 128, 2, 1)),
    _Row("fa2_bwd",      2,  80, _MIXED,    None, 224, False, ANY, Config( 32,  32, 128, 2, 1)),
    _Row("fa2_bwd",      2,  80, _MIXED,    None, 256, False, ANY, Config( 32,  32, 128, 1, 1)),
    _Row("fa2_bwd_tf32", 4,  80, _PLAIN,    None,  64, False, ANY, Config( 64,  64, 128, 1, 2)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None,  64, False, ANY, Config( 32,  64, 128, 1, 2)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None, 128, False, ANY, Config( 64,  64, 256, 1, 1)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None, 128, False, ANY, Config( 32,  32, 128, 1, 1)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None, 224, False, ANY, Config( 32,  64, 256, 1, 1)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None, 224, False, ANY, Config( 32,  32, 128, 1, 1)),
    _Row("fa2_bwd_tf32", 4,  80, _MIXED,    None, 224, False, ANY, Config( 32,  16,  64, 1, 1)),
    _Row("fa2_bwd_dq",   2,  80, _PLAIN,    None, 128, False, ANY, Config( 64,  64, 128, 2, 1)),
    _Row("fa2_bwd_dq",   2,  80, _MIXED,    None, 128, False, ANY, Config( 64,  32, 128, 2, 1)),
    _Row("fa2_bwd_dq",   2,  80, _PLAIN,    None, 256, False, ANY, Config( 64,  32, 128, 2, 1)),
    _Row("fa2_bwd_dq",   2,  80, _MIXED,    None, 256, False, ANY, Config( 64,  16, 128, 2, 1)),
)
_SIMT_BACKWARD = (
    _Row("",             4,  70, _PLAIN,    None,  64, False, ANY, Config( 64,  64, 128, 1, 2)),
    _Row("",             4,  70, _MIXED,    None,  64, False, ANY, Config( 64,  64, 256, 1, 1)),
    _Row("",             4,  70, _PLAIN,    None, 128, False, ANY, Config( 32,  64, 128, 1, 2)),
    _Row("",             4,  70, _MIXED,    None, 128, False, ANY, Config( 32,  32, 128, 1, 1)),
    _Row("",             4,  70, _MIXED,    None, 256, False, ANY, Config( 32,  32, 256, 1, 1)),
    _Row("",             4,  70, _MIXED,    None, 256, False, ANY, Config( 16,  16, 128, 1, 1)),
    _Row("",             4,  70, _MIXED,    None, 256, False, ANY, Config(  8,  16, 128, 1, 1)),
    _Row("",             8,  70, _MIXED,    None, 128, False, ANY, Config( 32,  32, 256, 1, 1)),
    _Row("",             8,  70, _MIXED,    None, 256, False, ANY, Config( 16,  16, 256, 1, 1)),
    _Row("",             8,  70, _MIXED,    None, 256, False, ANY, Config(  8,  16, 128, 1, 1)),
)
# fmt: on
#: Of the backward pass. Its kernels on CUDA cores hold the same tiles in shared memory, all three;
#: the sums of dbias take the registers of a second block.
_BACKWARD_TABLE = (
    *_MMA_BACKWARD,
    *(row._replace(kernel="fa2_bwd_simt") for row in _SIMT_BACKWARD),
    *(row._replace(kernel="fa2_bwd_dq_simt") for row in _SIMT_BACKWARD),
    *(
        row._replace(kernel="fa2_bwd_dbias_simt", config=row.config._replace(blocks_per_sm=1))
        for row in _SIMT_BACKWARD
        if row.scores == _MIXED
    ),
)

#: A length for each class of lengths that the table tells apart.
LENGTHS = (1, *sorted({row.seqlen + 1 for row in _TABLE} - {ANY + 1}))


@dataclass(frozen=True, eq=False)
class Tuned:
    """Rows that were measured on one kind of card (`gpu.tuning`), searched there before the table.

    A row holds for the head dims that it was measured with, not for those below. Two of these are
    never equal: caches of plans have the one in force in their keys.
    """

    rows: tuple[_Row, ...] = ()
    devices: tuple[str, ...] = ()
    file: str | None = None
    #: Why `file` was refused, if it was: what every search for a tile then says.
    refusal: CufaError | None = None

    def rows_for(self, device: Device, head_dim: int, head_dim_v: int) -> tuple[_Row, ...]:
        """Those of a card and of head dims rounded up to a multiple of 32."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if device.name not in self.devices:
            return ()
        square = head_dim == head_dim_v
        return tuple(
            row
            for row in self.rows
            if row.head_dim == max(head_dim, head_dim_v) and row.square == square
        )


#: In force; replaced as a whole by `gpu.tuning`.
tuned = Tuned()


def lengths() -> tuple[int, ...]:
    """`LENGTHS`, and those that the rows in force tell apart."""
    return tuple(sorted({*LENGTHS, *(row.seqlen + 1 for row in tuned.rows)} - {ANY + 1}))


def round_up(n: int, multiple: int) -> int:
    """`n`, or the next multiple above it."""
    return -(-n // multiple) * multiple


def element_bytes(kernel: str, dtype: str) -> int:
    """Size of an element in a kernel's shared memory."""
    return ITEMSIZE[dtype] if kernel in _TENSOR_CORES else max(4, ITEMSIZE[dtype])


def blocks_fit(config: Config, smem: int, shared_memory: int) -> bool:
    """Whether a multiprocessor has room for the blocks that are to share it, of `smem` bytes each,
    if it gives a single one `shared_memory`."""
    reserved = 1024  # by the driver, of each block
    return (smem + reserved) * config.blocks_per_sm <= shared_memory + reserved


def room_for_ones(config: Config, dtype: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether `fa3_fwd_sm90` can have columns of ones behind V, and all else that it has."""
    smem = smem_bytes("fa3_fwd_sm90", config, dtype, head_dim, head_dim_v, ones=True)
    return head_dim_v in (64, 128) and blocks_fit(config, smem, _HOPPER.shared_memory)


def smem_bytes(
    kernel: str, config: Config, dtype: str, head_dim: int, head_dim_v: int, ones: bool = False
) -> int:
    """Dynamic shared memory of one block, in `fa3_fwd_sm90` with or without ones behind V; the
    kernel asserts the same figure."""
    if kernel in (MASK_TILES, BWD_ROWS, BWD_QUERIES, BWD_QUERIES_MMA):
        return 0
    m, n, size = config.block_m, config.block_n, element_bytes(kernel, dtype)
    if kernel == BWD_SINK:
        return size * config.threads // 32
    if kernel == "fa2_fwd":
        return size * (m * head_dim + n * head_dim + n * head_dim_v)
    if kernel == "fa2_bwd":
        loaded = (
            config.stages * m * (size * (head_dim + head_dim_v) + 2 * 4)
        )  # lse and D are float32
        return size * n * (head_dim + head_dim_v) + 3 * size * m * n + loaded
    if kernel == "fa2_bwd_tf32":
        return size * ((m + n) * (head_dim + head_dim_v) + 2 * m * n + 2 * m)
    if kernel == "fa2_bwd_dq":
        return size * (m + 2 * n) * (head_dim + head_dim_v)
    if kernel == "fa3_fwd_sm90":
        d, dv, control = round_up(head_dim, 64), round_up(head_dim_v, 64), 768
        q, keys = size * m * d, size * config.stages * n * (d + dv)
        # Q of the next tile too, if there is room, and unless three warpgroups compute, which have
        # no registers for two tiles at once.
        both = 2 * q + keys + control
        needed = both if m <= 128 and both <= _HOPPER.shared_memory else both - q
        return needed + (size * config.stages * n * 64 if ones else 0)
    if kernel == "fa1_fwd":
        slices = config.threads // 32
        k, partial_outputs = size * n * head_dim, 4 * (slices - 1) * m * head_dim_v
        maxima_and_sums = 2 * 4 * slices * m
        return size * (n * head_dim_v + m * head_dim) + max(k, partial_outputs) + maxima_and_sums

    def padded(rows: int, cols: int) -> int:
        return rows * (cols * size + 16)

    q, k, v = padded(m, head_dim), padded(n, head_dim), padded(n, head_dim_v)
    if kernel.startswith("fa2_bwd"):
        return q + padded(m, head_dim_v) + k + v + padded(m, n)
    if kernel == "fa1_fwd_simt":
        slices = 2 if n > 16 else 1
        partial_outputs = size * (slices - 1) * m * head_dim_v
        maxima_and_sums = 2 * size * slices * m
        return q + k + v + padded(slices * m, n // slices) + partial_outputs + maxima_and_sums
    return q + padded(m, n) + max(k, v)


def state_bytes(kernel: str, config: Config, dtype: str, head_dim_v: int) -> int:
    """Global memory that keeps O, m and l of one query tile from key block to key block.

    Each of the lanes that share a row keeps m and l. The kernel asserts the same figure.
    """
    if not kernel.startswith("fa1"):
        return 0
    lanes = 4 if kernel in _TENSOR_CORES else 16
    return config.block_m * (head_dim_v + 2 * lanes) * max(4, ITEMSIZE[dtype])


def get_best_config(
    seqlen: int,
    *,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "float16",
    causal: bool = False,
    plain: bool = True,
    window: bool = False,
    mask: bool = False,
    bias: str | None = None,
    kernel: str | None = None,
    arch: int = 90,
    direction: str = "forward",
) -> Config:
    """The tile that `cufa.attention` uses, or `cufa.attention_backward`.

    Parameters
    ----------
    seqlen : int
        Number of queries of one sequence.
    head_dim, head_dim_v : int, default 64 and `head_dim`
    dtype : {"float16", "bfloat16", "float32", "float64"}, default "float16"
    causal : bool, default False
        True: causal, or a window that bounds the keys on the right.
    plain : bool, default True
        False: the call has ALiBi slopes, a softcap, a scale that is not positive, or dropout.
    window : bool, default False
        True: the call has a window that bounds the keys on the left.
    mask : bool, default False
        True: the call has a mask.
    bias : {"float16", "bfloat16", "float32", "float64"}, default None
        The dtype of the call's bias, if it has one.
    kernel : str, default the one that "auto" takes for aligned arrays, and masks that vary by key
        "fa3_fwd_sm90", "fa2_fwd", "fa2_fwd_simt", "fa1_fwd" or "fa1_fwd_simt"; backward
        "fa2_bwd", "fa2_bwd_tf32", "fa2_bwd_simt", "fa2_bwd_dq", "fa2_bwd_dq_simt" or
        "fa2_bwd_dbias_simt".
    arch : int, default 90
        Compute capability times 10.
    direction : {"forward", "backward"}, default "forward"
        "backward": the tile of the kernel that computes dk and dv, or of the one that is named.

    Returns
    -------
    Config

    Raises
    ------
    ArgumentError
        An unknown dtype or kernel, a length below 0, an architecture below 70.
    DTypeError
        A number that is not an integer.
    UnsupportedError
        No kernel, or not the one named, takes this dtype and head dim on this architecture.
    """
    dtype = plain_dtype("dtype", dtype)
    seqlen = plain_integer("seqlen", seqlen, 0)
    head_dim = plain_integer("head_dim", head_dim, 1)
    head_dim_v = head_dim if head_dim_v is None else plain_integer("head_dim_v", head_dim_v, 1)
    device = Device.of_arch(plain_integer("arch", arch, OLDEST_ARCH))
    plain = plain_choice("plain", plain, (False, True))
    causal = plain_choice("causal", causal, (False, True))
    window = plain_choice("window", window, (False, True))
    mask = plain_choice("mask", mask, (False, True))
    bias = None if bias is None else plain_dtype("bias", bias)
    scores = kind_of_scores(window=window, mask=mask, modified=not plain, bias=bias)
    backward = plain_choice("direction", direction, ("forward", "backward")) == "backward"
    if kernel is not None:
        names = BACKWARD_KERNEL_NAMES if backward else KERNEL_NAMES
        kernel = plain_choice("kernel", kernel, names)
    spec = select_for(dtype, max(head_dim, head_dim_v), device, kernel, direction)
    return find_config(spec.name, dtype, head_dim, head_dim_v, seqlen, scores, causal, device)


def find_config(
    kernel: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    seqlen: int,
    scores: Scores,
    causal: bool,
    device: Device,
) -> Config:
    """The first row that fits the problem and the card's shared memory; tuned ones come first.

    Raises
    ------
    UnsupportedError
        No row fits.
    """
    d, dv = round_up(head_dim, 32), round_up(head_dim_v, 32)
    for row in (*tuned.rows_for(device, d, dv), *_TABLE, *_BACKWARD_TABLE):
        fits = (
            row.kernel == kernel
            and row.element_bytes == element_bytes(kernel, dtype)
            and row.arch <= device.arch
            and scores <= row.scores
            and row.causal in (None, causal)
            and max(d, dv) <= row.head_dim
            and (not row.square or d == dv)
            and seqlen <= row.seqlen
        )
        if fits and smem_bytes(kernel, row.config, dtype, d, dv) <= device.shared_memory:
            return row.config
    raise UnsupportedError(
        f"no tile of {kernel} for {dtype}, head_dim {head_dim}, head_dim_v {head_dim_v} on "
        f"{device.name}, which gives a block {device.shared_memory} bytes of shared memory"
    )


def tuned_arch(kernel: str, device: Device) -> int:
    """The newest architecture, up to a card's, that a kernel's tiles were chosen on."""
    return max(row.arch for row in _TABLE if row.kernel == kernel and row.arch <= device.arch)
