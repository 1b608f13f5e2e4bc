"""Scheduler, loader and courier, one warp each: from claimed numbers to tiles in shared memory, and their ends.

    scheduler --todo (ready / taken)--> loader --ring, stages (full / empty)--> math warps --ended--> courier
    courier --free--> loader

The scheduler claims a number, waits for the flags of its tile and hands it over while the tile before is being loaded.
The loader describes each tile in a small ring, covered by the barrier of the tile's first k-block. The math warps end a
tile only when the next one has begun; the courier then announces what the tile has made and frees its ring entry.
"""

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from cute_kernels import flags, memory, schedule, trace
from cute_kernels import workspace as ws
from cute_kernels.tile_config import BLOCK, TILE_M, TILE_N

SENT = 1  # the courier has announced this CTA's rows
LOOKS = 64  # at `ready`, before the loader inserts a pause
WEIGHT_BLOCK = TILE_N * BLOCK  # bytes of a k-block of a tile of weights, contiguous, as shared memory holds them


# ---------------------------------------------------------------- scheduler


@cute.jit
def scheduler(k):
    """Claims tiles until there are none left, or until a flag does not come."""
    problem = k.problem
    blocks = Int32(k.offs[k.num_local]) // TILE_M
    tiles = schedule.num_tiles(blocks, problem.n1, problem.n2)
    arrive = k.base + k.layout.arrive + Int64(k.parity * k.max_blocks) * 4
    done = k.base + k.layout.done + Int64(k.parity * k.max_blocks) * 4
    turn = Int32(0)
    t = claim(k)
    while t < tiles:
        tile = schedule.locate(t, k.cuts, problem.n1, problem.n2)
        phase, block, n = tile.phase, tile.block, tile.n
        ok = Int32(1)
        since = trace.begin(k)
        if phase == schedule.GEMM1:
            # writers: the pulling warps of all CTAs, and their prologues for padding rows
            rows = Int32(TILE_M * k.pieces)
            ok = flags.wait_for(k.watch, arrive + Int64(block) * 4, rows, "gpu", flags.IN_ARRIVE, block)
        else:
            # writers: the couriers, one count for each of the block's GEMM-1 tiles
            ok = flags.wait_for(k.watch, done + Int64(block) * 4, Int32(problem.n1), "gpu", flags.IN_DONE, block)
        if const_expr(k.config.trace):
            if k.lane == 0:
                trace.event(k, trace.SCHEDULER, trace.WAIT_ROWS + phase, since, block, n)
        if ok == 1:
            e = schedule.find_expert(k.offs, block * TILE_M, problem.expert_table)
            is_half = Int32(0)
            if const_expr(k.config.half_tiles and not problem.save):
                if blocks < 2 * k.num_local:
                    # padding is at a segment's end; the codes were released with the rows
                    is_half = Int32(flags.load_cg(k.codes_base + Int64(block * TILE_M + TILE_M // 2) * 4) < 0)
            turn = hand_over(k, turn, phase, e, block * TILE_M + is_half, n)
            t = claim(k)
        else:
            t = tiles
    if const_expr(k.steals):
        turn = k.direction.after_tiles(k, turn)
    turn = hand_over(k, turn, Int32(schedule.END), Int32(0), Int32(0), Int32(0))


@cute.jit
def claim(k):
    t = Int32(0)
    if k.lane == 0:
        t = flags.add_fetch(flags.flag(k.base, ws.CLAIM + k.parity), 1)
    return cute.arch.shuffle_sync(t, 0)


@cute.jit
def hand_over(k, turn: Int32, phase: Int32, e: Int32, row: Int32, n: Int32):
    """row: first of the block, + 1 if at most 64 of its rows are real. Returns when the loader has taken it, that is,
    has begun to load it: only then is the next tile claimed."""
    todo = k.todo
    if k.lane == 0:
        todo[0], todo[1], todo[2], todo[3] = phase, e, row, n
        cute.arch.mbarrier_arrive(k.ready)
    cute.arch.mbarrier_wait(k.taken, turn)
    return turn ^ 1


# ---------------------------------------------------------------- loader


@cute.jit
def loader(k, maps1, maps2):
    """maps, of GEMM 1 and 2: TMA atom and tensor of A, address of the weights, the same of A by half blocks."""
    problem = k.problem
    stage, phase, slot, lap, turn = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    load_stolen = k.direction.load_stolen
    cute.arch.mbarrier_wait(k.ready, 0)
    kind = Int32(k.todo[0])
    while kind >= 0:
        e, row, n = Int32(k.todo[1]), Int32(k.todo[2]), Int32(k.todo[3])
        cute.arch.sync_warp()
        if k.lane == 0:
            cute.arch.mbarrier_arrive(k.taken)
        # the scheduler has acquired what other CTAs wrote with ordinary stores; TMA reads it
        cute.arch.fence_proxy("async.global")
        cute.arch.mbarrier_wait(k.free + slot, lap ^ 1)
        since = trace.begin(k)
        if kind == schedule.GEMM1:
            stage, phase = load_tile(k, maps1, problem.k1, problem.n1, schedule.GEMM1, e, row, n, slot, stage, phase)
        else:
            if const_expr(k.steals):
                if kind == schedule.GEMM2:
                    stage, phase = load_tile(
                        k, maps2, problem.k2, problem.n2, schedule.GEMM2, e, row, n, slot, stage, phase
                    )
                else:
                    stage, phase = load_stolen(k, kind, e, row, n, slot, stage, phase)
            else:
                stage, phase = load_tile(
                    k, maps2, problem.k2, problem.n2, schedule.GEMM2, e, row, n, slot, stage, phase
                )
        slot, lap = advance(slot, lap, k.config.ring)
        turn = turn ^ 1
        if const_expr(k.config.trace):
            if k.lane == 0:
                trace.event(k, trace.LOADER, trace.of_tile(kind), since, row // TILE_M, n)
        since = trace.begin(k)
        if is_late(k, turn) == 1:
            cute.arch.mbarrier_wait(k.free + slot, lap ^ 1)
            stage, phase = pause(k, slot, stage, phase)
            slot, lap = advance(slot, lap, k.config.ring)
        cute.arch.mbarrier_wait(k.ready, turn)
        if const_expr(k.config.trace):
            if k.lane == 0:
                trace.event(k, trace.LOADER, trace.WAIT_NEXT, since)
        kind = Int32(k.todo[0])
    if k.lane == 0:
        cute.arch.mbarrier_arrive(k.taken)  # lets the scheduler leave
    cute.arch.mbarrier_wait(k.free + slot, lap ^ 1)
    cute.arch.mbarrier_wait(k.empty + stage, phase ^ 1)
    ring = k.ring
    if k.lane == 0:
        ring[2, slot] = Int32(schedule.END)
        cute.arch.mbarrier_arrive(k.full + stage)


@cute.jit
def prefetch_weights(k, weights: Int64):
    """Brings the beginning of the weights of tile number `cta` into L2 while the prologue runs, guessing that all
    experts have equally many rows. A wrong guess costs nothing but the traffic."""
    problem = k.problem
    each = cutlass.max((k.num_slots * k.num_ranks // k.num_experts + 127) // 128, Int32(1))
    group = schedule.scaled_group(k.config.group(problem), k.num_ctas)
    size = cutlass.min(group, each * k.num_local)
    n = k.cta // size
    num_bytes = min(k.config.prefetch_blocks, problem.k1) * WEIGHT_BLOCK
    if n < problem.n1:
        at = weights + (Int64((k.cta - n * size) // each) * problem.n1 + n) * (problem.k1 * WEIGHT_BLOCK)
        with cute.arch.elect_one():
            memory.bulk_prefetch(at, num_bytes)


@cute.jit
def is_late(k, turn: Int32):
    """1 if the next tile is still not there after a short while."""
    looks = Int32(LOOKS)
    there = Int32(0)
    while (there == 0) & (looks > 0):
        there = cute.arch.shuffle_sync(Int32(cute.arch.mbarrier_test_wait(k.ready, turn)), 0)
        looks -= 1
    return 1 - there


@cute.jit
def advance(index: Int32, lap: Int32, size):
    """Next place of a ring of `size`, and the parity of its lap."""
    index += 1
    if index == size:
        index = Int32(0)
        lap = lap ^ 1
    return index, lap


@cute.jit
def pause(k, slot: Int32, stage: Int32, phase: Int32):
    """A tile of one main-loop body on whatever the stages hold, whose result is dropped. The math warps end a tile only
    once the next one has begun; if that waited for theirs, directly or around a circle of CTAs, nobody would end."""
    ring = k.ring
    i = Int32(0)
    while i < k.unroll:
        cute.arch.mbarrier_wait(k.empty + stage, phase ^ 1)
        if k.lane == 0:
            if i == 0:
                ring[2, slot] = Int32(schedule.PAUSE)
            cute.arch.mbarrier_arrive(k.full + stage)
        stage, phase = advance(stage, phase, k.config.stages)
        i += 1
    return stage, phase


@cute.jit
def load_tile(k, maps, k_tiles, n_tiles, kind, e: Int32, row: Int32, n: Int32, slot: Int32, stage: Int32, phase: Int32):
    """One tile's k-blocks; on the first one's barrier also 128 words for the epilogue (weights, or row codes)."""

    def partition(tma, tensor, s, rows):
        g = cute.group_modes(cute.local_tile(tensor, (rows, BLOCK), (None, None)), 0, 2)
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), g)

    tma_a, tensor_a, weights, tma_h, tensor_h = maps
    tAsA, tAgA = partition(tma_a, tensor_a, k.sA, TILE_M)
    upper = cute.local_tile(k.sA, (TILE_M // 2, BLOCK, k.config.stages), (0, 0, 0))
    tHsA, tHgA = partition(tma_h, tensor_h, upper, TILE_M // 2)
    is_half = row % 2
    row -= is_half
    scales_a, scales_b, extra = k.pool_s, k.s13, k.p_words
    if const_expr(kind == schedule.GEMM2):
        scales_a, scales_b, extra = k.hs, k.s2, k.codes
    copy_a = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=TILE_M * 32)
    copy_b = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=128)
    copy_x = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32, num_bits_per_copy=TILE_M * 32)
    a_box = row // TILE_M
    gw = weights + (Int64(e) * n_tiles + n) * (k_tiles * WEIGHT_BLOCK)
    rows = scales_a.shape[1]
    ga = scales_a.iterator + row
    gb = scales_b.iterator + (Int64(e) * (k_tiles * n_tiles) + n) * 4
    ring, stage_bytes = k.ring, k.config.stage_bytes() - is_half * (TILE_M // 2 * BLOCK)
    for kb in cutlass.range(k_tiles, unroll=1):
        bar = k.full + stage
        cute.arch.mbarrier_wait(k.empty + stage, phase ^ 1)
        more = Int32(0)
        if kb == 0:
            with cute.arch.elect_one():
                ring[0, slot] = row
                ring[1, slot] = n
                ring[2, slot] = Int32(kind)
            more = Int32(TILE_M * 4)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, stage_bytes + more)
            source_a = cute.make_tensor((ga + Int64(kb) * rows).align(16), cute.make_layout(TILE_M))
            cute.copy(copy_a, source_a, k.sSA[None, stage], mbar_ptr=bar)
            source_b = cute.make_tensor((gb + kb * (n_tiles * 4)).align(16), cute.make_layout(4))
            cute.copy(copy_b, source_b, k.sSB[None, stage], mbar_ptr=bar)
            memory.bulk_load(k.b_base + stage * WEIGHT_BLOCK, gw + kb * WEIGHT_BLOCK, WEIGHT_BLOCK, bar)
        if kb == 0:
            with cute.arch.elect_one():
                source_x = cute.make_tensor((extra.iterator + row).align(16), cute.make_layout(TILE_M))
                cute.copy(copy_x, source_x, k.sX[None, slot], mbar_ptr=bar)
        if is_half == 1:
            cute.copy(tma_h, tHgA[None, a_box * 2, kb], tHsA[None, stage], tma_bar_ptr=bar)
        else:
            cute.copy(tma_a, tAgA[None, a_box, kb], tAsA[None, stage], tma_bar_ptr=bar)
        stage, phase = advance(stage, phase, k.config.stages)
    return stage, phase


# ---------------------------------------------------------------- courier


@cute.jit
def courier(k):
    """Follows the tile ring behind the math warps: counts ended GEMM-1 tiles, frees entries; at the end tells all ranks
    that this CTA has stored everything that it stores for this call."""
    done = k.base + k.layout.done + Int64(k.parity * k.max_blocks) * 4
    slot, lap = Int32(0), Int32(0)
    tile_done, stolen_done, await_end = k.direction.tile_done, k.direction.stolen_done, k.direction.await_end
    before_home = k.direction.before_home
    going, sent = Int32(1), Int32(0)
    while going == 1:
        if const_expr(k.steals):
            sent = await_end(k, k.ended + slot, lap, sent)
        else:
            cute.arch.mbarrier_wait(k.ended + slot, lap)
        kind, row = Int32(k.ring[2, slot]), Int32(k.ring[0, slot])
        cute.arch.sync_warp()
        since = trace.begin(k)
        if kind == schedule.GEMM1:
            tile_done(k, done + Int64(row // TILE_M) * 4, row)
        if const_expr(k.steals):
            sent = stolen_done(k, kind, sent)
        if k.lane == 0:
            cute.arch.mbarrier_arrive(k.free + slot)
            trace.event(k, trace.COURIER, trace.ANNOUNCE, since, row // TILE_M)
        slot, lap = advance(slot, lap, k.config.ring)
        if kind == schedule.END:
            going = Int32(0)
    if sent != SENT:
        before_home(k, sent)
        announce_home(k)


@cute.jit
def announce_home(k):
    """Tells all ranks that this CTA has stored its last row of y. By all lanes of the courier."""
    # a CTA that gave up its tiles has seen or raised the abort word; without its sign no rank's HOME is complete
    aborted = flags.is_aborted(k.watch)
    if (k.lane < k.num_ranks) & (aborted == 0):
        peers = k.peers
        # for the rows of y stored by all math warps; reader: the combine of rank k.lane
        flags.add_release(flags.flag(peers[k.lane], ws.HOME + k.parity), 1, "sys")
