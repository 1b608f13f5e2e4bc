"""Work of wgrad that dgrad's math warps take while dx is in flight: behind the last tile, until all of dX is there.

    scheduler   behind the last tile, the mark HOMEWARD; then, until the rows of all ranks are there, TURN tasks, then
                WGRAD tasks, each claimed from a cursor in global memory that the drain kernels go on with
    courier     announces this CTA's rows at the mark; counts TURN tasks
    TURN        TURN_COLUMNS of 128 rows of [dg; du] become their transposed e4m3 copy, as wgrad_transpose makes it: the
                same numbers in the same order. An entry of the ring is 128 columns, its stage holds them, and each math
                warp goes on its own with 16 of them
    WGRAD       a tile of dW13, as wgrad_fp8 makes it, by the main loop: the row blocks of an expert are its k-blocks

Flags (writer -> reader, scope): cursors[W13], cursors[TURNS]: claims (relaxed); cursors[TURNED]: couriers, +1 a TURN
entry -> schedulers, before their first WGRAD task (gpu), all of them. A TURN task reads what the block's `done` counter
has announced.
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum

from cute_kernels import backward, backward_epilogue, flags, loader, memory, numerics, schedule
from cute_kernels import workspace as ws
from cute_kernels.backward import FusedBackward
from cute_kernels.backward_problem import TURN_COLUMNS, TURNED, TURNS, W13, BackwardProblem
from cute_kernels.epilogues import index
from cute_kernels.loader import advance, hand_over
from cute_kernels.schedule import integer, smaller
from cute_kernels.tile_config import BLOCK, TILE_M, TILE_N, TileConfig
from cute_kernels.wgrad_config import locate_tile

HALF = 64  # columns of a TURN entry that lie together in its stage, a row in 128 bytes


class StealingBackward(FusedBackward):
    """FusedBackward whose math warps take tasks of dW13 while dx is in flight."""

    steals = True

    def __init__(self, problem: BackwardProblem, config: TileConfig):
        super().__init__(problem, config)
        # entries without a tile move on by one stage, so no tile may rely on where in the pipeline it begins
        assert problem.stolen is not None and self.unroll % config.stages

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        ids: cute.Tensor,
        w2_t: cute.Tensor,
        s2_t: cute.Tensor,
        w13_t: cute.Tensor,
        s13_t: cute.Tensor,
        dx: cute.Tensor,
        dp: cute.Tensor,
        peers: cute.Tensor,
        pool: cute.Tensor,
        pool_s: cute.Tensor,
        grad: cute.Tensor,
        grad_s: cute.Tensor,
        codes: cute.Tensor,
        p: cute.Tensor,
        offs: cute.Tensor,
        counts: cute.Tensor,
        gate_up: cute.Tensor,
        grad_bf16: cute.Tensor,
        weighted: cute.Tensor,
        dp_parts: cute.Tensor,
        factors: cute.Tensor,
        block_rows: cute.Tensor,
        order: cute.Tensor,
        cursors: cute.Tensor,
        grad_t: cute.Tensor,
        grad_t_s: cute.Tensor,
        x_t: cute.Tensor,
        x_t_s: cute.Tensor,
        dw13: cute.Tensor,
        trace: cute.Tensor,
        base: Int64,
        rank: Int32,
        top_k: Int32,
        num_experts: Int32,
        max_tokens: Int32,
        num_ctas: Int32,
        timeout: Int32,
        most_rows: Int32,
        limit: Float32,
        stream,
    ):
        """As FusedBackward, and of this rank's wgrad: factors [P] f32 of the rows of [dg; du], block_rows [P / 128],
        order [E_l], cursors [4] i32; grad_t [P / 128, 2I, 128] e4m3 with grad_t_s [P / 128, 2I] f32, to be made;
        x_t [P / 128, H, 128] e4m3 with x_t_s [P / 128, ceil(H / 256), 4] f32; dw13 [E_l * 2I, H]. Experts with more
        than most_rows rows are left to the drain kernel."""
        tensors = (dout, ids, p, s2_t, s13_t, dx, peers, pool, pool_s, grad, grad_s)
        tensors += (codes, p, offs, counts, gate_up, trace, grad_bf16, weighted, dp_parts, dp)
        sizes = (base, rank, top_k, num_experts, max_tokens, num_ctas, timeout)

        def tma(x, rows, columns):
            """Boxes of `rows` rows of 128 bytes."""
            box = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 64, columns), x.element_type, 1)
            op = cpasync.CopyBulkTensorTileG2SOp()
            return cpasync.make_tiled_tma_atom(op, x, cute.slice_(box, (None, None, 0)), (rows, columns))

        def flat(x):
            shape = (x.shape[0] * x.shape[1], BLOCK)
            return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=(BLOCK, 1)))

        maps = (*tma(flat(grad_t), TILE_M, BLOCK), *tma(flat(x_t), TILE_N // 4, BLOCK), *tma(grad_bf16, TILE_M, HALF))
        more = (maps, factors, block_rows, order, cursors, grad_t, grad_t_s, x_t_s, dw13, most_rows)
        self.start((pool, w2_t, grad, w13_t), tensors, sizes, limit, stream, more)

    def bind_more(self, k, more):
        k.wgrad_maps, k.factors, k.block_rows, k.rows_order, k.cursors = more[:5]
        k.grad_t, k.grad_t_s, k.x_t_s, k.dw13, k.most_rows = more[5:]
        inter, hidden = k.problem.intermediate, k.problem.hidden
        k.pieces_of_block = -(-2 * inter // TURN_COLUMNS)
        k.m_tiles, k.n_tiles = 2 * inter // TILE_M, -(-hidden // TILE_N)

    def after_tiles(self, k, turn):
        return after_tiles(k, turn)

    def load_stolen(self, k, kind, e, row, n, slot, stage, phase):
        return load_stolen(k, kind, e, row, n, slot, stage, phase)

    def between(self, k, t, kind, slot, stage):
        between(k, t, kind, slot, stage)

    def stolen_done(self, k, kind, sent):
        return stolen_done(k, kind, sent)

    def await_end(self, k, barrier, lap, sent):
        if const_expr(self.problem.delay_us > 0):
            return await_end(k, barrier, lap, sent)
        cute.arch.mbarrier_wait(barrier, lap)
        return sent

    def finish(self, k, t, wave, kind, slot, stage):
        finish(k, t, wave, kind, slot, stage)


@cute.jit
def finish(k, t, wave, kind, slot, stage):
    """Epilogues of dgrad's tiles, and of a tile of dW13."""
    if kind == schedule.WGRAD:
        store_tile(k, t, wave, slot)
    else:
        backward_epilogue.backward(k, t, wave, kind, slot, stage)


