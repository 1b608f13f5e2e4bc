"""The fused kernel's integer mappings, enumerated; and a model of its claim order that deadlocks without `pause`."""

import random

import pytest

from cute_kernels import schedule
from cute_kernels.tile_config import MAX_SMEM, Problem, TileConfig

SHAPES = {"A": (7168, 2048), "B": (2048, 768), "C": (4096, 1024), "odd": (384, 384), "least": (128, 128)}
EXPERT_ROWS = {
    "empty experts": [0, 0, 1, 0, 127, 128, 129, 0],
    "one row": [1],
    "all on one": [0] * 31 + [5000],
    "ragged": [128, 300, 5, 2048, 2100, 0, 777],
    "many": [i % 5 for i in range(300)],
}


def offsets(rows, table):
    offs, at = [], 0
    for n in rows:
        offs.append(at)
        at += schedule.aligned(n)
    return offs + [at] + [0x7FFFFF00] * (table - len(rows))


def cuts_of(rows, group, table=512):
    offs = offsets(rows, table)
    blocks = offs[len(rows)] // 128
    size = schedule.group_size(blocks, group)
    return [schedule.cut(m, blocks, size, offs, table) for m in range(schedule.CUTS)], blocks


def tiles_of(rows, group, n1, n2):
    cuts, blocks = cuts_of(rows, group)
    return [schedule.locate(t, cuts, n1, n2) for t in range(schedule.num_tiles(blocks, n1, n2))]


ROUTINGS = {**EXPERT_ROWS, "even": [2048] * 6, "uneven": [2000, 2100, 2047, 2049, 2300, 1800], "small": [100] * 40}


