"""Which tile a claimed number is: pure integer functions, traced into the kernel and enumerated by CPU tests.

The rows of a rank form `blocks` blocks of 128 rows (every expert's segment is a multiple of 128 rows). Tiles are handed
out in claim order: rounds of `group` blocks,

    round s = the GEMM-1 tiles of group s, then the GEMM-2 tiles of group s - 1

so that a GEMM-2 tile trails the GEMM-1 tiles it needs by about a round, and every tile waits for smaller numbers only.
Inside a group blocks run fastest: the CTAs at work at one time share few weight tiles and one group's rows, all in L2.

Every function takes Python integers or the DSL's, so no function may branch on a value.
"""

from typing import Any, NamedTuple

BLOCK_ROWS = 128

GEMM1, GEMM2, PAUSE, END = 0, 1, 2, -1
"""What an entry of the tile ring is: a tile of GEMM 1 or 2, arrivals without data, the end."""


class Tile(NamedTuple):
    """phase (GEMM1 or GEMM2), block of 128 rows, tile of 256 columns."""

    phase: Any
    block: Any
    n: Any


def integer(condition: Any) -> Any:
    """A condition as 0 or 1."""
    if isinstance(condition, bool):
        return int(condition)
    from cutlass import Int32

    return Int32(condition)


def smaller(a: Any, b: Any) -> Any:
    """min(a, b)."""
    return b + (a - b) * integer(a < b)


def ceil_div(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def num_tiles(blocks: Any, n1: int, n2: int) -> Any:
    return blocks * (n1 + n2)


def locate(t: Any, blocks: Any, group: int, n1: int, n2: int) -> Tile:
    """Tile number t, 0 <= t < num_tiles. blocks: of this rank, > 0; group: blocks of a full group; n1, n2: tiles of 256
    columns of either GEMM."""
    last = ceil_div(blocks, group) - 1  # last group
    late = integer(t >= group * n1)
    s = late * (1 + (t - late * (group * n1)) // (group * (n1 + n2)))
    s = smaller(s, last)
    later = integer(s > 0)
    r = t - s * (group * (n1 + n2)) + later * (group * n2)  # inside round s
    size = smaller(blocks - s * group, group)
    first = size * n1  # GEMM-1 tiles of this round
    before = later * (group * n2)  # GEMM-2 tiles of the group before, always a full one
    is_gemm1 = integer(r < first)
    is_before = (1 - is_gemm1) * integer(r < first + before)
    # behind both, the last round goes on with GEMM 2 of its own group
    r = r - (1 - is_gemm1) * first - (1 - is_gemm1) * (1 - is_before) * before
    begin = (s - is_before) * group
    size = size + is_before * (group - size)
    n = r // size
    return Tile(1 - is_gemm1, begin + r - n * size, n)


def find_expert(offs: Any, row: Any, table: int) -> Any:
    """The expert whose segment holds `row`: the last e with offs[e] <= row, in offs[0 .. table], which is filled up
    with rows beyond any; table is a power of two."""
    e = 0
    step = table // 2
    while step:
        e = e + step * integer(offs[e + step] <= row)
        step //= 2
    return e


def aligned(rows: Any) -> Any:
    """rows of a segment, rounded up to whole blocks."""
    return ceil_div(rows, BLOCK_ROWS) * BLOCK_ROWS


def unrolling(k1: int, k2: int, at_most: int = 8) -> int:
    """k-blocks in the main loop's body: it divides the k-blocks of both GEMMs."""
    return next(u for u in (8, 4, 2, 1) if u <= at_most and k1 % u == 0 and k2 % u == 0)


def default_group(n1: int, n2: int, num_ctas: int = 132) -> int:
    """Blocks of a group: 16, or more where a round would be short against the tiles in flight (three a CTA)."""
    group = 16
    while group * min(n1, n2) < 2 * num_ctas and group * (n1 + n2) < 3 * num_ctas:
        group *= 2
    return group