# ---------------------------------------------------------------- scheduler


def cursor(k, which) -> Int64:
    return k.cursors.iterator.toint() + 4 * which


@cute.jit
def all_home(k):
    """1 once the rows of dX of all ranks are there. Relaxed: whoever reads them acquires the flag."""
    got = flags.load_relaxed(flags.flag(k.base, ws.HOME + k.parity), "sys")
    return Int32(got == k.num_ranks * k.num_ctas)


@cute.jit
def claim(k, which):
    t = Int32(0)
    if k.lane == 0:
        t = flags.add_fetch(cursor(k, which), 1)
    return cute.arch.shuffle_sync(t, 0)


@cute.jit
def after_tiles(k, turn: Int32):
    """Everything behind the last tile. A task that is claimed is done."""
    blocks = Int32(k.offs[k.num_local]) // TILE_M
    # 0: the end, at once in a call without rows; 1: TURN tasks; 2: WGRAD tasks
    state = (1 - flags.is_aborted(k.watch)) * integer(blocks > 0)
    if state == 1:
        turn = hand_over(k, turn, Int32(schedule.HOMEWARD), Int32(0), Int32(0), Int32(0))
    pieces = Int32(k.pieces_of_block)
    done = k.base + k.layout.done + Int64(k.parity * k.max_blocks) * 4
    while state == 1:
        if all_home(k) == 1:
            state = Int32(0)
        else:
            u = claim(k, TURNS)
            if u < pieces * blocks:
                block = u // pieces
                # writers: the couriers, one count for each of the block's GEMM-A tiles
                ok = flags.wait_for(k.watch, done + Int64(block) * 4, Int32(k.problem.n1), "gpu", flags.IN_DONE, block)
                if ok == 1:
                    n = (u - block * pieces) * (TURN_COLUMNS // BLOCK)
                    end = smaller(n + TURN_COLUMNS // BLOCK, Int32(k.m_tiles))
                    rows = Int32(k.block_rows[block])
                    while n < end:
                        turn = hand_over(k, turn, Int32(schedule.TURN), rows, block * TILE_M, n)
                        n += 1
                else:
                    state = Int32(0)
            else:
                state = Int32(2)
    if state == 2:
        # writers: the couriers, one count a TURN entry. Its end does not depend on who waits here
        while (flags.load_acquire(cursor(k, TURNED), "gpu") != blocks * k.m_tiles) & (state == 2):
            flags.nanosleep(flags.PAUSE_NS)
            state = state * (1 - all_home(k)) * (1 - flags.is_aborted(k.watch))
    tiles = Int32(k.m_tiles * k.n_tiles)
    order, counts = k.rows_order, k.counts_g
    while state == 2:
        if all_home(k) == 1:
            state = Int32(0)
        else:
            t = claim(k, W13)
            place = t // tiles
            e, rows = Int32(0), Int32(0)
            if place < k.num_local:
                e = Int32(order[place])
                rows = Int32(counts[e])
            if (rows > 0) & (rows <= k.most_rows):
                m, n = locate_tile(t - place * tiles, k.m_tiles, k.n_tiles, cutlass.min)
                turn = hand_over(k, turn, Int32(schedule.WGRAD), e, m, n)
            else:
                # tasks are ordered by rows: nobody finds a shorter one behind, so the cursor ends where they do
                if k.lane == 0:
                    flags.add_relaxed(cursor(k, W13), -1, "gpu")
                state = Int32(0)
    return turn


# ---------------------------------------------------------------- loader


@cute.jit
def load_stolen(k, kind, e: Int32, row: Int32, n: Int32, slot: Int32, stage: Int32, phase: Int32):
    """A tile of dW13 (row: its M tile), 128 columns of [dg; du] (e: how many of the rows are real), or nothing."""
    ring = k.ring
    if kind == schedule.WGRAD:
        stage, phase = load_tile(k, e, row, n, slot, stage, phase)
    else:
        cute.arch.mbarrier_wait(k.empty + stage, phase ^ 1)
        if k.lane == 0:
            ring[0, slot], ring[1, slot], ring[2, slot], ring[3, slot] = row, n, Int32(kind), e
        cute.arch.sync_warp()
        if kind == schedule.TURN:
            load_columns(k, row, n, stage)
        else:
            if k.lane == 0:
                cute.arch.mbarrier_arrive(k.full + stage)
        stage, phase = advance(stage, phase, k.config.stages)
    return stage, phase


@cute.jit
def load_columns(k, row: Int32, n: Int32, stage: Int32):
    """128 rows x 128 columns of [dg; du] into the place of B, two halves of 64 columns, and the rows' factors into that
    of A's scales."""
    tma, tensor = k.wgrad_maps[4:]
    layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, 64, HALF), BFloat16, 2 * k.config.stages)
    start = cute.make_ptr(BFloat16, k.b_base, cute.AddressSpace.smem, assumed_align=1024)
    to = cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=BFloat16), layout.outer)
    boxes = cute.group_modes(cute.local_tile(tensor, (TILE_M, HALF), (None, None)), 0, 2)
    tAsA, tAgA = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(to, 0, 2), boxes)
    copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=TILE_M * 32)
    bar = k.full + stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, TILE_M * (2 * BLOCK + 4))
        factors = cute.make_tensor((k.factors.iterator + row).align(16), cute.make_layout(TILE_M))
        cute.copy(copy, factors, k.sSA[None, stage], mbar_ptr=bar)
    for half in range_constexpr(2):
        cute.copy(tma, tAgA[None, row // TILE_M, 2 * n + half], tAsA[None, 2 * stage + half], tma_bar_ptr=bar)


@cute.jit
def load_tile(k, e: Int32, m: Int32, n: Int32, slot: Int32, stage: Int32, phase: Int32):
    """Row blocks of expert e as k-blocks, rounded up to the main loop's body: behind the last one zeros, which TMA
    gives for boxes behind the end."""

    def partition(tma, tensor, s, rows):
        g = cute.group_modes(cute.local_tile(tensor, (rows, BLOCK), (None, None)), 0, 2)
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), g)

    tma_a, tensor_a, tma_b, tensor_b = k.wgrad_maps[:4]
    tAsA, tAgA = partition(tma_a, tensor_a, k.sA, TILE_M)
    quarter = TILE_N // 4
    parts = [
        partition(tma_b, tensor_b, cute.local_tile(k.sB, (quarter, BLOCK, k.config.stages), (i, 0, 0)), quarter)
        for i in range(4)
    ]
    tBgB = parts[0][1]
    copy_a = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=TILE_M * 32)
    copy_b = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=128)
    counts, ring, stage_bytes = k.counts_g, k.ring, k.config.stage_bytes()
    steps = (Int32(counts[e]) + (BLOCK - 1)) // BLOCK
    bodies = (steps + (k.unroll - 1)) // k.unroll
    block = Int32(k.offs[e]) // BLOCK
    for kb in cutlass.range(bodies * k.unroll, unroll=1):
        bar = k.full + stage
        cute.arch.mbarrier_wait(k.empty + stage, phase ^ 1)
        box = block
        if kb >= steps:
            box = Int32(k.max_blocks)
            block -= 1
        if kb == 0:
            with cute.arch.elect_one():
                ring[0, slot] = e * (2 * k.problem.intermediate) + m * TILE_M
                ring[1, slot] = n
                ring[2, slot] = Int32(schedule.WGRAD)
                ring[3, slot] = bodies
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, stage_bytes)
            ga = k.grad_t_s.iterator + (Int64(block) * (2 * k.problem.intermediate) + m * TILE_M)
            cute.copy(
                copy_a, cute.make_tensor(ga.align(16), cute.make_layout(TILE_M)), k.sSA[None, stage], mbar_ptr=bar
            )
            gb = k.x_t_s.iterator + (block * k.n_tiles + n) * 4
            cute.copy(copy_b, cute.make_tensor(gb.align(16), cute.make_layout(4)), k.sSB[None, stage], mbar_ptr=bar)
        cute.copy(tma_a, tAgA[None, box * k.m_tiles + m, 0], tAsA[None, stage], tma_bar_ptr=bar)
        # the tile's columns in the main loop's order: wave w has 64 of each block of 128. Columns behind H are
        # another row block's: nobody stores them
        first = box * (k.problem.hidden // quarter) + n * 4
        for i in range_constexpr(4):
            column = (0, 2, 1, 3)[i]
            cute.copy(tma_b, tBgB[None, first + column, 0], parts[i][0][None, stage], tma_bar_ptr=bar)
        block += 1
        stage, phase = advance(stage, phase, k.config.stages)
    return stage, phase


# ---------------------------------------------------------------- courier


@cute.jit
def await_end(k, barrier, lap: Int32, sent: Int32):
    """Waits for an entry's end, for tests with a delay; meanwhile announces this CTA's rows once that is over. sent:
    0, SENT, or when they may be announced."""
    there = Int32(0)
    while there == 0:
        if (sent != 0) & (sent != loader.SENT):
            if cute.arch.shuffle_sync(flags.now() - sent, 0) >= 0:
                loader.announce_home(k)
                sent = Int32(loader.SENT)
        there = cute.arch.shuffle_sync(Int32(cute.arch.mbarrier_test_wait(barrier, lap)), 0)
    return sent


@cute.jit
def stolen_done(k, kind, sent: Int32):
    """An entry of the ring has ended."""
    if kind == schedule.HOMEWARD:
        if const_expr(k.problem.delay_us > 0):
            sent = backward_epilogue.deadline(k)
        else:
            loader.announce_home(k)
            sent = Int32(loader.SENT)
    if kind == schedule.TURN:
        if k.lane == 0:
            # for the stores of the copy by all math warps; reader: after_tiles of every CTA of this rank
            flags.add_release(cursor(k, TURNED), 1, "gpu")
    return sent


# ---------------------------------------------------------------- math: a piece of the copy


def here(value) -> Int32:
    """The same value, as something new to the compiler: what is computed from it stays where it is, and takes no
    register of the main loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(value)])


@cute.jit
def between(k, t, kind, slot, stage):
    if kind == schedule.TURN:
        turn_columns(k, t, Int32(k.ring[0, slot]), Int32(k.ring[1, slot]), Int32(k.ring[3, slot]), stage)


@cute.jit
def turn_columns(k, t, row: Int32, n: Int32, real: Int32, stage: Int32):
    """128 columns of 128 rows, of which the first `real` are real. A warp has 16 columns, a lane 8 of them and 8 rows.

    In the stage a row is 128 bytes, its 16-byte pieces swizzled by the row. Lanes read their rows in different orders
    (the j-th is row j ^ turn), or all would read from a quarter of the banks."""
    lane, warp = here(k.lane), here(t.tid // 32)
    side, first = lane % 2, lane // 2 * 8
    turn = lane // 2 % 4 * 2
    piece = warp % 4 * 2 + side
    start = k.b_base + stage * (2 * TILE_M * BLOCK) + warp // 4 * (2 * TILE_M * HALF) + first * (2 * HALF)
    factors = k.sSA
    values = []
    for j in range_constexpr(8):
        r = j ^ turn
        words = memory.load_shared(start + r * (2 * HALF) + (piece ^ r) * 16)
        # padding and its factors may be anything
        mask = -integer(first + r < real)
        factor = numerics.as_float(as_bits(factors[first + r, stage]) & mask)
        values.append(unpacked([w & mask for w in words], factor))
    column = n * BLOCK + warp * 16 + side * 8
    at = Int64(row // TILE_M) * (2 * k.problem.intermediate) + column
    inv = scale_columns(lane, values, k.grad_t_s.iterator.toint() + at * 4)
    to = k.grad_t.iterator.toint() + at * BLOCK + first
    # row 4 w + b is byte (4 w + b) ^ turn of the 8 as they were read
    places = [Int32(pick) ^ (turn * 0x1111) for pick in (0x3210, 0x7654)]
    for c in range_constexpr(8):
        q = numerics.to_e4m3([values[j][c] for j in range(8)], cute.arch.shuffle_sync(inv, 4 * c + side))
        words = cute.recast_tensor(q, Int32)
        low, high = words[0], words[1]
        for w in range_constexpr(2):
            words[w] = cute.arch.inline_ptx(
                "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
                write_only_types=[Int32],
                read_only_args=[low, high, places[w]],
            )
        memory.store_vector(to + c * BLOCK, q)
    # ordinary stores here; TMA and bulk copies of WGRAD tasks' loaders read them, behind cursors[TURNED]
    cute.arch.fence_proxy("async.global")


def as_bits(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def unpacked(words, factor):
    """8 values of a row, times its factor."""
    values = []
    for word in words:
        values += [numerics.as_float(word << 16), numerics.as_float(word & Int32(-0x10000))]
    return [v * factor for v in values]


@cute.jit
def scale_columns(lane, values, at: Int64):
    """One scale for the 128 rows of each column: lane 4 c + side finds that of this side's column c. Its reciprocal."""
    tops = []
    for c in range_constexpr(8):
        tops.append(numerics.abs_max([values[j][c] for j in range(8)], Float32(0.0)))
    for step in (16, 8, 4):
        half = len(tops) // 2
        is_upper = lane & step != 0
        kept = []
        for c in range_constexpr(half):
            mine, theirs = tops[c], tops[c + half]
            if is_upper:
                mine, theirs = theirs, mine
            kept.append(cute.arch.fmax(mine, cute.arch.shuffle_sync_bfly(theirs, step)))
        tops = kept
    top = cute.arch.fmax(tops[0], cute.arch.shuffle_sync_bfly(tops[0], 2))
    scale = numerics.scale_of(top, False)
    if lane & 2 == 0:
        cute.arch.store(memory.float_at(at + lane // 4 * 4), scale)
    return numerics.reciprocal(scale)


# ---------------------------------------------------------------- math: a tile of dW13


@cute.jit
def store_tile(k, t, wave, slot):
    """64 columns of each of the tile's two blocks of 128; a thread has 2 neighbours of each 8."""
    row, n = Int32(k.ring[0, slot]), Int32(k.ring[1, slot])
    hidden, row_of_tile, quad = k.problem.hidden, here(t.row), here(t.quad)
    size = const_expr(k.dw13.element_type.width // 8)
    at = k.dw13.iterator.toint() + (Int64(row + row_of_tile) * hidden + (n * TILE_N + wave * 64)) * size
    for block in range_constexpr(2):
        if const_expr(block == 0 or hidden % TILE_N == 0):
            store_block(k, quad, t.accs[wave], block, at)
        else:
            if n * TILE_N + 128 < hidden:
                store_block(k, quad, t.accs[wave], block, at)


@cute.jit
def store_block(k, quad, acc, block, at: Int64):
    hidden = k.problem.hidden
    for half in range_constexpr(2):
        if const_expr(k.dw13.element_type is BFloat16):
            line = at + (half * 8 * hidden + block * 128) * 2 + quad * 16
            for g in range_constexpr(2):
                packed = numerics.pack([acc[i] for i in index(block, g, half)], BFloat16)
                memory.store_vector(line + g * 64, turned_quad(quad, packed))
        else:
            line = at + (half * 8 * hidden + block * 128) * 4 + quad * 8
            for j in range_constexpr(8):
                pair = cute.make_rmem_tensor(2, Float32)
                for b in range_constexpr(2):
                    pair[b] = acc[32 * block + 4 * j + 2 * half + b]
                memory.store_vector(line + j * 32, pair)


@cute.jit
def turned_quad(quad, packed):
    """Word j of lane p of a quad, its columns 2 p of the j-th 8, becomes word p of lane j: 8 neighbouring columns."""
    words = cute.recast_tensor(packed, Int32)
    w = [Int32(words[i]) for i in range(4)]
    for step in (1, 2):
        is_upper = quad & step != 0
        for i in range_constexpr(4):
            if const_expr(i & step == 0):
                keep, send = w[i], w[i + step]
                if is_upper:
                    keep, send = send, keep
                got = cute.arch.shuffle_sync_bfly(send, step)
                low, high = keep, got
                if is_upper:
                    low, high = got, keep
                w[i], w[i + step] = low, high
    for i in range_constexpr(4):
        words[i] = w[i]
    return packed


def fake_arguments(problem: BackwardProblem, for_launch: bool = True) -> tuple:
    """Arguments for `cute.compile`."""
    tensor = backward.fake_tensor
    blocks = cute.sym_int()
    width = 2 * problem.intermediate
    more = (
        tensor(Float32, cute.sym_int(divisibility=128)),
        tensor(Int32, blocks, align=4),
        tensor(Int32, cute.sym_int(), align=4),
        tensor(Int32, 4, align=4),
        tensor(Float8E4M3FN, blocks, width, BLOCK),
        tensor(Float32, blocks, width),
        tensor(Float8E4M3FN, blocks, problem.hidden, BLOCK),
        tensor(Float32, blocks, problem.n2, 4),
        tensor(BFloat16 if problem.stolen == "bfloat16" else Float32, cute.sym_int(divisibility=128), problem.hidden),
    )
    given = backward.fake_arguments(problem, for_launch)
    return (*given[:21], *more, *given[21:-2], Int32(1), *given[-2:])