@pytest.mark.parametrize("rows", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("n1, n2", [(16, 28), (6, 8), (3, 2), (1, 1)])
def test_every_tile_once_and_behind_what_it_needs(rows, n1, n2):
    blocks = sum(schedule.aligned(n) for n in rows) // 128
    for group in (1, 5, 16):
        seen = {}
        for t, tile in enumerate(tiles_of(rows, group, n1, n2)):
            assert tile not in seen
            seen[tile] = t
        wanted = {(phase, b, n) for phase, tiles in ((0, n1), (1, n2)) for b in range(blocks) for n in range(tiles)}
        assert {tuple(x) for x in seen} == wanted
        for (phase, block, _), t in seen.items():
            if phase == schedule.GEMM2:
                assert t > max(seen[schedule.Tile(0, block, n)] for n in range(n1))


@pytest.mark.parametrize("rows", ROUTINGS.values(), ids=ROUTINGS)
def test_cuts_are_ordered_and_groups_bounded(rows):
    for group in (1, 4, 16):
        cuts, blocks = cuts_of(rows, group)
        assert cuts[0] == 0 and cuts[-1] == blocks and cuts == sorted(cuts)
        size = schedule.group_size(blocks, group)
        assert max(b - a for a, b in zip(cuts, cuts[1:], strict=False)) <= 2 * size


def test_cuts_lie_between_experts():
    cuts, _ = cuts_of([2000, 2100, 2047, 2049, 2300, 1800], 16)  # 16, 17, 16, 17, 18, 15 blocks
    assert cuts[:7] == [0, 16, 33, 49, 66, 84, 99]
    cuts, _ = cuts_of([128 * 100], 16)
    assert cuts[:8] == [0, 16, 32, 48, 64, 80, 100, 100]


def test_more_blocks_than_the_table_of_cuts_holds():
    tiles = tiles_of([128 * 5000], 16, 1, 1)
    assert len(set(tiles)) == 10000


def test_gemm2_trails_by_a_round():
    """What a GEMM-2 tile needs is claimed at least one group of GEMM-1 tiles before it, except at the end."""
    n1, n2 = 16, 28
    order = {tile: t for t, tile in enumerate(tiles_of([2048] * 6, 16, n1, n2))}
    for tile, t in order.items():
        if tile.phase == schedule.GEMM2 and tile.block < 80:
            assert t - max(order[schedule.Tile(0, tile.block, n)] for n in range(n1)) >= 256


def test_groups_scale_with_the_grid():
    assert [schedule.scaled_group(16, n) for n in (132, 131, 100, 66, 44, 33, 1)] == [16, 16, 13, 8, 8, 8, 8]
    assert schedule.scaled_group(1, 33) == 1


def test_blocks_run_fastest_inside_a_group():
    first = tiles_of([128 * 20], 8, 3, 2)[:8]
    assert [x.block for x in first] == list(range(8)) and {x.n for x in first} == {0}


@pytest.mark.parametrize("rows", EXPERT_ROWS.values(), ids=EXPERT_ROWS)
@pytest.mark.parametrize("table", [128, 512])
def test_find_expert(rows, table):
    rows = rows[:table]
    offs = offsets(rows, table)
    for e, n in enumerate(rows):
        for row in {offs[e], offs[e] + n // 2, offs[e] + schedule.aligned(n) - 1}:
            if n:
                assert schedule.find_expert(offs, row, table) == e


@pytest.mark.parametrize("name", SHAPES)
def test_groups_and_unrolling(name):
    problem = Problem(*SHAPES[name])
    config = TileConfig()
    unroll = config.unroll(problem)
    assert problem.k1 % unroll == 0 and problem.k2 % unroll == 0
    assert config.group(problem) >= 16


def test_traced_mapping_equals_python():
    """The same source, traced by the DSL and run on the host."""
    cutlass = pytest.importorskip("cutlass")
    import torch
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    group, n1, n2, table = 4, 3, 2, 128

    @cute.jit
    def decode(out: cute.Tensor, offs: cute.Tensor, cuts: cute.Tensor, blocks: Int32):
        size = schedule.group_size(blocks, group)
        for m in cutlass.range(schedule.CUTS, unroll=1):
            cuts[m] = schedule.cut(m, blocks, size, offs, table)
        for t in cutlass.range(blocks * (n1 + n2), unroll=1):
            tile = schedule.locate(t, cuts, n1, n2)
            out[t, 0] = tile.phase
            out[t, 1] = tile.block
            out[t, 2] = tile.n
            out[t, 3] = schedule.find_expert(offs, tile.block * 128, table)

    rows = [0, 100, 0, 700, 128, 0, 1]
    offs = offsets(rows, table)
    wanted_cuts, blocks = cuts_of(rows, group, table)
    out = torch.full((blocks * (n1 + n2), 4), -1, dtype=torch.int32)
    cuts = torch.zeros(schedule.CUTS, dtype=torch.int32)
    decode(from_dlpack(out), from_dlpack(torch.tensor(offs, dtype=torch.int32)), from_dlpack(cuts), blocks)
    wanted = [[*t, schedule.find_expert(offs, t.block * 128, table)] for t in tiles_of(rows, group, n1, n2)]
    assert cuts.tolist() == wanted_cuts and out.tolist() == wanted


def run_claims(tiles, n1, ctas, pause, rng):
    """A model of the CTAs: math warps end a tile only when the loading of the next one has begun, or a pause, or the
    end of all tiles. True if every tile ends."""
    done: dict[int, int] = {}
    head = 0

    def claim():
        nonlocal head
        head += 1
        return head - 1

    def end(tile):
        if tile is not None and tile.phase == schedule.GEMM1:
            done[tile.block] = done.get(tile.block, 0) + 1

    in_math = [None] * ctas
    wanted = [claim() for _ in range(ctas)]
    alive, still = set(range(ctas)), 0
    while alive and still < 2:
        moved = False
        for c in rng.sample(sorted(alive), len(alive)):
            if wanted[c] >= len(tiles):
                end(in_math[c])
                alive.discard(c)
                moved = True
                continue
            tile = tiles[wanted[c]]
            is_ready = tile.phase == schedule.GEMM1 or done.get(tile.block, 0) == n1
            if (is_ready or pause) and in_math[c] is not None:
                end(in_math[c])
                in_math[c] = None
                moved = True
            if is_ready:
                in_math[c], wanted[c] = tile, claim()
                moved = True
        still = 0 if moved else still + 1
    return not alive


def test_no_deadlock_with_pause_and_deadlock_without():
    rng = random.Random(0)
    stuck = 0
    for _ in range(60):
        blocks = rng.choice([1, 3, 16, 17, 40, 100])
        n1, n2, group = rng.choice([(16, 28, 16), (6, 8, 32), (2, 2, 4), (1, 1, 2), (3, 2, 1)])
        experts = rng.choice([1, 3, 8])
        tiles = tiles_of([rng.randrange(2 * blocks * 128 // experts) for _ in range(experts)], group, n1, n2)
        ctas = rng.choice([4, 33, 66, 132])
        assert run_claims(tiles, n1, ctas, True, rng)
        stuck += not run_claims(tiles, n1, ctas, False, rng)
    assert stuck > 0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("many", [False, True])
def test_shared_memory_fits(name, many):
    problem = Problem(*SHAPES[name], many_experts=many)
    assert TileConfig().why_not(problem) is None
    assert TileConfig().smem_bytes(problem) <= MAX_SMEM


def test_why_not_names_every_reason():
    reason = TileConfig(pull_batch=17, math_registers=256).why_not(Problem(100, 2048))
    for part in ("hidden: expected", "pull_batch: expected", "registers: warpgroups ask for"):
        assert part in reason
    assert "shared memory: needs" in TileConfig(stages=6).why_not(Problem(7168, 2048))
