"""The memory that ranks share: one blob a rank, laid out by one function for host, kernel and tests.

`layout` is integer arithmetic only: the host calls it with Python integers, the kernel's entry traces it with the
DSL's. Every region begins at a multiple of 256 bytes. What only its own rank touches (pool, h, row metadata) is not in
here.
"""

from typing import Any, NamedTuple

from cute_kernels.tile_config import MAX_EXPERTS, MAX_RANKS

ALIGN = 256
LINE = 32  # ints from one flag to the next: flags of different writers do not share a 128-byte line

# int32 words at the front of a blob, LINE ints apart
EPOCH, ABORT, REPORT = 0, 1, 2
CLAIM, COUNTED, PLACED, HOME, LISTED, BAD_ID = 3, 5, 7, 9, 11, 13  # each in two sets, used by calls alternately
ERRORS = 15  # one line for each rank: the record of its last failed call
NUM_FLAGS = ERRORS + MAX_RANKS

# words of the line REPORT: which call has been reported, and (8 bytes) where the host reads reports
REPORTED, REPORT_TO = 0, 2

# words of a header, one for every source and parity of the call. Where they lie depends on R only, so that ranks whose
# arguments differ understand each other's signature
H_EPOCH, H_LISTED, H_STATUS, H_TOKENS, H_SIGNATURE, H_DETAIL, H_FIRST = 0, 1, 2, 3, 4, 9, 16
SIGNATURE_WORDS = H_DETAIL - H_SIGNATURE
DETAIL_WORDS = 3  # with status "ids out of range": a slot, the lower and the upper word of its id
HEADER_INTS = (H_FIRST + MAX_EXPERTS + 1 + LINE - 1) // LINE * LINE  # then each expert's first place, and their number

# words of an error record, in a blob's line (R_EPOCH is written last) and as the host reads it (R_CODE is written last)
R_EPOCH, R_CODE, R_WHERE, R_INDEX, R_GOT, R_WANTED, R_CLAIM, R_ORIGIN, R_MORE = range(9)


class Layout(NamedTuple):
    """Byte offsets of the regions of a blob, and its size.

    header: [R, 2, HEADER_INTS] int32, written by the sources.
    arrive, done: [2, blocks] int32 counters of blocks of 128 rows.
    counts: [num_ctas, count_pitch] int32, ids of each expert that each CTA counted.
    order: [128 * max_blocks] of (row, code), 8 bytes: this rank's real rows in pool order.
    slots: [max_tokens * K] of (slot, weight), 8 bytes, sorted by (expert, slot).
    xq, xs: [max_tokens, H] e4m3, [max_tokens, scale_pitch] fp32.
    y: [max_tokens * K, H] bf16, where owners put their results.
    """

    header: Any
    arrive: Any
    done: Any
    counts: Any
    order: Any
    slots: Any
    xq: Any
    xs: Any
    y: Any
    size: Any


def _up(value: Any, to: int = ALIGN) -> Any:
    return (value + (to - 1)) // to * to


def count_pitch(num_experts: Any) -> Any:
    """int32 words from one CTA's counts to the next one's: whole 16-byte granules."""
    return _up(num_experts, 4)


def layout(
    hidden: int, max_tokens: Any, top_k: Any, num_experts: Any, num_ranks: Any, num_ctas: Any, max_blocks: Any
) -> Layout:
    """Where everything is.

    Args:
        hidden: H.
        max_tokens: of this workspace, equal on all ranks.
        top_k, num_experts, num_ranks: K, E (of all ranks), R.
        num_ctas: of the launch.
        max_blocks: rows of a pool / 128.
    """
    blocks = hidden // 128
    header = _up(NUM_FLAGS * LINE * 4)
    arrive = _up(header + num_ranks * 2 * (HEADER_INTS * 4))
    done = _up(arrive + 2 * max_blocks * 4)
    counts = _up(done + 2 * max_blocks * 4)
    order = _up(counts + num_ctas * count_pitch(num_experts) * 4)
    slots = _up(order + max_blocks * 1024)
    xq = _up(slots + max_tokens * top_k * 8)
    xs = _up(xq + max_tokens * hidden)
    y = _up(xs + max_tokens * (_up(blocks, 4) * 4))
    size = _up(y + max_tokens * top_k * (hidden * 2))
    return Layout(header, arrive, done, counts, order, slots, xq, xs, y, size)


def capacity_rows(num_slots: int, num_local_experts: int) -> int:
    """Rows of a pool that `num_slots` (token, slot) pairs can never overflow, whatever the routing."""
    rows = num_slots + 127 * min(num_local_experts, num_slots)
    return max(-(-rows // 128), 1) * 128
