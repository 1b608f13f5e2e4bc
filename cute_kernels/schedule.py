"""Which tile a claimed number is: pure integer functions, traced into the kernel and enumerated by CPU tests.

The rows of a rank form `blocks` blocks of 128 rows (every expert's segment is a multiple of 128 rows), cut into groups
at `cuts`: cut m lies at block m * group, or at the nearest expert boundary if that is at most half a group away, so
that an expert's weights are read in few groups. Tiles are handed out in claim order, in rounds:

    round s = the GEMM-1 tiles of group s, then the GEMM-2 tiles of group s - 1

so that a GEMM-2 tile trails the GEMM-1 tiles it needs by about a round, and every tile waits for smaller numbers only.
Inside a group blocks run fastest: the CTAs at work at one time share few weight tiles and one group's rows, all in L2.

Every function takes Python integers or the DSL's, so no function may branch on a value.
"""

from typing import Any, NamedTuple

BLOCK_ROWS = 128

GEMM1, GEMM2, PAUSE, END = 0, 1, 2, -1
"""What an entry of the tile ring is: a tile of GEMM 1 or 2, arrivals without data, the end."""

WGRAD, HOMEWARD, TURN = 3, 4, 5
"""Behind the tiles, where a backward steals (backward_steal): a tile of dW; the mark behind the last tile; a block of a
transposed copy. The last two have one stage, and no wgmma."""


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


def larger(a: Any, b: Any) -> Any:
    """max(a, b)."""
    return a + b - smaller(a, b)


def num_tiles(blocks: Any, n1: int, n2: int) -> Any:
    return blocks * (n1 + n2)


CUTS = 128
"""Entries of the table of cuts, a power of two: one more than the groups there may be."""


def scaled_group(group: int, num_ctas: Any) -> Any:
    """A group for a grid of num_ctas instead of 132, but no less than half of it: virtual ranks share one L2, each has
    fewer tiles under way. Of these, blocks times column tiles, both sides should be long."""
    return larger((num_ctas * group + 131) // 132, (group + 1) // 2)


def group_size(blocks: Any, group: Any) -> Any:
    """Blocks of a group before cuts are moved: `group`, or more where the table of cuts would not hold them."""
    return larger(ceil_div(blocks, CUTS - 2), group + blocks * 0)


def cut(m: Any, blocks: Any, size: Any, offs: Any, table: int) -> Any:
    """First block of group m, 0 <= m < CUTS; `blocks` behind the last group.

    Args:
        blocks: of this rank. size: `group_size`. offs, table: as for find_expert.
    """
    at = m * size
    inside = integer(m > 0) * integer(at < blocks)  # neither the first cut nor behind the last
    e = find_expert(offs, at * inside * BLOCK_ROWS, table)
    before, behind = offs[e] // BLOCK_ROWS, offs[e + 1] // BLOCK_ROWS
    near = before + (behind - before) * integer(at - before > behind - at)
    away = near - at
    is_close = integer(away * 2 <= size) * integer(-away * 2 <= size)
    moved = at + away * is_close
    return smaller(moved * inside + (1 - inside) * at, blocks)


def round_start(s: Any, cuts: Any, n1: int, n2: int) -> Any:
    """Number of the first tile of round s, 0 <= s < CUTS."""
    return cuts[s] * n1 + cuts[s - integer(s > 0)] * n2


def locate(t: Any, cuts: Any, n1: int, n2: int) -> Tile:
    """Tile number t, 0 <= t < num_tiles. cuts: CUTS entries; n1, n2: tiles of 256 columns of either GEMM."""
    s, step = 0, CUTS // 2
    while step:
        s = s + step * integer(round_start(s + step, cuts, n1, n2) <= t)
        step //= 2
    r = t - round_start(s, cuts, n1, n2)
    begin = cuts[s]
    size = cuts[smaller(s + 1, CUTS - 1)] - begin
    previous = cuts[s - integer(s > 0)]
    is_gemm2 = integer(r >= size * n1)
    r = r - is_gemm2 * (size * n1)
    size = size + is_gemm2 * (begin - previous - size)
    begin = begin + is_gemm2 * (previous - begin)
    n = r // larger(size, 1)
    return Tile(is_gemm2, begin + r - n * size, n)


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
